"""One fleet, one data set: Flower's strategies, each method alone, all five, and all but one.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), Dirichlet(0.5) labels, 3 nodes a round,
small CNN. FedNova and biased local SGD give each node the steps that it can take while the fastest
takes 20; biased local SGD weighs models by their steps, as its paper does. FedAvg trains for a
fixed number of rounds; every other setting ends when it has used as much virtual time, profiling
included, or ``most`` times the rounds, whichever comes first.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Data, Options, Run
from benchmarks.emulate import app_modules, emulate
from benchmarks.tables import Case, Line, by_seed, of
from flwr_hetero.fleet import named_fleet

NODES = 20
SETTINGS = {"rounds": 60, "most": 3, "train-examples": 6000, "learning-rate": 0.05}
FAST = {"rounds": 3, "most": 1, "train-examples": 600}
FAST_CASES = ["*/FedAvg", "*/all five"]

PLAIN = {
    "selection": "random",
    "steps": "epochs",
    "weighting": "examples",
    "order": "reshuffle",
    "sampler": "uniform",
    "sync-rounds": 1,  # TiFL with the paper's phase
    "policy": "paced",
}
STEPS = {"steps": "deadline", "weighting": "steps"}
ALL = {
    **STEPS,
    "selection": "tifl",
    "sync-rounds": 1,
    "policy": "paced",
    "order": "cd-grab",
    "sampler": "top-loss+mercury+pgd",
}
BASE = "FedAvg"
PARTS: dict[str, dict[str, str | int]] = {
    BASE: PLAIN,
    "FedProx": {**PLAIN, "inner": "fedprox"},
    "FedNova": {**PLAIN, "steps": "deadline", "weighting": "fednova"},
    "TiFL": {**PLAIN, "selection": "tifl"},
    "biased local SGD": {**PLAIN, **STEPS, "sampler": "top-loss"},
    "CD-GraB": {**PLAIN, "order": "cd-grab"},
    "Mercury": {**PLAIN, "sampler": "mercury"},
    "PGD": {**PLAIN, "sampler": "pgd"},
    "all five": ALL,
    "all but TiFL": {**ALL, "selection": "random"},
    "all but biased local SGD": {
        **ALL,
        "steps": "epochs",
        "weighting": "examples",
        "sampler": "mercury+pgd",
    },
    "all but CD-GraB": {**ALL, "order": "reshuffle"},
    "all but Mercury": {**ALL, "sampler": "top-loss+pgd"},
    "all but PGD": {**ALL, "sampler": "top-loss+mercury"},
}
"""Keys of ``apps/fleet``."""


def plan(options: Options, lines: list[Line]) -> Iterator[Run]:
    """Yield FedAvg, and the others once its virtual time is known."""
    shared = {"experiment": options.data, **options.settings}
    base = by_seed(of(lines, name=BASE, **shared))
    for name in PARTS:
        for seed in options.seeds_or(range(3)):
            case = {**shared, "name": name}
            if name == BASE:
                yield Run(case, seed)
            elif seed in base:
                yield Run(case, seed, {"budget_s": base[seed]["curve"]["virtual_s"][-1]})


def run(case: Case, seed: int, data: Data, **limit: float) -> dict[str, Any]:
    """Train once and return the curve."""
    app, task = app_modules("fleet", "fleet_app")
    rows = case["train-examples"]
    run_config = {
        **PARTS[case["name"]],
        "dataset": data.first(rows, rows // 3),
        "num-server-rounds": case["rounds"] * (1 if case["name"] == BASE else case["most"]),
        "learning-rate": case["learning-rate"],
        "fast-steps": 20,
        "seed": seed,
    }
    settings = task.FleetSettings.from_run_config(run_config)
    fleet = named_fleet(settings.fleet, NODES)
    curve = emulate(app, settings, settings.strategy(NODES), fleet, run_config, **limit)
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
