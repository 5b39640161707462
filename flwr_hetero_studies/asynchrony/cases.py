"""Rounds that wait against merges that do not, where the slow nodes hold classes alone or not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.client.device import WIFI_SECONDS_PER_EXAMPLE
from flwr_hetero.fleet import DeviceProfile, named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import FedBuff, LocalSteps, ModelAverage, RandomSelection, Wrapper
from flwr_hetero_studies.core.emulate import Moment, config_of, emulate, with_last_classes
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.tasks import Settings, train_node

NODES, AT_WORK, SLOW_CLASSES, LINK_MBPS = 20, 3, 2, 10.0
SETTINGS = {"train-examples": 6000, "fast-steps": 20, "time": 1.0}
FAST = {"train-examples": 600, "time": 0.02}
FAST_CASES = ["*classes-by-speed/FedAvg", "*classes-by-speed/all, fair"]
BASE = "FedAvg"


class Merging(NamedTuple):
    """How many nodes are at work (None: all), how updates count, how long it runs."""

    at_work: int | None
    rule: str
    seconds: float
    every: int
    """Merges from one evaluation to the next."""


FREE_LINKS = {BASE: Merging(AT_WORK, "rounds", 800.0, 1)}
LINKS = {BASE: Merging(AT_WORK, "rounds", 30.0, 1)}
for rule, seconds, often in (("fair", 48.0, 3), ("examples", 48.0, 3), ("paper", 96.0, 2)):
    FREE_LINKS[f"all, {rule}"] = Merging(None, rule, seconds, often)
    FREE_LINKS[f"3, {rule}"] = Merging(AT_WORK, rule, 2 * seconds, often - 1)
LINKS |= {"all, fair": Merging(None, "fair", 8.0, 2), "3, fair": Merging(AT_WORK, "fair", 16.0, 2)}
PAPER = {"all, paper": 0.05, "3, paper": 0.05}
RATES = {
    "fashion_mnist": {"all, examples": 0.2, **PAPER},
    "cifar10": {BASE: 0.05, "all, fair": 0.05, "3, fair": 0.02, "3, examples": 0.05, **PAPER},
    "stdlib": {BASE: 2.0, "all, fair": 1.0, "3, fair": 1.0, "all, examples": 2.0,
               "3, examples": 2.0, "all, paper": 1.0, "3, paper": 1.0},
}  # fmt: skip
"""Learning rates tuned on seeds that are not reported, where they are not 0.1."""
LONGER = {"stdlib": 2.0}
"""How much longer FedBuff's settings run on some data."""
TASKS = {name: (name, FREE_LINKS) for name in ("classes-by-speed", "dirichlet")}
TASKS["links"] = "classes-by-speed", LINKS
"""Partition and settings of each task."""

app = ClientApp(mods=[emulated_device])
app.train()(train_node)


def fleet(task: str) -> list[DeviceProfile]:
    """Return the fleet; on links each transfer takes what a ResNet-18 would over 10 Mbit/s."""
    # the slowest nodes come last, as the last classes do
    devices = named_fleet("paper-5", NODES)
    if task != "links":
        return devices
    link: dict[str, Any] = {"uplink_mbps": LINK_MBPS, "downlink_mbps": LINK_MBPS}
    return [replace(d, seconds_per_example=WIFI_SECONDS_PER_EXAMPLE, **link) for d in devices]


def strategy(merging: Merging, fast_steps: int, seed: int) -> Wrapper:
    fedavg = FedAvg(fraction_evaluate=0.0)
    if merging.rule == "rounds":
        return RandomSelection(fedavg, merging.at_work, seed=seed)
    if merging.rule == "paper":
        return FedBuff(fedavg, concurrency=merging.at_work, weighting="equal", seed=seed)
    correction = 0.0 if merging.rule == "examples" else 0.5
    how: dict[str, Any] = {"budget": "slice", "max_steps": 4 * fast_steps}
    # slices: every node is back after about the same time
    steps = LocalSteps(fedavg, fast_steps, step_correction=correction, **how)
    return FedBuff(steps, concurrency=merging.at_work, weighting=merging.rule, seed=seed)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    for seed in options.seeds_or(range(3)):
        for task, (_, settings) in TASKS.items():
            for name in settings:
                case = {"experiment": f"{options.data}, {task}", "name": name, **options.settings}
                yield Trial(case, seed, {"task": task})


def run(case: Case, seed: int, data: Data, task: str) -> dict[str, Any]:
    partition, merging = TASKS[task][0], TASKS[task][1][case["name"]]
    rows, rate = case["train-examples"], RATES.get(data.name, {}).get(case["name"], 0.1)
    run_config = config_of(data.first(rows, rows // 3), partition, rate, seed)
    settings = Settings.from_run_config(run_config)
    measure = with_last_classes(settings, SLOW_CLASSES)

    def newest(moment: Moment) -> dict[str, Any]:
        """Measure the newest model, too, where the average is measured."""
        slow = moment.record["global"].get("slow")
        # only where the average was measured: both stand in one point
        own = measure(moment.round, moment.arrays) if moment.record["global"] else {}
        return {"slow": slow, "newest": own.get("accuracy"), "newest_slow": own.get("slow")}

    averaged = ModelAverage(strategy(merging, case["fast-steps"], seed))
    budget_s = case["time"] * merging.seconds
    # the merges of a bag of words come later
    budget_s *= 1.0 if merging.rule == "rounds" else LONGER.get(data.name, 1.0)
    how = {"budget_s": budget_s, "every": merging.every, "measure": measure, "note": newest}
    curve = emulate(app, settings, averaged, fleet(task), run_config, **how)
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
