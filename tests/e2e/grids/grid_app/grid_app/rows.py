"""The strategies of flwr_hetero.strategy, each with what must come of it on any grid."""

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import strategy as ours
from flwr_hetero.report import RunDirectory
from flwr_hetero_studies import rivals

START = 0.0
STEPS = {"fast_steps": 6}


class Row(NamedTuple):
    """A strategy, and what it promises beside rounds and a model that moves."""

    build: Callable[[Strategy], ours.Wrapper]
    rounds: int = 2
    asks_steps: bool = False
    evaluates_each_round: bool = True
    error: str = ""
    """How the error begins with which it ends in the first round, for want of a sampler."""


def recorded(inner: Strategy) -> ours.Wrapper:
    """Make a Recorded with a directory of its own."""
    return ours.Recorded(inner, run_dir=RunDirectory(tempfile.mkdtemp(), {}))


def asks(build: Callable[[Strategy], ours.Wrapper]) -> Row:
    """Make the row of a strategy that sets steps in rounds."""
    return Row(build, 3, asks_steps=True)


def merges(build: Callable[[Strategy], ours.Wrapper], rounds: int, **more: bool) -> Row:
    """Make the row of a strategy whose rounds are server updates."""
    return Row(build, rounds, evaluates_each_round=False, **more)


def needs(build: Callable[[Strategy], ours.Wrapper], error: str) -> Row:
    """Make the row of a strategy that needs a sampler on the nodes."""
    return Row(build, error=f"{error}: no node reports")


ROWS = {
    "AdaComm": asks(lambda inner: rivals.AdaComm(inner, 6, interval_s=0.0)),
    "BiasedLocalSGD": asks(lambda inner: ours.BiasedLocalSGD(inner, **STEPS)),
    "CDGraB": needs(ours.CDGraB, "CDGraB"),
    "DeadlineSelection": Row(lambda inner: rivals.DeadlineSelection(inner, 3)),
    "FedAT": merges(lambda inner: rivals.FedAT(inner, 2, 2), 4),
    "FedAsync": merges(rivals.FedAsync, 24),
    "FedBuff": merges(lambda inner: ours.FedBuff(inner, buffer_size=2), 16),
    "FedCompass": merges(lambda inner: rivals.FedCompass(inner, 2, 6), 4, asks_steps=True),
    "FedNova": asks(lambda inner: ours.FedNova(inner, **STEPS)),
    "FedSlice": Row(ours.FedSlice, 4, asks_steps=True),
    "LocalSteps": asks(lambda inner: ours.LocalSteps(inner, step_correction=0.0, **STEPS)),
    "ModelAverage": Row(lambda inner: ours.ModelAverage(inner, window=2)),
    "Oort": Row(lambda inner: rivals.Oort(inner, 3)),
    "OverSelect": Row(lambda inner: ours.OverSelect(inner, take=3)),
    "PowerOfChoice": Row(lambda inner: rivals.PowerOfChoice(inner, 2, 3)),
    "RandomSelection": Row(lambda inner: ours.RandomSelection(inner, 3)),
    "Recorded": Row(recorded),
    "Resharding": needs(ours.Resharding, "Resharding"),
    "SamplerMetrics": Row(ours.SamplerMetrics),
    "TiFL": Row(lambda inner: ours.TiFL(inner, clients_per_round=2, num_tiers=2), 8),
    "Wrapper": Row(ours.Wrapper),
}


class Lines(ours.Wrapper):
    """Keep the lines of the history; innermost, for Recorded has its place outside all others."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        super().__init__(strategy)
        self.records: list[dict[str, Any]] = []

    def on_round_end(self, run: Any, record: dict[str, Any]) -> None:
        """Keep one."""
        self.records.append(record)


def run(
    name: str,
    grid: Grid,
    rounds: int | None = None,
    build: Callable[[Strategy], ours.Wrapper] | None = None,
    *,
    on_nodes: bool = True,
) -> dict[str, Any]:
    """Run a row on a grid, or another strategy; return what is left of it, fit for JSON.

    ``on_nodes``: whether nodes evaluate too.
    """
    row, central = ROWS[name], []

    def evaluate_fn(number: int, arrays: ArrayRecord) -> MetricRecord:
        central.append(number)
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    arrays = ArrayRecord({"w": Array(np.full(1, START, np.float32))})
    lines = Lines(FedAvg(fraction_evaluate=float(on_nodes)))
    try:
        strategy = (build or row.build)(lines)
        result = strategy.start(grid, arrays, rounds or row.rounds, evaluate_fn=evaluate_fn)
    except Exception as error:  # of any kind: it is what the row is asked for
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": "",
        "records": lines.records,
        "central": central,
        "evaluated": sorted(result.evaluate_metrics_clientapp),
        "w": float(result.arrays["w"].numpy()[0]),
    }
