"""Rounds that wait against merges that do not, where the slow nodes hold classes alone or not.

20 nodes, CPU shares 4, 2, 1, 0.5 and 0.1 (``paper-5``), small CNN. FedAvg trains 3 nodes a round;
FedBuff has all 20 or 3 of them at work. Every run ends at its seconds of virtual time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.bench import Data, Options, Run
from benchmarks.emulate import emulate, with_last_classes
from benchmarks.tables import Case, Line
from flwr_hetero.client.device import WIFI_SECONDS_PER_EXAMPLE
from flwr_hetero.fleet import DeviceProfile, named_fleet
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import FedBuff, LocalSteps, RandomSelection, Wrapper
from flwr_hetero.task import Settings, train_node

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
    learning_rate: float
    """Tuned on a seed that is not reported."""


FREE_LINKS = {
    BASE: Setting(AT_WORK, "rounds", 800.0, 1, 0.1),
    "all, fair": Setting(None, "fair", 32.0, 3, 0.1),
    "3, fair": Setting(AT_WORK, "fair", 64.0, 2, 0.05),
    "all, examples": Setting(None, "examples", 32.0, 3, 0.1),
    "3, examples": Setting(AT_WORK, "examples", 64.0, 2, 0.05),
    "all, paper": Setting(None, "paper", 32.0, 3, 0.05),
    "3, paper": Setting(AT_WORK, "paper", 64.0, 1, 0.05),
}
LINKS = {
    BASE: Setting(AT_WORK, "rounds", 12.0, 1, 0.1),
    "all, fair": Setting(None, "fair", 1.0, 1, 0.05),
    "3, fair": Setting(AT_WORK, "fair", 4.0, 2, 0.05),
}
TASKS = {
    "classes-by-speed": ("classes-by-speed", FREE_LINKS),
    "dirichlet": ("dirichlet", FREE_LINKS),
    "links": ("classes-by-speed", LINKS),
}
"""Partition and settings of each task."""

app = ClientApp(mods=[emulated_device])
app.train()(train_node)


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
    weighting = "examples" if setting.merging == "examples" else None  # the default
    steps = LocalSteps(fedavg, fast_steps, budget="slice", weighting=weighting)
    return FedBuff(steps, concurrency=setting.at_work, weighting=setting.merging, seed=seed)


def plan(options: Options, lines: list[Line]) -> Iterator[Run]:
    """Yield every task's settings, seed by seed."""
    for seed in options.seeds_or(range(3)):
        for task, (_, settings) in TASKS.items():
            experiment = f"{options.data}, {task}"
            for name in settings:
                case = {"experiment": experiment, "name": name, **options.settings}
                yield Run(case, seed, {"task": task})


def run(case: Case, seed: int, data: Data, task: str) -> dict[str, Any]:
    """Train once and return the curve."""
    partition, settings_of = TASKS[task]
    rows, setting = case["train-examples"], settings_of[case["name"]]
    run_config = {
        "dataset": data.first(rows, rows // 3),
        "partition": partition,
        "num-server-rounds": 1_000_000,
        "batch-size": 16,
        "learning-rate": setting.learning_rate,
        "seed": seed,
    }
    settings = Settings.from_run_config(run_config)
    curve = emulate(
        app,
        settings,
        strategy(setting, case["fast-steps"], seed),
        fleet(task),
        run_config,
        note=lambda record: {"slow": record["global"].get("slow")},
        budget_s=case["time"] * setting.seconds,
        every=setting.every,
        measure=with_last_classes(settings, SLOW_CLASSES),
    )
    return {"metrics": {"accuracy": curve["accuracy"][-1]}, "curve": curve}
