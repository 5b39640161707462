"""TiFL: which tiers train, settings on digits."""

from collections.abc import Iterator
from math import inf
from typing import Any
from unittest import mock

import numpy as np
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.fleet import named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl import algorithm
from flwr_hetero_studies.core.emulate import Moment, config_of, emulate, with_last_classes
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, by_seed, of
from flwr_hetero_studies.tasks import Settings, evaluate_node, profile_node, train_node

VANILLA = "vanilla"
SETTINGS = {"rounds": 60}
MIX_SETTINGS = {"train-examples": 6000, "learning-rate": 0.05}
FAST = {"rounds": 3}
FAST_CASES = ["digits/vanilla", "digits/fast3", "mix, dirichlet/adaptive"]

ON_DIGITS = (VANILLA, "uniform", "random", "fast", "fast3", "algorithm-2", "paced")
"""All but vanilla may use ``SHARE`` of its time, and ``MORE`` times its rounds in it."""
SHARE, MORE = 0.5, 6
PARTITIONS, SLOW_CLASSES = ("classes-by-speed", "dirichlet"), 2
MIXES: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in ("uniform", "paced", "algorithm-2", "adaptive")},
    "adaptive, blind": {"policy": "adaptive", "error-power": 0.0},
}
"""Which tiers train, at the same virtual time; the default with and without its accuracies."""

# Nodes train, are timed and evaluate as in all studies.
app = ClientApp(mods=[emulated_device])
app.train()(train_node)
app.train("profile")(profile_node)
app.evaluate()(evaluate_node)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield all runs; those on digits once vanilla's time is known."""
    shared = {**MIX_SETTINGS, "data": options.data, "budget-s": 20.0 if options.fast else 400.0}
    for partition in PARTITIONS:
        for seed in options.seeds_or(range(3)):
            for name, setting in MIXES.items():
                case = {"experiment": f"mix, {partition}", "name": name, **shared, **setting}
                yield Trial(case | {"partition": partition}, seed)
    digits = {"experiment": "digits", "rounds": options.settings["rounds"]}
    base = by_seed(of(lines, name=VANILLA, **digits))
    for seed in options.seeds_or(range(3)):
        for name in ON_DIGITS:
            if name == VANILLA:
                yield Trial({**digits, "name": name}, seed)
            elif seed in base:
                budget_s = SHARE * base[seed]["curve"]["clock_s"][-1]
                yield Trial({**digits, "name": name}, seed, {"budget_s": budget_s})


def run(case: Case, seed: int, data: Data, **limit: float) -> dict[str, Any]:
    is_digits = case["experiment"] == "digits"
    return on_digits(case, seed, **limit) if is_digits else mix(case, seed, data)


def on_digits(case: Case, seed: int, budget_s: float = inf) -> dict[str, Any]:
    """Train on the digits; the clock starts after profiling, which vanilla needs not."""
    policy = case["name"]
    rounds = case["rounds"] * (1 if policy == VANILLA else MORE)
    run_config = {"num-server-rounds": rounds, "seed": seed}
    phase = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}
    strategy = TiFL(FedAvg(fraction_evaluate=0.0), 3, policy=policy, seed=seed, **phase)
    settings, fleet = Settings.from_run_config(run_config), named_fleet("paper-5", 20)

    curve = emulate(app, settings, strategy, fleet, run_config, budget_s=budget_s, charged=False)
    free_s = curve["virtual_s"][0]
    clock_s = [round(time_s - free_s, 5) for time_s in curve["virtual_s"]]
    metrics = {"profiling_s": 0.0 if policy == VANILLA else free_s}
    return {"metrics": metrics, "curve": {"clock_s": clock_s, "accuracy": curve["accuracy"]}}


def mix(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Train 3 of 20 nodes a round for some virtual time, evaluations included."""
    rows = case["train-examples"]
    dataset, rate = data.first(rows, rows // 3), case["learning-rate"]
    run_config = config_of(dataset, case["partition"], rate, seed)
    settings = Settings.from_run_config(run_config)
    strategy = TiFL(FedAvg(fraction_evaluate=0.0), 3, policy=case["policy"], seed=seed)
    power = case.get("error-power", algorithm.ERROR_POWER)
    limits = {"budget_s": case["budget-s"], "measure": with_last_classes(settings, SLOW_CLASSES)}

    def note(moment: Moment) -> dict[str, Any]:
        line = moment.record
        return {"slow": line["global"].get("slow"), "tier": line["tifl"]["tier"]}

    with mock.patch.object(algorithm, "ERROR_POWER", power):
        fleet = named_fleet("paper-5", 20)
        curve = emulate(app, settings, strategy, fleet, run_config, note=note, **limits)
    drawn = [tier for tier in curve["tier"] if tier is not None]
    rounds = np.bincount(drawn, minlength=5).tolist()
    kept = {key: curve[key] for key in ("virtual_s", "accuracy", "slow")}
    return {"metrics": {"rounds": rounds}, "curve": kept}
