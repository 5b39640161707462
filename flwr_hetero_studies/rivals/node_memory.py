"""What rivals share that learn about single nodes: their losses, their times, and the state."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import read_number
from flwr_hetero.server.client_support import ClientSupport
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes, profile_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

LOSS = "train-loss"


def loss_support(without: str) -> ClientSupport:
    line = '    metrics = MetricRecord({"num-examples": ..., "train-loss": loss})'
    return ClientSupport(LOSS, "training loss", line, without)


def training_loss(metrics: Mapping[str, Any]) -> float:
    """Return a node's mean training loss: the first such metric, with "train" if any; or NaN."""
    names = [name for name in metrics if "loss" in name and name != keys.LOSS_RMS]
    first = min(names, key=lambda name: ("train" not in name, name), default=None)
    return nan if first is None else read_number(metrics, first)


def loss_of(reply: Message) -> float:
    (metrics,) = reply.content.metric_records.values()
    return training_loss(metrics)


class NeedsLoss(Wrapper):
    """A method that uses the nodes' loss."""

    def has_support(self, context: Exchange, reply: Message, support: ClientSupport) -> bool | None:
        if support.key != LOSS:
            return super().has_support(context, reply, support)
        return not isnan(loss_of(reply))


class NodeMemory(Wrapper):
    """Save what a strategy has learned about nodes, and identify them after a resume."""

    facts: ClassVar[tuple[str, ...]]
    """Attributes that are saved as JSON. The first one is not empty once a node is known."""
    rng: np.random.Generator

    def on_start(self, run: Run) -> None:
        if getattr(self, self.facts[0]):
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def state_dict(self) -> StateDict:
        facts = json.dumps([getattr(self, name) for name in self.facts])
        return {**super().state_dict(), "facts": facts, "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        check_state(state, {"facts": str, "rng": str}, type(self).__name__)
        super().load_state_dict(state)
        for name, value in zip(self.facts, json.loads(str(state["facts"])), strict=True):
            setattr(self, name, value)
        self.rng = rng_from_str(str(state["rng"]))


def time_nodes(
    strategy: Wrapper, context: Exchange, grid: Grid, node_ids: Sequence[int], t_max: float
) -> dict[str, float]:
    """Return the seconds, by identity, that nodes take in a round of profiling, if they reply."""
    phase: dict[str, Any] = {"sync_rounds": 1, "warmup_rounds": 0, "t_max": t_max}
    nodes, (seconds,) = profile_nodes(strategy, context, grid, sorted(node_ids), **phase)
    timed = zip(nodes, seconds.tolist(), strict=True)
    return {strategy.identity(node): took_s for node, took_s in timed if isfinite(took_s)}
