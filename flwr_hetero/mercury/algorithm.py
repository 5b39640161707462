"""Importance sampling: probabilities and the weights that keep it unbiased (Mercury)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.client.gate import check_importance
from flwr_hetero.client.timing import Pace
from flwr_hetero.errors import invalid


def mixed_probs(importance: NDArray[np.float64], mixing: float) -> NDArray[np.float64]:
    r"""Draw by importance, with a share drawn uniformly (Mercury's Eq. 7, made safe).

    .. math:: q_j = (1 - \lambda) I_j / \sum_k I_k + \lambda / n

    Parameters
    ----------
    importance : ndarray of float64, shape (n,)
        Finite and not negative.
    mixing : float
        Share :math:`\lambda` of uniform draws in [0, 1]; 0 is the paper's Eq. 7.

    Returns
    -------
    ndarray of float64, shape (n,)
        Probabilities that sum to 1; uniform if all importance is 0.

    Raises
    ------
    ValueError
        If an importance is negative or not finite, or ``mixing`` lies outside [0, 1].

    Notes
    -----
    The paper draws by importance alone. A sample whose (cached) importance is 0 is then
    never drawn and the gradient is biased; with :math:`\lambda > 0` every weight is at most
    :math:`1 / \lambda`, however old the cache.

    References
    ----------
    .. [1] Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic
       Importance Sampling", SenSys 2021, section 4.1.

    Examples
    --------
    >>> mixed_probs(np.array([3.0, 1.0, 0.0, 0.0]), 0.5)
    array([0.5  , 0.25 , 0.125, 0.125])
    """
    check_importance(importance)
    if not 0.0 <= mixing <= 1.0:
        raise invalid("mixing", mixing, "lie in [0, 1]", "0.5 is a safe start")
    uniform = np.full(importance.shape, 1.0 / importance.size)
    total = importance.sum()
    return uniform if total == 0.0 else (1.0 - mixing) * importance / total + mixing * uniform


def error_chance(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    r"""Turn cross-entropy losses into the chance of a wrong answer.

    .. math:: 1 - p_y = 1 - e^{-\ell}

    Parameters
    ----------
    losses : ndarray of float64, shape (b,)
        Cross-entropy per sample, at least 0.

    Returns
    -------
    ndarray of float64, shape (b,)
        In [0, 1). The norm of the loss's gradient at the logits, which bounds the sample's
        gradient norm, lies between this and :math:`\sqrt 2` times this: the loss alone
        gives what would otherwise need the logits.

    Examples
    --------
    >>> error_chance(np.array([0.0, np.log(2.0)]))
    array([0. , 0.5])
    """
    return np.asarray(-np.expm1(-losses), dtype=np.float64)


def inverse_probs(probs: NDArray[np.float64], num_samples: int) -> NDArray[np.float64]:
    r"""Weigh drawn samples so that the mean of a batch estimates the mean over all (Eq. 3).

    .. math:: w_j = p_j / q_j = 1 / (N q_j)

    Parameters
    ----------
    probs : ndarray of float64, shape (batch,)
        Probability :math:`q_j` with which each drawn sample was drawn, greater than 0.
    num_samples : int
        Size N of the set drawn from.

    Returns
    -------
    ndarray of float64, shape (batch,)
        Weights with expectation 1.

    Examples
    --------
    >>> inverse_probs(np.array([0.5, 0.125]), 4)
    array([0.5, 2. ])
    """
    return 1.0 / (num_samples * probs)


class Groups(NamedTuple):
    """Non-overlapping groups of the local data, refreshed one after the other.

    Attributes
    ----------
    order : ndarray of int64, shape (num_samples,)
        A permutation; group i holds ``order[bounds[i]:bounds[i + 1]]``.
    bounds : ndarray of int64, shape (num_groups + 1,)
        From 0 to num_samples, increasing.
    turn : int
        The group whose importance is computed next.
    size : int
        Size to which groups are cut at the next chance.

    Examples
    --------
    >>> groups = Groups(np.array([3, 0, 2, 1]), np.array([0, 1, 4]), turn=0, size=2)
    >>> groups.sizes.tolist(), groups.members(-1).tolist()
    ([1, 3], [0, 2, 1])
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]
    turn: int
    size: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples M_i per group, shape (num_groups,)."""
        return np.diff(self.bounds)

    def members(self, group: int) -> NDArray[np.int64]:
        """Sample indices of one group; -1 is the last."""
        group %= len(self.bounds) - 1
        return self.order[self.bounds[group] : self.bounds[group + 1]]


def cut(length: int, size: int) -> NDArray[np.int64]:
    """Cut a length into pieces of nearly equal size.

    Parameters
    ----------
    length : int
        At least 0.
    size : int
        Largest piece wanted, at least 1.

    Returns
    -------
    ndarray of int64, shape (pieces + 1,)
        Bounds from 0 to ``length``; the pieces differ by at most 1.

    Examples
    --------
    >>> cut(10, 4)
    array([ 0,  3,  6, 10])
    """
    pieces = -(-length // size)
    return np.arange(pieces + 1) * length // max(pieces, 1)


def make_groups(num_samples: int, num_groups: int, rng: np.random.Generator) -> Groups:
    """Split the local data into random groups of nearly equal size.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    num_groups : int
        D, at most N.
    rng : np.random.Generator
        Draws the permutation.

    Returns
    -------
    Groups
        With group 0 to be refreshed first.

    Raises
    ------
    ValueError
        If ``num_groups`` is not in 1..num_samples.

    Examples
    --------
    >>> make_groups(10, 3, np.random.default_rng(0)).sizes
    array([3, 3, 4])
    """
    if not 1 <= num_groups <= num_samples:
        rule = f"lie between 1 and the {num_samples} samples of the data"
        raise invalid("num_groups", num_groups, rule, "use fewer groups or leave it out")
    bounds = np.arange(num_groups + 1) * num_samples // num_groups
    return Groups(rng.permutation(num_samples), bounds, 0, -(-num_samples // num_groups))


def resize(groups: Groups, size: int) -> Groups:
    """Cut the groups not yet refreshed in this cycle to another size (section 4.3, BACC).

    Parameters
    ----------
    groups : Groups
        The present ones.
    size : int
        Samples per group from now on, at least 1.

    Returns
    -------
    Groups
        The next group has the new size at once; :func:`advance` cuts all at the cycle's end.

    Raises
    ------
    ValueError
        If ``size`` is less than 1.

    Examples
    --------
    >>> groups = make_groups(12, 3, np.random.default_rng(0))
    >>> resize(advance(groups), 3).sizes
    array([4, 2, 3, 3])
    """
    if size < 1:
        raise invalid("size", size, "be at least 1", "a link that leaves no time needs no scoring")
    size = min(size, len(groups.order))
    if size == groups.size:
        return groups
    done = groups.bounds[groups.turn]
    rest = done + cut(len(groups.order) - int(done), size)
    return groups._replace(bounds=np.concatenate([groups.bounds[: groups.turn], rest]), size=size)


def advance(groups: Groups) -> Groups:
    """Pass the turn to the next group; after the last one a new cycle begins.

    Parameters
    ----------
    groups : Groups
        The present ones.

    Returns
    -------
    Groups
        With the turn moved on; if the size was changed on the way, cut anew for a new cycle.

    Examples
    --------
    >>> groups = make_groups(12, 2, np.random.default_rng(0))
    >>> advance(groups).turn, advance(advance(groups)).turn
    (1, 0)
    """
    turn = groups.turn + 1
    if turn < len(groups.bounds) - 1:
        return groups._replace(turn=turn)
    if groups.sizes.max() > groups.size or groups.sizes.max() - groups.sizes.min() > 1:
        groups = groups._replace(bounds=cut(len(groups.order), groups.size))
    return groups._replace(turn=0)


def relative_steps(groups: Groups) -> NDArray[np.int64]:
    """Tell in which step of the cycle each group was last refreshed: t_i of Eq. 6.

    Parameters
    ----------
    groups : Groups
        The present ones.

    Returns
    -------
    ndarray of int64, shape (num_groups,)
        This cycle's groups count from 0, the previous cycle's from ``-num_groups``.

    Notes
    -----
    Groups never refreshed count as refreshed in the cycle before the first, so that each
    group has each age once in every cycle.

    Examples
    --------
    >>> relative_steps(advance(make_groups(12, 3, np.random.default_rng(0))))
    array([ 0, -2, -1])
    """
    steps = np.arange(len(groups.bounds) - 1)
    return np.where(steps < groups.turn, steps, steps - len(steps))


def check_groups(groups: Groups, num_samples: int) -> None:
    """Refuse restored groups that are none.

    Parameters
    ----------
    groups : Groups
        From a saved state.
    num_samples : int
        Size N of the local data set.

    Raises
    ------
    ValueError
        If the order is no permutation, the bounds do not cut it, or the turn is out of range.

    Examples
    --------
    >>> check_groups(make_groups(6, 2, np.random.default_rng(0)), 6)
    """
    order, bounds, turn, size = groups
    if not np.array_equal(np.sort(order), np.arange(num_samples)):
        raise ValueError("the groups hold no permutation of the data: start afresh.")
    ends = len(bounds) >= 2 and bounds[0] == 0 and bounds[-1] == num_samples
    if not ends or np.diff(bounds).min() < 1 or not 0 <= turn < len(bounds) - 1 or size < 1:
        raise ValueError("the bounds of the groups are damaged: start afresh.")


def group_probs(steps: NDArray[np.int64], beta: float) -> NDArray[np.float64]:
    r"""Prefer groups refreshed lately (Eq. 6).

    .. math:: r_i = \exp(\beta t_i) / \sum_n \exp(\beta t_n)

    Parameters
    ----------
    steps : ndarray of int64, shape (num_groups,)
        From :func:`relative_steps`.
    beta : float
        At least 0; 0 treats all groups alike.

    Returns
    -------
    ndarray of float64, shape (num_groups,)
        Probabilities that sum to 1.

    Examples
    --------
    >>> group_probs(np.array([0, -2, -1]), 1.0).round(3)
    array([0.665, 0.09 , 0.245])
    """
    powers = np.exp(beta * (steps - steps.max()))
    return np.asarray(powers / powers.sum(), dtype=np.float64)


def choose_groups(
    steps: NDArray[np.int64], beta: float, num_chosen: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Choose distinct groups one after the other by :func:`group_probs`.

    Parameters
    ----------
    steps, beta
        As for :func:`group_probs`.
    num_chosen : int
        d, at most the number of groups.
    rng : np.random.Generator
        Draws one Gumbel variable per group: the largest sums follow the law of successive
        draws without replacement, for any beta and without underflow.

    Returns
    -------
    ndarray of int64, shape (num_chosen,)
        Group numbers, in no particular order.

    Examples
    --------
    >>> sorted(choose_groups(np.array([0, -2, -1]), 100.0, 2, np.random.default_rng(0)).tolist())
    [0, 2]
    """
    keys = beta * steps + rng.gumbel(size=len(steps))
    chosen: NDArray[np.int64] = np.argsort(-keys, kind="stable")[:num_chosen]
    return chosen


def allocate(num_draws: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Share draws among groups in proportion to their sizes, at least one each.

    Parameters
    ----------
    num_draws : int
        At least the number of groups.
    sizes : ndarray of int64, shape (num_chosen,)
        Group sizes M_i.

    Returns
    -------
    ndarray of int64, shape (num_chosen,)
        Sums to ``num_draws``; ``num_draws * M_i / sum(M)`` up to rounding.

    Examples
    --------
    >>> allocate(8, np.array([4, 10, 2]))
    array([2, 5, 1])
    """
    exact = num_draws * sizes / sizes.sum()
    counts: NDArray[np.int64] = np.maximum(exact.astype(np.int64), 1)
    while counts.sum() < num_draws:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > num_draws:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts


def draw_batch(
    importance: NDArray[np.float64],
    groups: Groups,
    *,
    batch_size: int,
    num_chosen: int,
    beta: float,
    mixing: float,
    per_cycle: bool,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    r"""Build a mini-batch in two levels: d groups, then samples within each (section 4.1).

    Parameters
    ----------
    importance : ndarray of float64, shape (num_samples,)
        Cached importance I of every sample.
    groups : Groups
        The present ones.
    batch_size, num_chosen : int
        \|B\| draws from d groups, ``num_chosen <= batch_size``.
    beta : float
        Of Eq. 6.
    mixing : float
        Share of uniform draws within a group, see :func:`mixed_probs`.
    per_cycle : bool
        False: the paper's weight :math:`1 / (M_i q_{ij})`. True: weights that make the mean
        gradient unbiased over a cycle, :math:`D |B| / (d N n_i q_{ij})` with n_i draws from
        group i.
    rng : np.random.Generator
        Draws groups and samples, the latter with replacement.

    Returns
    -------
    indices : ndarray of int64, shape (batch_size,)
        Samples, group by group.
    weights : ndarray of float64, shape (batch_size,)
        The step is the mean of ``weights * losses``.

    Notes
    -----
    The paper's claim of an unbiased gradient (section 4.4) treats the chosen groups as if all
    were equally likely; Eq. 6 prefers fresh ones, and larger ones get a larger part of the
    batch. Over one cycle of D refreshes every group has every age once, is therefore chosen
    d times in the mean, whatever beta: counting it with its share M_i / N each time repairs
    both. The same number of batches must be drawn between any two refreshes.

    Examples
    --------
    >>> from flwr_hetero.mercury.algorithm import make_groups
    >>> rng = np.random.default_rng(0)
    >>> groups = make_groups(6, 2, rng)
    >>> indices, weights = draw_batch(np.ones(6), groups, batch_size=4, num_chosen=2, beta=1.0,
    ...     mixing=0.5, per_cycle=True, rng=rng)
    >>> weights
    array([1., 1., 1., 1.])
    """
    chosen = choose_groups(relative_steps(groups), beta, num_chosen, rng)
    counts = allocate(batch_size, groups.sizes[chosen])
    indices, weights = [], []
    for group, count in zip(chosen, counts, strict=True):
        members = groups.members(group)
        probs = mixed_probs(importance[members], mixing)
        drawn = rng.choice(len(members), size=count, p=probs)
        indices.append(members[drawn])
        share = batch_size * len(groups.sizes) / (num_chosen * count * len(groups.order))
        weights.append((share if per_cycle else 1.0 / len(members)) / probs[drawn])
    return np.concatenate(indices), np.concatenate(weights)


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
