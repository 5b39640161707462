"""Mercury's group-wise importance sampling on NumPy arrays; the package's page has the listing."""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flwr_hetero.errors import check_count, invalid

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

BETA = 1.0  # preference for groups scored recently (Eq. 6); the paper gives no value
MARGIN = 0.9  # share of the idle time used for scoring, so that noise rarely lengthens a round


def error_probability(losses: Floats) -> Floats:
    r"""Convert cross-entropy losses to importance: the probability of a wrong answer.

    .. math:: I = 1 - p_y = 1 - e^{-\ell}

    losses: (n,), at least 0 -> (n,): the norm of the gradient at the logits, or up to a factor of
    sqrt(2) less.

    >>> error_probability(np.array([0.0, np.log(2.0)]))
    array([0. , 0.5])
    """
    return -np.expm1(-losses)


def check_importance(importance: Floats) -> None:
    """Raise ValueError if importance is negative or not finite in single precision."""
    bad = importance[~((importance >= 0.0) & (importance < 1e38))]
    if bad.size:
        hint = "if the model has diverged, lower the learning rate"
        raise invalid("importance", bad[:3].tolist(), "be finite and not negative", hint)


class Groups(NamedTuple):
    """Groups of the permuted samples ``order``: group i is ``order[bounds[i]:bounds[i + 1]]``.

    The group ``turn`` is scored next; no group yet to be scored has more than ``size`` samples.
    """

    order: Indices
    bounds: Indices
    turn: int
    size: int

    @property
    def sizes(self) -> Indices:
        """Samples M_i per group, shape (num_groups,)."""
        return np.diff(self.bounds)

    def members(self, group: int) -> Indices:
        """Sample indices of one group; -1 is the last."""
        group %= len(self.bounds) - 1
        return self.order[self.bounds[group] : self.bounds[group + 1]]


def make_groups(num_samples: int, num_groups: int, rng: Generator) -> Groups:
    """Split the local data at random into D groups of nearly equal size (section 4.1, step 1).

    >>> make_groups(10, 3, np.random.default_rng(0)).sizes
    array([3, 3, 4])
    """
    bounds = np.arange(num_groups + 1) * num_samples // num_groups
    return Groups(rng.permutation(num_samples), bounds, 0, -(-num_samples // num_groups))


def advance(groups: Groups) -> Groups:
    """Pass the turn to the next group; a new cycle begins with groups of nearly equal size.

    >>> groups = make_groups(12, 2, np.random.default_rng(0))
    >>> advance(groups).turn, advance(advance(groups)).turn
    (1, 0)
    """
    turn = groups.turn + 1
    if turn < len(groups.bounds) - 1:
        return groups._replace(turn=turn)
    # A resize within the cycle leaves groups of different sizes.
    if groups.sizes.max() > groups.size or np.ptp(groups.sizes) > 1:
        groups = groups._replace(bounds=_cut(len(groups.order), groups.size))
    return groups._replace(turn=0)


def resize(groups: Groups, size: int) -> Groups:
    """Cut the groups not yet scored in this cycle to another size (section 4.3).

    >>> groups = make_groups(12, 3, np.random.default_rng(0))
    >>> resize(advance(groups), 3).sizes
    array([4, 2, 3, 3])
    """
    size = min(check_count("size", size, 1), len(groups.order))
    if size == groups.size:
        return groups
    # Groups already scored in this cycle stay as they are.
    scored = int(groups.bounds[groups.turn])
    rest = scored + _cut(len(groups.order) - scored, size)
    return groups._replace(bounds=np.concatenate([groups.bounds[: groups.turn], rest]), size=size)


def _cut(length: int, size: int) -> Indices:
    """Return the bounds of the fewest pieces of at most ``size``, equal up to 1."""
    pieces = -(-length // size)
    return np.arange(pieces + 1) * length // max(pieces, 1)


def mixed_probs(importance: Floats, mixing: float) -> Floats:
    r"""Mix a draw by importance with a share of uniform draws (Eq. 7, made safe).

    .. math:: q_j = (1 - \lambda) I_j / \sum_k I_k + \lambda / n

    importance: (n,), at least 0 -> (n,). The paper has no :math:`\lambda`: a sample with cached
    importance 0 is then never drawn, and weights have no bound.

    >>> mixed_probs(np.array([3.0, 1.0, 0.0, 0.0]), 0.5)
    array([0.5  , 0.25 , 0.125, 0.125])
    """
    total = importance.sum()
    if total == 0.0:
        return np.full(len(importance), 1.0 / len(importance))
    return np.asarray((1.0 - mixing) * importance / total + mixing / len(importance))


def inverse_probs(probs: Floats, num_samples: int) -> Floats:
    r"""Weigh a batch so that its mean estimates the mean over all samples (Eq. 3).

    .. math:: w_j = p_j / q_j = 1 / (N q_j)

    probs: q of the drawn samples -> weights of the same shape, with expectation 1.

    >>> inverse_probs(np.array([0.5, 0.125]), 4)
    array([0.5, 2. ])
    """
    return 1.0 / (num_samples * probs)


def draw_flat(importance: Floats, shape: tuple[int, int], mixing: float, rng: Generator) -> Indices:
    r"""Draw batches from all samples, with replacement, by :func:`mixed_probs`.

    importance: (n,); shape: (num_batches, batch_size) -> indices of that shape. Groups decide
    what is scored next, not what may be drawn: unbiased at every step, however old the cache.

    >>> draw_flat(np.array([0.0, 1.0]), (1, 4), 0.5, np.random.default_rng(0))
    array([[1, 0, 1, 1]])
    """
    num_batches, size = shape
    # Round at random, so that the expected share of uniform draws is exact.
    num_uniform = (mixing * size + rng.random((num_batches, 1))).astype(np.int64)
    indices = rng.integers(len(importance), size=shape)
    sums = np.cumsum(importance)
    if sums[-1] > 0.0:
        by_importance = np.arange(size) >= num_uniform
        points = rng.random(np.count_nonzero(by_importance)) * sums[-1]
        # Rounding may make a point as large as the last sum, where searchsorted finds no sample.
        points = np.minimum(points, np.nextafter(sums[-1], 0.0))
        indices[by_importance] = sums.searchsorted(points, side="right")
    return indices


def choose_groups(groups: Groups, num_chosen: int, rng: Generator) -> Indices:
    r"""Choose d distinct groups, one after the other; prefer those scored recently (Eq. 6).

    .. math:: r_i = \exp(\beta t_i) / \sum_n \exp(\beta t_n)

    Step :math:`t_i` in which group i was scored: from 0 in this cycle, below 0 in the last one.

    >>> groups = make_groups(60, 30, np.random.default_rng(0))
    >>> np.sort(choose_groups(groups, 3, np.random.default_rng(0)))
    array([25, 28, 29])
    """
    turns = np.arange(len(groups.sizes))
    steps = np.where(turns < groups.turn, turns, turns - len(turns))
    # The largest values of log r_i + Gumbel noise are successive draws without replacement.
    noisy = BETA * steps + rng.gumbel(size=len(steps))
    return np.argsort(-noisy, kind="stable")[:num_chosen]


def allocate(num_draws: int, sizes: Indices) -> Indices:
    """Share the draws of a batch among the chosen groups by their sizes, at least one each.

    sizes: (num_chosen,) -> (num_chosen,), sums to ``num_draws >= num_chosen``.

    >>> allocate(8, np.array([4, 10, 2]))
    array([2, 5, 1])
    """
    exact = num_draws * sizes / sizes.sum()
    counts: Indices = np.maximum(exact.astype(np.int64), 1)
    while counts.sum() < num_draws:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > num_draws:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return counts


def draw_two_level(
    importance: Floats, groups: Groups, batch_size: int, num_chosen: int, rng: Generator
) -> tuple[Indices, Floats]:
    r"""Draw a batch as the paper does: d groups, then samples of each (section 4.1, step 2).

    importance: (n,) -> indices (batch_size,), weights (batch_size,). Biased: the proof of
    section 4.4 treats the chosen groups as equally likely, but Eq. 6 prefers the latest.

    >>> rng = np.random.default_rng(0)
    >>> draw_two_level(np.ones(6), make_groups(6, 2, rng), 4, 2, rng)[1]
    array([1., 1., 1., 1.])
    """
    # Eq. 6: d groups
    chosen = choose_groups(groups, num_chosen, rng)
    counts = allocate(batch_size, groups.sizes[chosen])
    indices = []
    weights = []
    for group, count in zip(chosen, counts, strict=True):
        members = groups.members(group)
        # Eq. 7: samples of each
        probs = mixed_probs(importance[members], 0.0)
        drawn = rng.choice(len(members), size=count, p=probs)
        indices.append(members[drawn])
        # Eq. 3: p / q
        weights.append(inverse_probs(probs[drawn], len(members)))
    return np.concatenate(indices), np.concatenate(weights)


def group_size(idle_s: float, score_s: float, num_samples: int) -> int:
    """Return how many samples are scored while the node waits for the network, at most all.

    >>> group_size(idle_s=2.0, score_s=0.01, num_samples=1000)
    180
    """
    if idle_s <= 0.0:
        return 0
    if score_s <= 0.0:
        return num_samples
    return int(min(MARGIN * idle_s / score_s, num_samples))
