"""Which samples move between devices, and who holds what (Mercury, section 4.2)."""

from bisect import insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.groups import Groups


def offer(
    importance: NDArray[np.float64],
    groups: Groups,
    num_offers: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    r"""Choose the samples that a device gives away: important ones, from every group.

    Group i gives :math:`N_o M_i / \sum_j M_j` samples, each drawn with a probability in
    proportion to its importance within the group (Eq. 7).

    Parameters
    ----------
    importance : ndarray of float64, shape (num_samples,)
        Cached importance; all equal is the importance-agnostic baseline.
    groups : Groups
        The sampler's groups.
    num_offers : int
        N_o, at most the number of samples.
    rng : np.random.Generator
        Source of chance.

    Returns
    -------
    ndarray of int64, shape (num_offers,)
        Distinct samples in random order, so that a prefix is as good as the whole.

    Raises
    ------
    ValueError
        If more samples are asked for than there are.

    Notes
    -----
    Shares are rounded down and the rest is drawn by the fractions left over, so that the mean
    is exact also when there are fewer offers than groups. Where a group has fewer important
    samples than it must give, samples of no importance fill up.

    Examples
    --------
    >>> from flwr_hetero.core.groups import make_groups
    >>> rng = np.random.default_rng(0)
    >>> groups = make_groups(6, 2, rng)
    >>> importance = np.zeros(6)
    >>> importance[groups.members(0)[:2]] = importance[groups.members(1)[:2]] = 1.0
    >>> sorted(offer(importance, groups, 4, rng)) == sorted(np.flatnonzero(importance))
    True
    """
    total = len(groups.order)
    if not 0 <= num_offers <= total:
        raise invalid("num_offers", num_offers, f"lie in 0..{total}", "lower the budget")
    exact = num_offers * groups.sizes / total
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = num_offers - int(counts.sum())
    if missing:
        chances = exact - counts
        counts[rng.choice(len(counts), missing, replace=False, p=chances / chances.sum())] += 1
    # largest keys log(I) + Gumbel: successive draws without replacement
    with np.errstate(divide="ignore"):
        keys = np.maximum(np.log(importance), -1e6) + rng.gumbel(size=total)
    offered = []
    for group, count in enumerate(counts):
        members = groups.members(group)
        offered.append(members[np.argsort(-keys[members], kind="stable")[:count]])
    return rng.permutation(np.concatenate(offered))


class Swap(NamedTuple):
    """Two slots, on two devices, that exchange what they hold.

    Attributes
    ----------
    node, slot : str, int
        One place.
    other_node, other_slot : str, int
        The other.

    Examples
    --------
    >>> swap = Swap("a", 3, "b", 0)
    >>> swap.other_node, swap.other_slot
    ('b', 0)
    """

    node: str
    slot: int
    other_node: str
    other_slot: int


def match(offers: dict[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Pair the slots offered by different devices at random.

    Parameters
    ----------
    offers : dict of str to list of int
        Per device the slots whose samples the server holds a copy of.
    rng : np.random.Generator
        Source of chance.

    Returns
    -------
    list of Swap
        Every slot at most once; always between the two devices with the most slots left, so
        that as few as possible stay over. Sizes do not change by swapping.

    Notes
    -----
    Devices are kept by the number of slots that they have left: a swap costs about the same
    whatever their number.

    Examples
    --------
    >>> swaps = match({"a": [1, 2], "b": [7], "c": [5]}, np.random.default_rng(0))
    >>> sorted({swap.node for swap in swaps} | {swap.other_node for swap in swaps})
    ['a', 'b', 'c']
    """
    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}
    by_size: list[list[str]] = [[] for _ in range(1 + max(map(len, left.values()), default=0))]
    for node, slots in left.items():
        by_size[len(slots)].append(node)  # in the order of their names
    swaps = []
    num_left = len(left) - len(by_size[0])
    while num_left > 1:
        first, second = _take_fullest(by_size, rng), _take_fullest(by_size, rng)
        swaps.append(Swap(first, left[first].pop(), second, left[second].pop()))
        for node in (first, second):
            insort(by_size[len(left[node])], node)
            num_left -= not left[node]
    return swaps


def _take_fullest(by_size: list[list[str]], rng: np.random.Generator) -> str:
    """Take out one of the devices with the most slots, at random."""
    fullest = next(nodes for nodes in reversed(by_size) if nodes)
    return fullest.pop(int(rng.integers(len(fullest))))


def chunk(slots: list[int], sample_bytes: int, budget_bytes: int) -> tuple[list[int], list[int]]:
    """Split off what fits into a round's budget; the rest resumes there (breakpoint-resume).

    Parameters
    ----------
    slots : list of int
        What is still to be sent.
    sample_bytes : int
        Size of one sample.
    budget_bytes : int
        What the link can carry aside while the device computes.

    Returns
    -------
    now, later : list of int
        Without loss: ``now + later == slots``.

    Examples
    --------
    >>> chunk([4, 8, 1], sample_bytes=100, budget_bytes=250)
    ([4, 8], [1])
    """
    fits = max(0, budget_bytes // max(sample_bytes, 1))
    return slots[:fits], slots[fits:]
