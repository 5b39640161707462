"""Virtual time: what a synchronous round costs when nobody really sleeps."""

from collections.abc import Iterable
from math import isfinite

from flwr_hetero.core.errors import invalid


def round_time_s(
    latencies_s: Iterable[float], *, num_missing: int = 0, timeout_s: float | None = None
) -> float:
    r"""Length of a synchronous round: the slowest answer, or the time-out (TiFL, Eq. 1).

    .. math:: L_r = \max_{i \in C} L_i

    Parameters
    ----------
    latencies_s : iterable of float
        Latency of each node that answered, in seconds.
    num_missing : int
        Nodes that were asked and did not answer; with one or more of them the round lasts
        until the time-out.
    timeout_s : float, optional
        Time-out of the round, in seconds.

    Returns
    -------
    float
        Seconds.

    References
    ----------
    .. [1] Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020, Eq. 1.

    Examples
    --------
    >>> round_time_s([1.0, 4.0, 2.5])
    4.0
    >>> round_time_s([1.0, 4.0], num_missing=1, timeout_s=60.0)
    60.0
    """
    slowest = max(latencies_s, default=0.0)
    if num_missing and timeout_s is not None:
        return max(slowest, timeout_s)
    return slowest


class VirtualClock:
    """A clock that moves only when told to.

    Examples
    --------
    >>> clock = VirtualClock()
    >>> clock.advance_to(2.5)
    >>> clock.advance_to(1.0)   # never backwards
    >>> clock.now_s
    2.5
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def advance_to(self, time_s: float) -> None:
        """Move to a point in time; earlier points change nothing.

        Parameters
        ----------
        time_s : float
            Seconds since the clock's start.

        Raises
        ------
        ValueError
            If the time is not finite.
        """
        if not isfinite(time_s):
            raise invalid("time_s", time_s, "be finite", "an answer that never comes has no time")
        self.now_s = max(self.now_s, time_s)
