"""Make tiers of a fleet, and say so where they mean little."""

from collections.abc import Sequence
from logging import DEBUG, INFO, WARNING
from typing import NamedTuple

import numpy as np

from flwr_hetero._flwr import log
from flwr_hetero.server.context import EQUAL_S
from flwr_hetero.server.nodes import NodeBook
from flwr_hetero.tifl.algorithm import Flags, Floats, Tiering, histogram_tiers, quantile_tiers
from flwr_hetero.tifl.tiers import Tiers

MODS = "the mod hetero"
TIERINGS = {"quantile": quantile_tiers, "histogram": histogram_tiers}
SAME = 2.0
"""Without repeated measurements nodes are equally fast if the slowest takes less than this many
times as long as the fastest."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""


class TierRule(NamedTuple):
    """How tiers are made; a node that takes ``t_max`` or longer is in none."""

    tiering: str
    num_tiers: int
    t_max: float


class Found(NamedTuple):
    """Tiers of a fleet, and what they were made of: tiering and seconds by node.

    ``first`` where nodes have a tier for the first time, so that credits begin again.
    """

    tiers: Tiers
    tiering: Tiering
    rounds: Floats
    remark: str = ""
    first: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether any latency is known, that is no simulation without reports."""
        return bool((self.rounds[~np.isnan(self.rounds)] != EQUAL_S).any())

    def log(self, num_at_work: int) -> None:
        """Log the size of the tiers, and why there are so few."""
        if self.remark:
            log(WARNING, "TiFL: %s", self.remark)
        sizes = [len(members) for members in self.tiers.members]
        dropouts = len(self.tiers.latency) - sum(sizes)
        text = "TiFL: tiers of %s nodes, fastest first; %d nodes dropped out%s"
        late = f", {num_at_work} have not answered yet" if num_at_work else ""
        log(DEBUG if num_at_work else INFO, text, sizes, dropouts, late)


def tier_fleet(
    node_ids: Sequence[int], rounds: Floats, registry: NodeBook, rule: TierRule
) -> Found | None:
    """Group profiled nodes by latency (section 4.2); None if no node answered in time.

    rounds: (sync_rounds, num_nodes); ``Tiering`` and the rounds returned are sorted by identity.
    """
    column = sorted(range(len(node_ids)), key=lambda i: registry.sort_key(node_ids[i]))
    rounds = rounds[:, column]
    latency, dropout = median_latency(rounds, rule.t_max)
    names = [registry.identity(node_ids[i]) for i in column]
    return group(names, latency, dropout, rounds, rule)


def group(
    names: Sequence[str],
    latency: Floats,
    dropout: Flags,
    rounds: Floats,
    rule: TierRule,
    at_work: Sequence[float] = (),
) -> Found | None:
    """Group nodes; ``at_work`` holds for how long others have not answered: they are slower."""
    if dropout.all():
        return None
    num_tiers, count = rule.num_tiers, len(names)
    known, remark = np.where(dropout, np.nan, latency), ""
    if not at_work and num_tiers > 1 and not speeds_differ(rounds[:, ~dropout]):
        num_tiers = 1
        fastest, slowest = np.nanmin(known), np.nanmax(known)
        remark = f"one tier: latencies ({fastest:.3g} to {slowest:.3g} s) differ by noise only"
        if fastest == slowest == EQUAL_S:
            remark = "one tier: in a simulation nodes must report their time, add " + MODS
    if at_work:
        others = censored_latency(latency, np.array(at_work))[count:]
        known = np.concatenate([known, others])
        rounds = np.hstack([rounds, np.tile(others, (len(rounds), 1))])
    found = TIERINGS[rule.tiering](known, num_tiers)
    if found.num_tiers < num_tiers:
        remark = f"{found.num_tiers} tiers instead of {num_tiers}: the latencies allow no more"
    own = zip(names, found.tier[:count].tolist(), strict=True)
    latencies = dict(zip(names, latency.tolist(), strict=True))
    tiers = Tiers(latencies, {n: t for n, t in own if t >= 0}, found.boundaries)
    return Found(tiers, found, rounds, remark)


def say_small_tiers(num_nodes: int, num_tiers: int, num_selected: int) -> None:
    """Log that rounds will train fewer nodes than asked for, if tiers of equal size are small."""
    if num_tiers > 1 and num_nodes // num_tiers < num_selected:
        text = "TiFL: tiers of about %d nodes are smaller than clients_per_round=%d: give %s"
        hint = f"num_tiers={max(1, num_nodes // num_selected)} or on_small_tier='borrow'"
        log(WARNING, text, num_nodes // num_tiers, num_selected, hint)


# --- latencies: seconds by measurement and node, NaN where there is none -------------------------


def median_latency(rounds: Floats, t_max: float) -> tuple[Floats, Flags]:
    r"""Return the latency of each node, and whether it missed every profiling round.

    .. math:: L_i = \mathrm{median}_r \min(l_{r,i}, T_{max})

    rounds: (sync_rounds, num_nodes), NaN for no answer -> (num_nodes,), (num_nodes,) of bool.

    The paper drops nodes whose accumulated latency is sync_rounds times T_max, which is to time
    out every time. The median is not moved by one slow start as the sum is.

    >>> median_latency(np.array([[1, 9, np.nan], [3, np.nan, np.nan], [2, 9, 80]]), t_max=30)
    (array([ 2.,  9., 30.]), array([False, False,  True]))
    """
    timed_out = np.isnan(rounds) | (rounds >= t_max)
    latency = np.median(np.where(timed_out, t_max, rounds), axis=0)
    return np.asarray(latency, np.float64), np.asarray(timed_out.all(axis=0))


def speeds_differ(rounds: Floats) -> bool:
    r"""Return whether latencies differ more between nodes than from time to time on one node.

    .. math:: \hat\sigma^2_{between} > \hat\sigma^2_{within} \text{ of } \log l_{r,i}

    These are the variance components of a one-way analysis of variance. With fewer than
    ``MIN_REPEATS`` repeated measurements in all, the slowest node must take at least ``SAME``
    times as long as the fastest.

    rounds: (num_measurements, num_nodes), NaN for none.

    >>> noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((3, 10)))
    >>> speeds_differ(noise), speeds_differ(noise * np.linspace(1, 4, 10))
    (False, True)
    """
    logs = np.log(np.maximum(rounds, 1e-9))  # a clock may be too coarse to see any time
    count = np.sum(~np.isnan(logs), axis=0)
    logs, count = logs[:, count > 0], count[count > 0]
    total, groups = count.sum(), len(count)
    if groups < 2:
        return False
    mean = np.nansum(logs, axis=0) / count
    if total - groups < MIN_REPEATS:
        return bool(np.ptp(mean) >= np.log(SAME))
    within = np.nansum((logs - mean) ** 2) / (total - groups)
    around = mean - (count @ mean) / total
    typical = (total - (count**2).sum() / total) / (groups - 1)
    between = (count @ around**2 / (groups - 1) - within) / typical
    return bool(between > within)


def censored_latency(latency: Floats, at_least: Floats) -> Floats:
    """Append nodes that have not answered yet: slower than all that have, no two equally fast.

    latency: (num_timed,), at_least: (num_others,), how long they have been at work -> both.

    >>> censored_latency(np.array([1.0, 4.0]), at_least=np.array([2.0, 9.0])).round(3)
    array([1., 4., 4., 9.])
    """
    bound = np.maximum(at_least, latency.max())
    return np.concatenate([latency, bound * (1 + 1e-6 * np.arange(1, len(bound) + 1))])
