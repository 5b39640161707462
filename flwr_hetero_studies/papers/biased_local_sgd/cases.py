"""What the paper does not vary: strength of the bias, private data, budgets on ten devices."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.biased_local_sgd.app import BiasedSettings, app
from flwr_hetero_studies.papers.biased_local_sgd.runs import DECAYS, TAU_F
from flwr_hetero_studies.tasks import central_evaluate, initial_arrays

FLEETS = {"2+8": (8, 2), "1+1": (1, 1)}
"""Name to numbers of fast and slow nodes."""
BATCH = {"2+8": {"batch-size": 32}, "1+1": {"batch-size": 128, "learning-rate": 0.2}}
SHARED = {"shared-data": True}
BIASES = ("unbalanced", "sampling-bias", "weights-bias", "biased")
EVALUATIONS = 5
"""Measurements of the global model in a run, beside the first and the last."""
SETTINGS = {"samples": 6000, "epochs": 10.0, "model": "mlp"}
FAST = {"samples": 1000, "epochs": 2.0}
FAST_CASES = ["knobs/lambda 0.1", "links/balanced", "federated/fednova*"]
ALL_TEST = 100_000


def case(
    experiment: str, name: str, algorithm: str, fleet: str = "2+8", slow: int = 1, **more: Any
) -> Case:
    described = {"experiment": experiment, "name": name, "algorithm": algorithm, "fleet": fleet}
    return described | {"slow_steps": slow} | BATCH.get(fleet, {}) | more


def described() -> Iterator[Case]:
    """Yield all cases without data set, samples, epochs and model."""
    # Lambda, and allocations smaller than the paper's N_F, which strengthen the bias.
    for fraction in (0.1, 0.3, 0.5, 0.8, 1.0):
        more = SHARED | {"high-loss-fraction": fraction}
        yield case("knobs", f"lambda {fraction}", "biased", "1+1", 16, **more)
    for share in (0.9, 0.7, 0.5, 0.3):
        yield case("knobs", f"share {share}", "biased", share=share, **SHARED)
    # Weight by steps or as FedNova, on private data, equal and unequal.
    for partition in ("iid", "dirichlet"):
        for name in (*BIASES, "fednova"):
            more = {"partition": partition, "alpha": 0.3}
            yield case("federated", f"{name}, {partition}", name, slow=4, **more)
    # Budgets on ten different devices, half of them with slow links, at equal time.
    mixed = {"fleet": "mixed", "batch-size": 32, "budget_s": 30.0, "model": "cnn"}
    yield case("links", "balanced", "balanced", budget="two-class", **mixed)
    yield case("links", "biased, two classes", "biased", budget="two-class", **mixed)
    yield case("links", "biased, deadline", "biased", budget="deadline", **mixed)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    for seed in options.seeds_or(range(3)):
        for one in described():
            yield Trial({"data": options.data, **options.settings} | one, seed)


def fleet(case: Case) -> list[DeviceProfile]:
    """Make fast and slow nodes, or ten from fast to slow, every other one with a slow link."""
    if case["fleet"] == "mixed":
        links = [{"uplink_mbps": mbps, "downlink_mbps": mbps} for mbps in (100.0, 1.0)]
        return [DeviceProfile(TAU_F ** (1 - i / 9), **links[i % 2]) for i in range(10)]
    num_fast, num_slow = FLEETS[case["fleet"]]
    fast = DeviceProfile(TAU_F / case["slow_steps"], name="fast")
    return [fast] * num_fast + [DeviceProfile(name="slow")] * num_slow


OURS = ("experiment", "name", "data", "samples", "epochs", "fleet", "slow_steps", "budget_s")
"""Keys of a case that are no keys of the app's run-config."""


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    samples = 1438 if data.source == "digits" else case["samples"]
    config = {key: value for key, value in case.items() if key not in OURS}
    config = {"num-server-rounds": 10**6, "partition": "iid", "seed": seed, **config}
    config |= {"fast-steps": TAU_F, "dataset": data.first(samples, ALL_TEST)}
    settings = BiasedSettings.from_run_config(config)
    grid = LocalGrid(app, fleet(case), seed=seed, run_config=config)
    budget_s = case.get("budget_s", inf)
    epochs = case["epochs"] if budget_s == inf else inf
    progress = BudgetedRun(settings, grid, samples, epochs, budget_s)
    arrays, rounds = initial_arrays(settings), settings.num_server_rounds
    progress.start(grid, arrays, rounds, evaluate_fn=progress.evaluate)
    return {"metrics": progress.points[-1]}


class BudgetedRun(Wrapper):
    """End a run after epochs or virtual time; lower the learning rate on the way; note points."""

    def __init__(
        self, settings: Any, grid: LocalGrid, samples: int, epochs: float, budget_s: float
    ) -> None:
        super().__init__(settings.strategy())
        self.settings, self.grid, self.samples = settings, grid, samples
        self.epochs, self.budget_s = epochs, budget_s
        self.measure = central_evaluate(settings)
        self.epochs_done = 0.0
        self.points: list[dict[str, float]] = []

    @property
    def used(self) -> float:
        return max(self.epochs_done / self.epochs, self.fleet.clock.virtual_s / self.budget_s)

    def on_replies(self, context: Any, replies: Sequence[Any]) -> Any:
        for reply in replies:
            (metrics,) = reply.content.metric_records.values()
            self.epochs_done += float(metrics[keys.EXAMPLES_PROCESSED]) / self.samples
        rate = self.settings.learning_rate * 0.1 ** sum(self.used >= part for part in DECAYS)
        for node_id in self.grid.get_node_ids():
            self.grid.context(node_id).run_config["learning-rate"] = rate
        return replies

    def evaluate(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        over = self.used >= 1
        if not over and self.used < len(self.points) / (EVALUATIONS + 1):
            return None
        if over:
            self.fleet.stop_reason = "epochs or time used up"
        metrics = self.measure(number, arrays)
        point = {"rounds": number, "epochs": self.epochs_done}
        point |= {"virtual_s": self.fleet.clock.virtual_s, "accuracy": float(metrics["accuracy"])}
        self.points.append(point)
        return metrics
