"""Latencies of nodes from repeated measurements (TiFL, section 4.2), on NumPy arrays.

Seconds by measurement and node, (num_measurements, num_nodes), NaN where there is none.
"""

import numpy as np

from flwr_hetero.tifl.algorithm import Flags, Floats

SAME = 2.0
"""Without repeated measurements nodes are equally fast if the slowest takes less than this many
times as long as the fastest."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""


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
