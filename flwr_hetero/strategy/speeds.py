"""What is known of each node's speed: smoothed step and link times, and the classes they make."""

import json
import math
from collections.abc import Sequence

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.core.step_time import class_gamma, fast_class, smooth_step_time
from flwr_hetero.strategy.latency import Latency
from flwr_hetero.strategy.wrapper import StateDict

SHORTEST_STEP_S = 1e-9
"""So that a report of 0 s is a time and not a division by zero."""


class Speeds:
    """Smoothed seconds per step and per transfer of every node seen so far.

    Parameters
    ----------
    smoothing : float
        Weight of the past in [0, 1).

    Examples
    --------
    >>> speeds = Speeds(smoothing=0.5)
    >>> speeds.observe("node-0", steps=32, compute_s=3.2, link_s=0.0)
    >>> speeds.observe("node-1", steps=1, compute_s=3.2, link_s=1.0)
    >>> speeds.gamma(), speeds.fast(["node-0", "node-1", "node-2"]).tolist()
    (0.03125, [True, False, False])
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.step_s: dict[str, float] = {}
        self.link_s: dict[str, float] = {}

    def observe(self, node: str, steps: int, compute_s: float, link_s: float) -> None:
        """Take in what a node needed in a round.

        Parameters
        ----------
        node : str
            Stable identity.
        steps : int
            Steps it took.
        compute_s, link_s : float
            Seconds for all steps, and on the link.
        """
        one_s = max(compute_s / steps, SHORTEST_STEP_S)
        for table, value_s in ((self.step_s, one_s), (self.link_s, link_s)):
            before_s = table.get(node, math.nan)
            table[node] = smooth_step_time(before_s, value_s, self.smoothing)

    def step_times_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return seconds per step, NaN where unknown; shape (len(nodes),)."""
        return np.array([self.step_s.get(node, math.nan) for node in nodes], dtype=np.float64)

    def link_times_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return seconds on the link, NaN where unknown; shape (len(nodes),)."""
        return np.array([self.link_s.get(node, math.nan) for node in nodes], dtype=np.float64)

    def fast(self, nodes: Sequence[str]) -> NDArray[np.bool_]:
        """Tell which nodes are of the fast class of the whole fleet; shape (len(nodes),)."""
        known = list(self.step_s)
        classes = dict(zip(known, fast_class(self.step_times_s(known)), strict=True))
        return np.array([classes.get(node, False) for node in nodes], dtype=bool)

    def gamma(self) -> float:
        """Return the measured performance gap ratio of the two classes."""
        known = list(self.step_s)
        return class_gamma(self.step_times_s(known), self.fast(known))

    def shortest_round_s(self, fast_steps: int) -> float | None:
        """Return the time in which the quickest node takes ``fast_steps``, link included.

        Parameters
        ----------
        fast_steps : int
            Steps.

        Returns
        -------
        float or None
            Seconds; None if no node is known.
        """
        return min(
            (self.link_s[n] + fast_steps * self.step_s[n] for n in self.step_s), default=None
        )

    def state_dict(self) -> StateDict:
        """Return all figures as flat arrays."""
        nodes = list(self.step_s)
        return {
            "nodes": json.dumps(nodes),
            "step_s": self.step_times_s(nodes),
            "link_s": self.link_times_s(nodes),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        nodes = json.loads(str(state["nodes"]))
        for table, key in ((self.step_s, "step_s"), (self.link_s, "link_s")):
            table.clear()
            table.update(zip(nodes, np.asarray(state[key]).tolist(), strict=True))


def compute_and_link_s(
    reply: Message, latency: Latency, round_trip_s: float | None
) -> tuple[float, float]:
    """Divide a node's latency into computing and transfer.

    Parameters
    ----------
    reply : Message
        A good reply.
    latency : Latency
        As judged by the session.
    round_trip_s : float or None
        What the server's clock saw, if that says anything of the link.

    Returns
    -------
    compute_s, link_s : float
        Seconds. Emulated devices report both; for a real node the link is what the round trip
        is longer than the node's own time, and unknown (0) without such a report.
    """
    if latency.source == "observed":
        return latency.seconds, 0.0
    if latency.emulated:
        link_s = float(reply.content.config_records[keys.TIMING][keys.TRANSFER_TIME])  # type: ignore[arg-type]
        return latency.seconds - link_s, link_s
    return latency.seconds, max(0.0, (round_trip_s or 0.0) - latency.seconds)
