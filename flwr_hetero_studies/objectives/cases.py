"""What selection and weights do to the slow nodes' data, at equal rounds.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), 3 a round, one learning rate for all.
"""

from collections.abc import Iterator
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero.fleet import named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import BiasedLocalSGD, RandomSelection, TiFL
from flwr_hetero_studies.core.emulate import Moment, config_of, emulate, with_last_classes
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.tasks import Settings, evaluate_node, train_node

NODES = 20
PER_ROUND = 3
SLOW_CLASSES = 2
SETTINGS = {"rounds": 60, "train-examples": 6000, "fast-steps": 19}
FAST = {"rounds": 2, "train-examples": 600}
FAST_CASES = ["*, classes-by-speed/*"]
RATES = {"stdlib": 1.0}
"""Learning rates that are not 0.1, by data; none was tuned here."""
PARTITIONS = ("classes-by-speed", "dirichlet")

app = ClientApp(mods=[emulated_device])
app.train()(train_node)
app.evaluate()(evaluate_node)

WEIGHTINGS: dict[str, dict[str, Any]] = {
    "normalised": {"step_correction": 1.0},
    "sqrt": {"step_correction": 0.5},
    "examples": {"step_correction": 0.0},
    "steps": {"weigh_by_steps": True},
}
NAMES = ("FedAvg", "TiFL, adaptive", "TiFL, paced", *(f"biased, {name}" for name in WEIGHTINGS))


def strategy_of(name: str, steps: int, seed: int) -> Strategy:
    """Draw nodes from TiFL's five tiers or at random; ``biased`` nodes take steps by speed."""
    method, _, variant = name.partition(", ")
    inner: FedAvg | BiasedLocalSGD = FedAvg(fraction_evaluate=0.0)
    if method == "TiFL":
        return TiFL(inner, PER_ROUND, 5, policy=variant, seed=seed)
    if method == "biased":
        # Nodes sample uniformly, because only the weights are to differ.
        weights = WEIGHTINGS[variant]
        inner = BiasedLocalSGD(inner, steps, high_loss_fraction=None, seed=seed, **weights)
    return RandomSelection(inner, PER_ROUND, seed=seed)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    for seed in options.seeds_or(range(5)):
        for partition in PARTITIONS:
            for name in NAMES:
                case = {"experiment": f"{options.data}, {partition}", "name": name}
                yield Trial(case | dict(options.settings), seed, {"partition": partition})


def run(case: Case, seed: int, data: Data, partition: str) -> dict[str, Any]:
    rows = case["train-examples"]
    rate = RATES.get(data.name, 0.1)
    run_config = config_of(data.first(rows, rows // 3), partition, rate, seed, case["rounds"])
    settings = Settings.from_run_config(run_config)
    strategy = strategy_of(case["name"], case["fast-steps"], seed)
    fleet = named_fleet("paper-5", NODES)
    measure = with_last_classes(settings, SLOW_CLASSES)

    def slow(moment: Moment) -> dict[str, Any]:
        return {"slow": moment.record["global"].get("slow")}

    curve = emulate(app, settings, strategy, fleet, run_config, note=slow, measure=measure)
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
