"""What rivals learn from nodes: their training losses, and their times before the first round."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero.records import read_number
from flwr_hetero.server.client_support import ClientSupport
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.profiling import profile_nodes
from flwr_hetero.server.wrapper import Wrapper


def loss_support(without: str) -> ClientSupport:
    """Say what a method needs that goes by the training loss."""
    line = '    metrics = MetricRecord({"num-examples": ..., "train-loss": loss})'
    return ClientSupport("train-loss", "training loss", line, without)


def training_loss(metrics: Mapping[str, Any]) -> float:
    """Return a node's mean training loss; NaN if it reports none.

    It is the first metric with "loss" in its name, those with "train" before others.
    """
    found = sorted(metrics, key=lambda name: ("train" not in name, name))
    names = [name for name in found if "loss" in name and name != keys.LOSS_RMS]
    return read_number(metrics, names[0]) if names else nan


def loss_per_sample(metrics: Mapping[str, Any]) -> float:
    """Return the root mean square of a node's losses per sample, else its mean loss; or NaN."""
    square = read_number(metrics, keys.LOSS_RMS)
    return square if isfinite(square) else training_loss(metrics)


def time_nodes(
    strategy: Wrapper, context: Exchange, grid: Grid, node_ids: Sequence[int], t_max: float
) -> dict[str, float]:
    """Measure in one round of profiling how long nodes take, by identity; without the silent."""
    how: dict[str, Any] = {"sync_rounds": 1, "warmup_rounds": 0, "t_max": t_max}
    strategy.fleet.nodes.learn(grid)
    nodes, (seconds,) = profile_nodes(strategy, context, grid, sorted(node_ids), **how)
    timed = zip(nodes, seconds.tolist(), strict=True)
    return {strategy.identity(node): took_s for node, took_s in timed if isfinite(took_s)}
