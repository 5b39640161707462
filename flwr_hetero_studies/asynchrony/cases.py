"""Rounds that wait against merges that do not, where the slow nodes hold classes alone or not.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), small CNN. FedAvg trains 3 nodes a round;
FedBuff has all 20 or 3 of them at work. Every run ends at its seconds of virtual time, and
measures both the newest model and the average of the last ones.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.client.device import WIFI_SECONDS_PER_EXAMPLE
from flwr_hetero.fleet import DeviceProfile, named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import FedBuff, LocalSteps, ModelAverage, RandomSelection, Wrapper
from flwr_hetero_studies.core.emulate import Measure, Moment, emulate, with_last_classes
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.tasks import Settings, train_node

NODES, AT_WORK, SLOW_CLASSES, LINK_MBPS = 20, 3, 2, 10.0
SETTINGS = {"train-examples": 6000, "fast-steps": 20, "time": 1.0}
FAST = {"train-examples": 600, "time": 0.02}
FAST_CASES = ["*classes-by-speed/FedAvg", "*classes-by-speed/all, fair"]
BASE = "FedAvg"


class Setting(NamedTuple):
    """How many nodes are at work (None: all), how updates count, how long it runs."""

    at_work: int | None
    merging: str
    seconds: float
    every: int
    """Merges from one evaluation to the next."""


FREE_LINKS = {
    BASE: Setting(AT_WORK, "rounds", 800.0, 1),
    "all, fair": Setting(None, "fair", 48.0, 3),
    "3, fair": Setting(AT_WORK, "fair", 96.0, 2),
    "all, examples": Setting(None, "examples", 48.0, 3),
    "3, examples": Setting(AT_WORK, "examples", 96.0, 2),
    "all, paper": Setting(None, "paper", 96.0, 2),
    "3, paper": Setting(AT_WORK, "paper", 192.0, 1),
}
LINKS = {
    BASE: Setting(AT_WORK, "rounds", 30.0, 1),
    "all, fair": Setting(None, "fair", 8.0, 2),
    "3, fair": Setting(AT_WORK, "fair", 16.0, 2),
}
RATES = {
    "fashion_mnist": {"all, examples": 0.2, "all, paper": 0.05, "3, paper": 0.05},
    "cifar10": {
        BASE: 0.05,
        "all, fair": 0.05,
        "3, fair": 0.02,
        "3, examples": 0.05,
        "all, paper": 0.05,
        "3, paper": 0.05,
    },
    "stdlib": {
        BASE: 2.0,
        "all, fair": 1.0,
        "3, fair": 1.0,
        "all, examples": 2.0,
        "3, examples": 2.0,
        "all, paper": 1.0,
        "3, paper": 1.0,
    },
}
"""Learning rates tuned on seeds that are not reported, where they are not 0.1."""
LONGER = {"stdlib": 2.0}
"""How much longer FedBuff's settings run on some data."""
TASKS = {
    "classes-by-speed": ("classes-by-speed", FREE_LINKS),
    "dirichlet": ("dirichlet", FREE_LINKS),
    "links": ("classes-by-speed", LINKS),
}
"""Partition and settings of each task."""

app = ClientApp(mods=[emulated_device])
app.train()(train_node)


class Newest(Wrapper):
    """Measure the newest model, too, where the average is measured."""

    def __init__(self, strategy: ModelAverage, measure: Measure) -> None:
        super().__init__(strategy)
        self.measure = measure

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Add it to the record."""
        if record["global"]:
            record["newest"] = dict(self.measure(record["round"], run.arrays))


def fleet(task: str) -> list[DeviceProfile]:
    """Return the fleet; on links each transfer takes what a ResNet-18 would over 10 Mbit/s."""
    devices = named_fleet("paper-5", NODES)
    if task != "links":
        return devices
    link = {"uplink_mbps": LINK_MBPS, "downlink_mbps": LINK_MBPS}
    return [replace(d, seconds_per_example=WIFI_SECONDS_PER_EXAMPLE, **link) for d in devices]


def strategy(setting: Setting, fast_steps: int, seed: int) -> Wrapper:
    """Compose what a setting describes."""
    fedavg = FedAvg(fraction_evaluate=0.0)
    if setting.merging == "rounds":
        return RandomSelection(fedavg, setting.at_work, seed=seed)
    if setting.merging == "paper":
        return FedBuff(fedavg, concurrency=setting.at_work, weighting="equal", seed=seed)
    weighting = "examples" if setting.merging == "examples" else "sqrt"
    most = 4 * fast_steps
    steps = LocalSteps(fedavg, fast_steps, budget="slice", max_steps=most, weighting=weighting)
    return FedBuff(steps, concurrency=setting.at_work, weighting=setting.merging, seed=seed)


def figures(moment: Moment) -> dict[str, Any]:
    """Return what is known of the average beside its accuracy, and of the newest model."""
    record = moment.record
    newest = record.get("newest", {})
    found = {"slow": record["global"].get("slow"), "newest": newest.get("accuracy")}
    return found | {"newest_slow": newest.get("slow")}


def length_s(setting: Setting, data: str) -> float:
    """Return the virtual seconds of a run."""
    return setting.seconds * (1.0 if setting.merging == "rounds" else LONGER.get(data, 1.0))


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield every task's settings, seed by seed."""
    for seed in options.seeds_or(range(3)):
        for task, (_, settings) in TASKS.items():
            experiment = f"{options.data}, {task}"
            for name in settings:
                case = {"experiment": experiment, "name": name, **options.settings}
                yield Trial(case, seed, {"task": task})


def run(case: Case, seed: int, data: Data, task: str) -> dict[str, Any]:
    """Train once and return the curve."""
    partition, settings_of = TASKS[task]
    rows, setting = case["train-examples"], settings_of[case["name"]]
    run_config = {
        "dataset": data.first(rows, rows // 3),
        "partition": partition,
        "num-server-rounds": 1_000_000,
        "batch-size": 16,
        "learning-rate": RATES.get(data.name, {}).get(case["name"], 0.1),
        "seed": seed,
    }
    settings = Settings.from_run_config(run_config)
    measured = with_last_classes(settings, SLOW_CLASSES)
    averaged = ModelAverage(strategy(setting, case["fast-steps"], seed))
    curve = emulate(
        app,
        settings,
        Newest(averaged, measured),
        fleet(task),
        run_config,
        note=figures,
        budget_s=case["time"] * length_s(setting, data.name),
        every=setting.every,
        measure=measured,
    )
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
