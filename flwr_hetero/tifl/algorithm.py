"""TiFL's policies (section 4.3) and Algorithm 2 as ``select``, on NumPy arrays.

The listing is the package's. Section 4.2, tiers by latency, is in ``tiers``; tier 0 is the fastest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.errors import check_choice, invalid

Floats: TypeAlias = NDArray[np.float64]
Available: TypeAlias = Callable[[str], int | None]
"""Return the node id that belongs to an identity; None if it cannot be asked now."""

# --- Section 4.3: static policies --------------------------------------------------------------

VANILLA, ALGORITHM_2 = "vanilla", "algorithm-2"
"""One tier with every node; Algorithm 2 with the ranks of ``change_probs``, equal at first."""
PACED, ADAPTIVE = "paced", "adaptive"
"""Our own: ``paced_credits`` in every period; probabilities by error and latency."""
STATIC_POLICIES: dict[str, tuple[float, ...]] = {
    "slow": (0.0, 0.0, 0.0, 0.0, 1.0),
    "uniform": (0.2, 0.2, 0.2, 0.2, 0.2),
    "random": (0.7, 0.1, 0.1, 0.05, 0.05),
    "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
    "fast1": (0.225, 0.225, 0.225, 0.225, 0.1),
    "fast2": (0.2375, 0.2375, 0.2375, 0.2375, 0.05),
    "fast3": (0.25, 0.25, 0.25, 0.25, 0.0),
}
"""Table 1: probability of each of five tiers, fastest first."""


def check_policy(policy: str | Sequence[float], num_tiers: int) -> None:
    """Refuse a policy that is not known, or probabilities that are none."""
    if isinstance(policy, str):
        check_choice("policy", policy, (ADAPTIVE, ALGORITHM_2, PACED, VANILLA, *STATIC_POLICIES))
        return
    rule = f"have num_tiers={num_tiers} entries"
    try:
        probs = np.array(policy, np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise invalid("policy", policy, rule) from error
    if probs.shape != (num_tiers,):
        raise invalid("policy", policy, rule)
    if not (np.isfinite(probs) & (probs >= 0)).all() or abs(probs.sum() - 1) > 1e-6:
        raise invalid("policy", policy, "hold probabilities that sum to 1")


def policy_probs(policy: str | Sequence[float], num_tiers: int) -> Floats:
    """Return the probability of each tier that a policy begins with: (num_tiers,), sums to 1.

    For other than five tiers, "uniform" and "fast1" to "fast3" keep the slowest tier's
    probability and share the rest equally, and "random" is resampled.

    >>> policy_probs("random", 5)
    array([0.7 , 0.1 , 0.1 , 0.05, 0.05])
    >>> policy_probs("fast1", 3)
    array([0.45, 0.45, 0.1 ])
    """
    if not isinstance(policy, str):
        return np.asarray(np.array(policy, np.float64) / np.sum(policy))
    if num_tiers == 1:
        return np.ones(1)
    row = STATIC_POLICIES.get(policy, STATIC_POLICIES["uniform"])
    if policy == "random" or num_tiers == len(row):
        return resample(np.array(row), num_tiers)
    if policy == "fast":
        return np.asarray(np.eye(num_tiers)[0])
    slowest = 1 / num_tiers if row[-1] == row[0] else row[-1]
    return np.array([(1 - slowest) / (num_tiers - 1)] * (num_tiers - 1) + [slowest])


def resample(probs: Floats, num_tiers: int) -> Floats:
    """Keep the probability of every part of the fleet with another number of equal tiers.

    probs: (any,) -> (num_tiers,) with the same sum.

    >>> resample(np.array([0.7, 0.1, 0.1, 0.05, 0.05]), num_tiers=2)
    array([0.85, 0.15])
    """
    if num_tiers == len(probs):
        return probs
    cumulative = np.concatenate([[0.0], np.cumsum(probs)])
    position = np.linspace(0, len(probs), num_tiers + 1)
    return np.asarray(np.diff(np.interp(position, range(len(cumulative)), cumulative)))


# --- Section 4.4: Algorithm 2, adaptive tier selection -----------------------------------------


class TierState(NamedTuple):
    """What Algorithm 2 carries from round to round, arrays of shape (num_tiers,).

    ``accuracy`` is NaN where unknown; ``credits`` are those left, inf without a limit;
    ``full_credits`` are added once none is left; ``tier`` is the current one, -1 before the first.
    """

    probs: Floats
    accuracy: Floats
    credits: Floats
    full_credits: Floats
    tier: int = -1


class Draw(NamedTuple):
    """The tier of a round, its nodes, and the probabilities by which it was drawn."""

    tier: int | None
    nodes: list[int]
    probs: Floats


def first_state(
    policy: str | Sequence[float], num_tiers: int, credits: ArrayLike | None, count: int
) -> TierState:
    """Begin with a policy's probabilities, all credits and no accuracy (Alg. 2, l. 1).

    credits: (num_tiers,), rounds that each tier may train, None for no limit; count: tiers that
    there are, for which what is given is resampled.

    >>> state = first_state([0.5, 0.3, 0.2], num_tiers=3, credits=[8, 4, 1], count=2)
    >>> state.probs, state.credits
    (array([0.65, 0.35]), array([10.,  3.]))
    """
    probs = policy_probs(policy, count if isinstance(policy, str) else num_tiers)
    full = np.full(count, np.inf)
    if credits is not None:
        full = np.ceil(resample(np.asarray(credits, np.float64), count))
    return TierState(resample(probs, count), np.full(count, np.nan), full, full)


def carry_over(before: TierState, new: TierState, policy: str, *, with_credits: bool) -> TierState:
    """Go on with accuracies, and credits if wanted, with new tiers, as many as before.

    >>> old, new = first_state("uniform", 2, [3, 3], 2), first_state("fast", 2, [9, 9], 2)
    >>> carry_over(old._replace(tier=1), new, "fast", with_credits=True).credits
    array([3., 3.])
    """
    probs = before.probs if policy == ALGORITHM_2 else new.probs
    credits = before.credits if with_credits else new.credits
    return new._replace(accuracy=before.accuracy, tier=before.tier, credits=credits, probs=probs)


def select(
    state: TierState,
    accuracy: Floats | None,
    members: Sequence[Sequence[str]],
    available: Available,
    count: int,
    rng: np.random.Generator,
    weights: Floats | None = None,
) -> tuple[Draw, TierState]:
    """Choose the tier of a round and its nodes (Alg. 2, l. 3-16).

    accuracy: (num_tiers,) after the round before, NaN where unknown, None but every I rounds;
    members: identities of each tier's nodes; weights: (num_tiers,) by which the tier is drawn
    in place of ``state.probs``; count: nodes |C| of a round. Tiers without available nodes are
    passed and pay nothing.

    >>> probs, credits = np.array([0.9, 0.1]), np.array([1.0, 0.0])
    >>> state = TierState(probs, np.full(2, np.nan), credits, np.ones(2))
    >>> nodes, rng = {"a": 1, "b": 2, "c": 3}, np.random.default_rng(0)
    >>> draw, state = select(state, None, [["a", "b"], ["c"]], nodes.get, 1, rng)
    >>> draw.tier, draw.probs, state.credits
    (0, array([1., 0.]), array([0., 0.]))
    """
    # l. 3: r % I == 0 and r >= I
    if accuracy is not None:
        before = state.accuracy
        known = np.where(np.isnan(accuracy), state.accuracy, accuracy)
        state = state._replace(accuracy=known)
        # l. 4: false with NaN
        if state.tier >= 0 and accuracy[state.tier] <= before[state.tier]:
            # l. 5
            state = state._replace(probs=change_probs(state.accuracy))
    # The paper assumes n_j > |C|. Here a tier may have no node.
    possible = np.array([len(names) > 0 for names in members])
    while possible.any():
        # l. 8-14: one draw over the tiers with credits has the distribution of the loop, which
        # never ends if no tier has credits. Here all get their credits again.
        credits = state.credits
        eligible = possible & (state.credits > 0)
        if not eligible.any():
            credits = credits + state.full_credits
            eligible = possible
        probs = _first_that_any(eligible, weights, state.probs)
        tier = int(rng.choice(len(probs), p=probs))
        # l. 15
        nodes = draw_nodes(members[tier], count, available, rng)
        if nodes:
            # l. 11; l. 16 would be the second credit
            spent = credits - (np.arange(len(probs)) == tier)
            return Draw(tier, nodes, probs), state._replace(credits=spent, tier=tier)
        possible[tier] = False
    return Draw(None, [], np.zeros(len(possible))), state


def _first_that_any(eligible: NDArray[np.bool_], *rows: Floats | None) -> Floats:
    """Return the first weights of which an eligible tier has some, as probabilities."""
    # All are alike in the end, for instance for "fast" without a node of tier 0.
    for row in (*rows, np.ones(len(eligible))):
        if row is not None and (weights := row * eligible).any():
            break
    return np.asarray(weights / weights.sum())


def draw_nodes(
    members: Sequence[str], count: int, available: Available, rng: np.random.Generator
) -> list[int]:
    """Draw available nodes of a tier uniformly, at most ``count`` (Alg. 2, l. 15)."""
    chosen: list[int] = []
    seen: set[int] = set()
    batch = count
    # The batches grow, so that a large tier is not searched while most of it is online.
    while len(chosen) < count and len(seen) < len(members):
        batch = min(2 * batch, len(members))
        drawn = rng.choice(len(members), size=batch, replace=False).tolist()
        for position in (p for p in drawn if p not in seen):
            seen.add(position)
            if (node_id := available(members[position])) is not None:
                chosen.append(node_id)
    return chosen[:count]


def change_probs(accuracy: Floats) -> Floats:
    r"""Give tiers of lower accuracy a higher probability (Alg. 2, ChangeProbs).

    .. math:: p_j \propto (m + 1 + higher_j - lower_j) / 2

    accuracy: (num_tiers,), NaN where unknown (ties with all) -> (num_tiers,), sums to 1. The
    paper leaves the rule open: ranks, of which ties share theirs, are free of scale.

    >>> change_probs(np.array([0.9, 0.5]))
    array([0.33333333, 0.66666667])
    """
    higher = (accuracy > accuracy[:, None]).sum(axis=1)
    lower = (accuracy < accuracy[:, None]).sum(axis=1)
    weights = (len(accuracy) + 1 + higher - lower) / 2
    return np.asarray(weights / weights.sum())


def refund(state: TierState) -> TierState:
    """Give its credit back to the current tier, of which no reply counts.

    >>> refund(first_state("uniform", 2, [3, 3], 2)._replace(tier=1)).credits
    array([3., 4.])
    """
    return state._replace(credits=state.credits + (np.arange(len(state.credits)) == state.tier))


def sampling_rates(
    tier_probs: Floats, tier_sizes: NDArray[np.int64], clients_per_round: int
) -> Floats:
    r"""Return the chance that a node of each tier trains in a round of a static policy (4.6).

    .. math:: q_j = \frac{\theta_j}{n_{tiers}} \frac{|C|}{|n_j|}, \quad q_{max} = \max_j q_j

    tier_probs, tier_sizes: (num_tiers,) -> (num_tiers,).

    >>> sampling_rates(np.array([0.7, 0.2, 0.1]), np.array([10, 10, 10]), clients_per_round=5)
    array([0.35, 0.1 , 0.05])
    """
    return tier_probs * np.minimum(clients_per_round / tier_sizes, 1.0)


# --- Policies of our own -----------------------------------------------------------------------

PACE, ERROR_POWER = 0.75, 2.0
"""Powers of the latency (1: tiers share the time equally, 0: the rounds) and of a tier's error."""
LEAST_ERROR = 0.1
"""A tier's error counts as at least so much of the largest, so that none is left out for good."""
MOST_SHARES = 2.0
"""Largest probability of a tier, in the share that it has of the nodes: "adaptive"."""
MOST_DUE = 2.0
"""Rounds that a tier may be due, or ahead: one whose nodes were away does not make up for them."""


def paced_credits(latency: Floats) -> Floats:
    r"""Return the rounds of each tier in a period of the policy "paced".

    .. math:: c_j = \min(2^{T-1-j}, (\max_k L_k / L_j)^{0.75}) \text{, rounded}

    latency: (num_tiers,) -> (num_tiers,).

    >>> paced_credits(np.array([0.25, 0.5, 1.0, 2.0, 10.0]))
    array([16.,  8.,  4.,  2.,  1.])
    """
    most = 2.0 ** np.arange(len(latency))[::-1]
    return np.asarray(np.minimum(most, np.round(_times_faster(latency) ** PACE)))


def weigh_tiers(accuracy: Floats, latency: Floats) -> Floats:
    r"""Weigh what a tier has still to learn against the time that its rounds take: "adaptive".

    .. math:: p_j \propto E_j^2 / L_j^{0.75}, \quad E_j = \max(e_j, 0.1 \max_k e_k)

    The error e is 1 less an accuracy (100 less one in percent), or the loss, which comes as a
    negative accuracy. A tier without one has the mean error of the others.

    accuracy: (num_tiers,), NaN where unknown, latency: (num_tiers,) -> (num_tiers,), sums to 1.

    >>> weigh_tiers(np.array([0.8, 0.6]), latency=np.array([1.0, 1.0]))
    array([0.2, 0.8])
    """
    known = accuracy[~np.isnan(accuracy)]
    weights = _times_faster(latency) ** PACE
    if len(known):
        best = 0.0 if known.max() <= 0 > known.min() else 1.0 if known.max() <= 1 else 100.0
        error = best - np.where(np.isnan(accuracy), known.mean(), accuracy)
        if error.max() > 0:
            weights = weights * np.maximum(error / error.max(), LEAST_ERROR) ** ERROR_POWER
    return np.asarray(weights / weights.sum())


def limit_probs(probs: Floats, sizes: Floats) -> Floats:
    """Let no tier train more often than ``MOST_SHARES`` times its share of the nodes.

    The others share what is cut. probs, sizes: (num_tiers,) -> (num_tiers,).

    >>> limit_probs(np.array([0.8, 0.1, 0.1]), sizes=np.array([1, 2, 2]))
    array([0.4, 0.3, 0.3])
    """
    most = MOST_SHARES * sizes / sizes.sum()
    free = np.ones(len(probs), bool)
    while (over := free & (probs > most)).any():
        free &= ~over
        probs = np.where(free, probs * (1.0 - most[~free].sum()) / probs[free].sum(), most)
    return probs


def steer(state: TierState, accuracy: Floats | None, latency: Floats, sizes: Floats) -> TierState:
    """Average the accuracies with those so far, and set the probabilities by them: "adaptive".

    >>> state = TierState(np.ones(2) / 2, np.full(2, np.nan), np.ones(2), np.ones(2))
    >>> steer(state, np.array([0.8, 0.6]), latency=np.ones(2), sizes=np.ones(2)).probs
    array([0.2, 0.8])
    """
    if accuracy is None:
        accuracy = state.accuracy
    before = np.where(np.isnan(state.accuracy), accuracy, state.accuracy)
    # The last tier to train has a higher accuracy than it will keep.
    accuracy = np.where(np.isnan(accuracy), before, (before + accuracy) / 2)
    probs = limit_probs(weigh_tiers(accuracy, latency), sizes)
    return state._replace(accuracy=accuracy, probs=probs)


def _times_faster(latency: Floats) -> Floats:
    # A clock may be too coarse to measure any time.
    seconds = np.maximum(latency, 1e-9)
    return np.asarray(seconds.max() / seconds)
