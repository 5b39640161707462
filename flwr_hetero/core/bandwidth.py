"""BACC: as much importance work as the network hides (Mercury, section 4.3)."""

from math import isfinite
from typing import NamedTuple

from flwr_hetero.core.errors import invalid


class Pace(NamedTuple):
    """What a node knows of its own round, smoothed.

    Attributes
    ----------
    idle_s : float
        Seconds per round in which the node's processor waits for the network.
    score_s : float
        Seconds to score one example, forward only.
    """

    idle_s: float
    score_s: float


def smooth(old: Pace | None, new: Pace, weight: float = 0.5) -> Pace:
    r"""Follow a changing link without following every flicker.

    .. math:: \bar x \leftarrow (1 - w) \bar x + w x

    Parameters
    ----------
    old : Pace or None
        What was known; None at the first observation.
    new : Pace
        The last round's.
    weight : float
        Of the new observation, in (0, 1]; with 0.5 three rounds take up 7/8 of a change.

    Returns
    -------
    Pace
        The new estimate; an observation that is negative or not finite is passed over.

    Raises
    ------
    ValueError
        If ``weight`` lies outside (0, 1].

    Examples
    --------
    >>> smooth(Pace(1.0, 0.01), Pace(3.0, 0.01))
    Pace(idle_s=2.0, score_s=0.01)
    """
    if not 0.0 < weight <= 1.0:
        raise invalid("weight", weight, "lie in (0, 1]", "0.5 follows a change in a few rounds")
    if old is None:
        return Pace(*(value if _usable(value) else 0.0 for value in new))
    return Pace(
        *(
            (1.0 - weight) * before + weight * now if _usable(now) else before
            for before, now in zip(old, new, strict=True)
        )
    )


def group_size(pace: Pace, num_samples: int, margin: float = 0.9) -> int:
    """Size the next group so that scoring it takes as long as the node's idle time.

    Parameters
    ----------
    pace : Pace
        From :func:`smooth`.
    num_samples : int
        Size N of the local data set.
    margin : float
        Share of the idle time to fill, so that noise rarely lengthens the round.

    Returns
    -------
    int
        Between 0 (no time: score nothing) and ``num_samples``.

    Examples
    --------
    >>> group_size(Pace(idle_s=2.0, score_s=0.01), num_samples=1000)
    180
    >>> group_size(Pace(idle_s=0.0, score_s=0.01), num_samples=1000)
    0
    """
    if pace.idle_s <= 0.0:
        return 0
    if pace.score_s <= 0.0:
        return num_samples
    return int(min(margin * pace.idle_s / pace.score_s, num_samples))


def exposed_s(score_s: float, idle_s: float) -> float:
    """Time by which scoring lengthens a round when it overlaps with the network.

    Parameters
    ----------
    score_s : float
        Seconds of scoring.
    idle_s : float
        Seconds that the network takes meanwhile; 0 means one after the other.

    Returns
    -------
    float
        Seconds; 0 where all is hidden.

    Examples
    --------
    >>> exposed_s(1.0, 2.0), exposed_s(3.0, 2.0), exposed_s(3.0, 0.0)
    (0.0, 1.0, 3.0)
    """
    return max(0.0, score_s - idle_s)


def speedup(iterations_ratio: float, score_s: float, compute_s: float, network_s: float) -> float:
    r"""Predict what importance sampling gains over uniform sampling (Eq. 5).

    .. math:: \frac{1}{\frac{E_{is}}{E} (1 + \frac{T_{is}}{T_{cp} + T_{cm}})}

    Parameters
    ----------
    iterations_ratio : float
        Iterations with importance sampling over those without, E_is / E.
    score_s : float
        Seconds per iteration spent on importance and not hidden, T_is.
    compute_s, network_s : float
        Seconds per iteration of training and of communication, T_cp and T_cm.

    Returns
    -------
    float
        Greater than 1 where it pays.

    Examples
    --------
    >>> speedup(0.5, score_s=1.0, compute_s=1.0, network_s=3.0)
    1.6
    """
    return 1.0 / (iterations_ratio * (1.0 + score_s / (compute_s + network_s)))


def _usable(value: float) -> bool:
    return isfinite(value) and value >= 0.0
