"""Oort: select the nodes whose samples teach most per second."""

from collections.abc import Set
from math import inf, isnan, log, nan
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import read_number
from flwr_hetero.server.selection import Outcome, Selection
from flwr_hetero_studies.rivals import node_memory

CLIP = 0.95
"""Quantile at which utilities are clipped."""
CUT_OFF = 0.95
"""Part of the k-th utility that is enough to be drawn."""
FIRST_SHARE = 0.9
"""Share of new nodes in the first round."""
LEAST_SHARE = 0.2
DECAY = 0.98
"""Factor by which the share of new nodes falls in each round."""
WINDOW = 20
"""Rounds between two decisions of the pacer."""
PACE_STEP = 0.05
"""What the pacer adds to ``pace``."""
MOST = 1e12
"""Utilities and times are kept within this: a node may report anything."""


def scores(
    utility: ArrayLike,
    latency_s: ArrayLike,
    last_round: ArrayLike,
    number: int,
    preferred_s: float,
    penalty: float,
) -> NDArray[np.float64]:
    r"""Score nodes that have trained (Alg. 1, l. 9-13).

    .. math:: \left( \hat U_i + \sqrt{0.1 \ln R / L_i} \right) (T / t_i)^{\alpha [t_i > T]}

    with utilities clipped and scaled to [0, 1]; a latency of NaN costs nothing.

    >>> scores([1.0, 3.0], [2.0, 8.0], [1, 1], 1, preferred_s=4.0, penalty=2.0)
    array([0.  , 0.25])
    """
    raw = np.asarray(utility, np.float64)
    took_s = np.asarray(latency_s, np.float64)
    clipped = np.minimum(raw, np.quantile(raw, CLIP))
    width = float(np.ptp(clipped)) or 1.0
    uncertain = np.sqrt(0.1 * log(number) / np.asarray(last_round, np.float64))
    limit_s = min(max(preferred_s, 1 / MOST), MOST)
    slow = (limit_s / np.fmax(took_s, limit_s)) ** penalty
    return np.asarray(((clipped - clipped.min()) / width + uncertain) * slow)


class Oort(node_memory.NeedsLoss, node_memory.NodeMemory, Selection):
    r"""Select nodes by the utility of their samples and by their speed, and explore new nodes.

    .. math:: U_i = n_i \sqrt{\frac{1}{n_i} \sum_{k} l_k^2} \cdot (T / t_i)^{\alpha [t_i > T]}

    Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021.
    ``pace`` is the quantile of the nodes' latencies that is the first preferred duration T, and
    ``penalty`` is alpha. With ``profiling``, nodes are timed in a round of their own before the
    first round, so that fast nodes are tried first.

    The authors' code is followed in these points. Losses are those in training: their mean if nodes
    do not report the root mean square. T is a quantile, which moves up by 5 % if the utility of the
    last 20 rounds is below that of the 20 rounds before. Utilities are scaled to [0, 1], and the
    number of new nodes is rounded down. No node is excluded. The paper selects 1.3 times as many
    nodes as it needs: put ``OverSelect`` around it.
    """

    name: ClassVar[str] = "oort"
    facts = "known", "profile_s", "gains", "quantile", "new_share"
    client_support = (node_memory.loss_support("whose samples count as learnt"),)

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int = 5,
        *,
        pace: float = 0.3,
        penalty: float = 2.0,
        profiling: bool = False,
        seed: int = 0,
    ) -> None:
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        self.count = check_count("clients_per_round", clients_per_round, 1)
        self.pace = check_number("pace", pace, "(0, 1]")
        # The quantile of T, which the pacer moves up.
        self.quantile = self.pace
        self.new_share = FIRST_SHARE
        self.penalty = check_number("penalty", penalty, "[0, inf)")
        self.profiling = profiling
        super().__init__(strategy, clients_per_round)
        # By node: the utility, latency and number of the round in which it last trained.
        self.known: dict[str, tuple[float, float, int]] = {}
        self.profile_s: dict[str, float] = {}
        self.gains: list[float] = []
        self._new: list[int] = []

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        if self.profiling and not self.profile_s:
            self.profile_s = node_memory.time_nodes(
                self, context, grid, list(online), context.timeout_s
            )
        new = [node for node in sorted(online) if self.identity(node) not in self.known]
        old = sorted(set(online) - set(new), key=context.fleet.nodes.sort_key)
        count = min(self.count, len(online))
        num_new = min(len(new), max(int(self.new_share * count), count - len(old)))
        self.new_share = max(LEAST_SHARE, self.new_share * DECAY)
        self._new = self._draw(new, self._speeds(new), num_new)
        return self._new + self._exploit(old, count - num_new, context.round)

    def preferred_s(self) -> float:
        """Return the preferred duration T of a round; infinity if no latency is known."""
        known = {node: latency_s for node, (_, latency_s, _) in self.known.items()}
        latency_s = [t for t in (self.profile_s | known).values() if not isnan(t)]
        if not latency_s or self.quantile >= 1:
            return inf
        return float(np.quantile(latency_s, self.quantile))

    def _exploit(self, nodes: list[int], count: int, number: int) -> list[int]:
        """Draw by score from nodes with 95 % of the last score needed or more (l. 14-16)."""
        if not count:
            return []
        utility, latency_s, last = zip(*(self.known[self.identity(n)] for n in nodes), strict=True)
        found = scores(utility, latency_s, last, number, self.preferred_s(), self.penalty)
        chosen = np.flatnonzero(found >= CUT_OFF * np.sort(found)[-count])
        return self._draw([nodes[i] for i in chosen], found[chosen], count)

    def _speeds(self, nodes: list[int]) -> NDArray[np.float64]:
        latency_s = np.array([self.profile_s.get(self.identity(node), nan) for node in nodes])
        timed_s = latency_s[~np.isnan(latency_s)]
        usual_s = float(timed_s.mean()) if timed_s.size else 1.0
        return np.asarray(1 / np.maximum(np.nan_to_num(latency_s, nan=usual_s), 1 / MOST))

    def _draw(self, nodes: list[int], weights: NDArray[np.float64], count: int) -> list[int]:
        if not count:
            return []
        chances = np.maximum(weights, 1e-9)
        drawn = self.rng.choice(len(nodes), count, replace=False, p=chances / chances.sum())
        return [nodes[i] for i in drawn.tolist()]

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Learn utilities and latencies, and let the pacer compare utilities (l. 5-8)."""
        new = {self.identity(node) for node in self._new}
        for node, (latency_s, metrics) in good.items():
            square = read_number(metrics, keys.LOSS_RMS)
            loss = node_memory.training_loss(metrics) if isnan(square) else square
            gain = read_number(metrics, self._weight_key or "", 1.0) * max(0.0, loss)
            self.known[node] = 0.0 if isnan(loss) else min(gain, MOST), latency_s, context.round
        gains = [self.known[node][0] for node in good if node not in new]
        self.gains = [*self.gains[1 - 2 * WINDOW :], float(np.mean(gains)) if gains else 0.0]
        is_due = context.round % WINDOW == 0 and len(self.gains) == 2 * WINDOW
        if is_due and sum(self.gains[:WINDOW]) > sum(self.gains[WINDOW:]):
            self.quantile = min(1.0, self.quantile + PACE_STEP)

    def round_info(self) -> dict[str, Any]:
        preferred_s = self.preferred_s()
        new = [self.identity(node) for node in self._new]
        return {"new": new, "preferred_s": None if preferred_s == inf else preferred_s}
