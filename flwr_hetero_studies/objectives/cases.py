"""What selection and weights do to the slow nodes' data, at equal rounds.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), 3 a round, one learning rate for all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero.fleet import named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import BiasedLocalSGD, RandomSelection, TiFL
from flwr_hetero_studies.core.emulate import emulate, with_last_classes
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.tasks import Settings, evaluate_node, train_node

NODES, PER_ROUND, SLOW_CLASSES = 20, 3, 2
SETTINGS = {"rounds": 60, "train-examples": 6000, "fast-steps": 19}
FAST = {"rounds": 2, "train-examples": 600}
FAST_CASES = ["*, classes-by-speed/*"]
RATES = {"stdlib": 1.0}
"""Learning rates of data for which it is not 0.1; none was tuned here."""
PARTITIONS = ("classes-by-speed", "dirichlet")

app = ClientApp(mods=[emulated_device])
app.train()(train_node)
app.evaluate()(evaluate_node)


def tifl(policy: str, steps: int, seed: int, **more: Any) -> Strategy:
    """TiFL with five tiers."""
    inner = FedAvg(fraction_evaluate=0.0)
    return TiFL(inner, PER_ROUND, 5, policy=policy, seed=seed, **more)


def biased(weighting: str, steps: int, seed: int) -> Strategy:
    """Random nodes with steps by their speed; all sample uniformly."""
    inner = FedAvg(fraction_evaluate=0.0)
    budget = BiasedLocalSGD(inner, steps, weighting=weighting, high_loss_fraction=None, seed=seed)
    return RandomSelection(budget, PER_ROUND, seed=seed)


def fedavg(steps: int, seed: int) -> Strategy:
    """Random nodes, one local epoch."""
    return RandomSelection(FedAvg(fraction_evaluate=0.0), PER_ROUND, seed=seed)


BUILD: dict[str, Callable[[int, int], Any]] = {
    "FedAvg": fedavg,
    "TiFL, adaptive": partial(tifl, "adaptive"),
    "TiFL, paced": partial(tifl, "paced"),
    "TiFL, paced, unbiased": partial(tifl, "paced", unbiased=True),
    "biased, normalised": partial(biased, "normalised"),
    "biased, sqrt": partial(biased, "sqrt"),
    "biased, examples": partial(biased, "examples"),
    "biased, steps": partial(biased, "steps"),
}


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield every setting on both partitions, seed by seed."""
    for seed in options.seeds_or(range(5)):
        for partition in PARTITIONS:
            for name in BUILD:
                case = {"experiment": f"{options.data}, {partition}", "name": name}
                yield Trial(case | dict(options.settings), seed, {"partition": partition})


def run(case: Case, seed: int, data: Data, partition: str) -> dict[str, Any]:
    """Train once and return the curve."""
    rows = case["train-examples"]
    run_config = {
        "dataset": data.first(rows, rows // 3),
        "partition": partition,
        "num-server-rounds": case["rounds"],
        "batch-size": 16,
        "learning-rate": RATES.get(data.name, 0.1),
        "seed": seed,
    }
    settings = Settings.from_run_config(run_config)
    curve = emulate(
        app,
        settings,
        BUILD[case["name"]](case["fast-steps"], seed),
        named_fleet("paper-5", NODES),
        run_config,
        note=lambda moment: {"slow": moment.record["global"].get("slow")},
        measure=with_last_classes(settings, SLOW_CLASSES),
    )
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
