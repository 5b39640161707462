"""Rescaled ASGD: asynchronous SGD that scales updates by the time that a worker takes."""

from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import MeansOfNodes, RateCorrection
from flwr_hetero.state_dict import StateDict
from flwr_hetero_studies.rivals.asgd import LocalASGD


class RescaledASGD(LocalASGD):
    r"""Add each node's update when it arrives, scaled by the interval between its updates.

    .. math:: w \leftarrow w + \eta \frac{\tau_i}{\tau} (w_i - w_{start}), \qquad
              \frac{1}{\tau} = \frac{1}{n} \sum_j \frac{1}{\tau_j}

    Mahran, Maranjyan and Richtarik, "Rescaled Asynchronous SGD: Optimal Distributed Optimization
    under Data and System Heterogeneity", 2026 (arXiv 2605.13434). A node that answers half as often
    moves the model twice as far, so that in the long run all nodes move it alike.

    Parameters
    ----------
    num_steps : int, optional
        Local steps of a message; None: the node's usual epoch.
    server_rate : float
        :math:`\eta`, the mean weight of the updates that arrive.

    Notes
    -----
    The paper's gradient is here a node's update in some local steps, which keeps its weight when it
    is stale. In the paper times are fixed and all workers compute all the time, so that a worker's
    time is also the interval between two of its updates. Here only ``concurrency`` nodes are in
    flight and the others wait, and only with the interval do all nodes have the same weight. It is
    measured on the fleet's clock, as by ``FedBuff``: the mean time in flight of a node's last
    replies, and its mean time idle, shrunk towards that of all nodes. n are the nodes that have
    replied. ``FedBuff``'s limit on the weight of one update does not apply.
    """

    def __init__(self, strategy: Strategy | None = None, **settings: Any) -> None:
        super().__init__(strategy, **settings)
        self.times = RateCorrection((0.0, 1.0))

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        return waiting[:1]

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Scale an update by its node's interval, over the mean interval of all updates."""
        (update,) = updates
        node = self.identity(update.pending.node_id)
        self.times.learn(node, 1.0, update.pending.sent_s, update.arrived_s, 1.0)
        intervals_s = self.intervals_s()
        mean_s = len(intervals_s) / sum(1 / interval_s for interval_s in intervals_s.values())
        return Shares(np.ones(1), self.server_rate * intervals_s[node] / mean_s)

    def intervals_s(self) -> dict[str, float]:
        """Return the time from an update of a node to its next one, by node."""
        means = self.times.means
        idle_s = [times.idle_s for times in means.values() if times.starts]
        usual_s = float(np.mean(idle_s)) if idle_s else 0.0
        intervals_s = MeansOfNodes.of(means.values()).intervals_s(usual_s)
        return dict(zip(means, intervals_s.tolist(), strict=True))

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"times": self.times.to_str()}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.times.load_str(str(state["times"]))
