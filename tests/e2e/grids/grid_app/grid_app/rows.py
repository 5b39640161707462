"""The strategies of flwr_hetero.strategy, each with what must come of it on any grid."""

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import strategy as ours
from flwr_hetero_studies import rivals


class Row(NamedTuple):
    """A strategy, and what it promises beside rounds and a model that moves."""

    build: Callable[[Strategy], ours.Wrapper]
    rounds: int = 2
    asks_steps: bool = False
    evaluates_each_round: bool = True
    error: str = ""
    """How the error begins with which it ends in the first round, for want of a sampler."""


SIZE = 300
"""Values of the model, all alike: enough to be packed."""
STEPS: dict[str, Any] = {"rounds": 3, "asks_steps": True}
UPDATES: dict[str, Any] = {"evaluates_each_round": False}
ROWS = {
    "AdaComm": Row(lambda fed: rivals.AdaComm(fed, 6, interval_s=0.0), **STEPS),
    "BiasedLocalSGD": Row(lambda fed: ours.BiasedLocalSGD(fed, 6), **STEPS),
    "CDGraB": Row(ours.CDGraB, error="CDGraB: no node reports"),
    "Compressed": Row(lambda fed: ours.Compressed(ours.FedSlice(fed)), 4, True),
    "DeadlineSelection": Row(lambda fed: rivals.DeadlineSelection(fed, 3)),
    "FedAT": Row(lambda fed: rivals.FedAT(fed, 2, 2), 4, **UPDATES),
    "FedAsync": Row(rivals.FedAsync, 24, **UPDATES),
    "FedBuff": Row(lambda fed: ours.FedBuff(fed, buffer_size=2), 16, **UPDATES),
    "FedCompass": Row(lambda fed: rivals.FedCompass(fed, 2, 6), 4, True, **UPDATES),
    "FedSlice": Row(ours.FedSlice, 4, True),
    "LocalSteps": Row(lambda fed: ours.LocalSteps(fed, 6, step_correction=0.0), **STEPS),
    "ModelAverage": Row(lambda fed: ours.ModelAverage(fed, window=2)),
    "Oort": Row(lambda fed: rivals.Oort(fed, 3)),
    "PowerOfChoice": Row(lambda fed: rivals.PowerOfChoice(fed, 2, 3)),
    "RandomSelection": Row(lambda fed: ours.RandomSelection(fed, 3)),
    "Recorded": Row(lambda fed: ours.Recorded(fed, run_dir=tempfile.mkdtemp())),
    "RescaledASGD": Row(rivals.RescaledASGD, 24, **UPDATES),
    "Resharding": Row(ours.Resharding, error="Resharding: no node reports"),
    "RingleaderASGD": Row(rivals.RingleaderASGD, 24, **UPDATES),
    "SamplerMetrics": Row(ours.SamplerMetrics),
    "TiFL": Row(lambda fed: ours.TiFL(fed, clients_per_round=2, num_tiers=2), 8),
    "WithoutSlowest": Row(lambda fed: rivals.WithoutSlowest(fed, 3)),
    "Wrapper": Row(ours.Wrapper),
}


def run(
    name: str, grid: Grid, rounds: int | None = None, *, on_nodes: bool = True
) -> dict[str, Any]:
    """Run a row on a grid; return what is left of it, fit for JSON; ``on_nodes`` evaluate too."""
    row, central, records = ROWS[name], [], []

    def evaluate_fn(number: int, arrays: ArrayRecord) -> MetricRecord:
        central.append(number)
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    # innermost: Recorded has its place outside all others
    inner = ours.Wrapper(FedAvg(fraction_evaluate=float(on_nodes)))
    inner.on_round_end = lambda run, record: records.append(record)
    arrays = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    try:
        strategy = row.build(inner)
        result = strategy.start(grid, arrays, rounds or row.rounds, evaluate_fn=evaluate_fn)
    except Exception as error:  # of any kind: it is what the row is asked for
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": "",
        "records": records,
        "central": central,
        "evaluated": sorted(result.evaluate_metrics_clientapp),
        "w": float(result.arrays["w"].numpy()[0]),
    }
