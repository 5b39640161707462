"""What the rivals share that learn of single nodes: their losses, and how that is saved."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero.records import read_number
from flwr_hetero.server.client_support import ClientSupport
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.profiling import identify_nodes, profile_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str


def loss_support(without: str) -> ClientSupport:
    """Say what nodes must do for a method that goes by their loss."""
    line = '    metrics = MetricRecord({"num-examples": ..., "train-loss": loss})'
    return ClientSupport("train-loss", "training loss", line, without)


def training_loss(metrics: Mapping[str, Any]) -> float:
    """Return a node's mean training loss; NaN if it reports none.

    It is the first metric with "loss" in its name, those with "train" before others.
    """
    names = [name for name in metrics if "loss" in name and name != keys.LOSS_RMS]
    first = min(names, key=lambda name: ("train" not in name, name), default=None)
    return nan if first is None else read_number(metrics, first)


def loss_per_sample(metrics: Mapping[str, Any]) -> float:
    """Return the root mean square of a node's losses per sample, else its mean loss; or NaN."""
    square = read_number(metrics, keys.LOSS_RMS)
    return square if isfinite(square) else training_loss(metrics)


class NodeMemory(Wrapper):
    """Save what a strategy has learnt about nodes, and find out who they are after a resume."""

    facts: ClassVar[tuple[str, ...]]
    """Attributes that are saved as JSON: first what is there once a node is known."""
    rng: np.random.Generator

    def on_start(self, run: Run) -> None:
        """After a resume, ask nodes that are not known who they are."""
        if getattr(self, self.facts[0]):
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def state_dict(self) -> StateDict:
        """Return what is known, and the generator."""
        facts = json.dumps([getattr(self, name) for name in self.facts])
        return {**super().state_dict(), "facts": facts, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"facts": str, "rng": str}, type(self).__name__)
        super().load_state_dict(state)
        for name, value in zip(self.facts, json.loads(str(state["facts"])), strict=True):
            setattr(self, name, value)
        self.rng = rng_from_str(str(state["rng"]))


def time_nodes(
    strategy: Wrapper, context: Exchange, grid: Grid, node_ids: Sequence[int], t_max: float
) -> dict[str, float]:
    """Measure in one round of profiling how long nodes take, by identity; without the silent."""
    how: dict[str, Any] = {"sync_rounds": 1, "warmup_rounds": 0, "t_max": t_max}
    strategy.fleet.nodes.learn(grid)
    nodes, (seconds,) = profile_nodes(strategy, context, grid, sorted(node_ids), **how)
    timed = zip(nodes, seconds.tolist(), strict=True)
    return {strategy.identity(node): took_s for node, took_s in timed if isfinite(took_s)}
