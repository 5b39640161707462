"""Mercury against uniform sampling and its other rivals on emulated fleets, in virtual time.

A cell is a link, a partition and a number of nodes. ``bacc`` is Mercury.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flwr_hetero import keys
from flwr_hetero.fleet import named_fleet
from flwr_hetero_studies.core.emulate import Moment, emulate
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.papers.mercury.app import MercurySettings, app
from flwr_hetero_studies.tasks import initial_arrays

SETTINGS = {"rows": 12_000, "test-rows": 2000, "num-server-rounds": 60, "batch-size": 32,
            "learning-rate": 0.1, "model": "mlp"}  # fmt: skip
FAST = {"rows": 1000, "test-rows": 200, "num-server-rounds": 3, "model": "auto", "batch-size": 16}
FAST_CASES = ["100 Mbit/s, Dirichlet 1, 4 nodes/*"]

UNIFORM, DEFAULT = "uniform", "bacc"
METHODS: dict[str, dict[str, Any]] = {
    UNIFORM: {"sampling": "uniform"}, DEFAULT: {"sampling": "bacc"},
    "free": {"sampling": "free"},
    "bacc, paper": {"sampling": "bacc", "estimator": "paper"},
    "adacomm": {"sampling": "uniform", "communication": "adacomm", "local-steps": 20,
                "adapt-every-s": 3.0},
    "uniform, resharding": {"sampling": "uniform", "resharding": "random"},
    "bacc, resharding": {"sampling": "bacc", "resharding": "importance"},
    "bacc, random resharding": {"sampling": "bacc", "resharding": "random"},
}  # fmt: skip
"""Run-config of each; AdaComm adapts about every ten rounds at 100 Mbit/s."""
MBPS, ALPHAS, USUAL = (10, 50, 100, 200), (None, 10.0, 1.0, 0.5), (100, 1.0, 4)
CNN_BYTES = 4 * 20_490
OURS = ("experiment", "name", "data", "nodes", "rows", "test-rows")
"""Keys of a case that are no keys of the app's run-config."""


def case(name: str, mbps: int, alpha: float | None, nodes: int = 4) -> Case:
    split = {"partition": "iid"} if alpha is None else {"partition": "dirichlet", "alpha": alpha}
    data = "IID" if alpha is None else f"Dirichlet {alpha:g}"
    experiment = f"{mbps} Mbit/s, {data}, {nodes} nodes"
    described = {"experiment": experiment, "name": name, "nodes": nodes, "fleet": f"wifi-{mbps}"}
    return described | split | METHODS[name]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield the cells: all methods, every link with every alpha (Figures 11 to 18), 12 nodes."""
    cells = [case(name, *USUAL) for name in METHODS]
    for name in (UNIFORM, DEFAULT):
        cells += [case(name, mbps, alpha) for mbps in MBPS for alpha in ALPHAS]
        cells.append(case(name, 100, 1.0, nodes=12))
    for seed in options.seeds_or(range(3)):
        for cell in cells:
            yield Trial({"data": options.data, **options.settings} | cell, seed)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Train for the rounds of the case, measured at most 60 times."""
    config = {key: value for key, value in case.items() if key not in OURS}
    config |= {"dataset": data.first(case["rows"], case["test-rows"]), "seed": seed}
    settings = MercurySettings.from_run_config(config)
    arrays = initial_arrays(settings)
    # compute and transfer in the paper's ratio, which the named fleets have for the small CNN
    size = sum(array.numpy().nbytes for array in arrays.values()) / CNN_BYTES
    devices = named_fleet(settings.fleet, case["nodes"])
    fleet = [replace(d, seconds_per_example=size * d.seconds_per_example) for d in devices]

    def note(moment: Moment) -> dict[str, float]:
        stats = moment.record.get("sampler", {})
        return {key: round(stats[key], 4) for key in (keys.HIDDEN_SHARE,) if key in stats}

    how: dict[str, Any] = {"arrays": arrays, "every": max(1, settings.num_server_rounds // 60)}
    if settings.local_steps:
        how["train_config"] = {keys.NUM_STEPS: settings.local_steps}
    curve = emulate(app, settings, settings.strategy(), fleet, config, note=note, **how)
    del curve["bytes"], curve["device_s"]
    return {"metrics": {key: curve[key][-1] for key in ("virtual_s", "accuracy")}, "curve": curve}
