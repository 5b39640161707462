"""What the order server knows of one node's order, and what the two tell each other."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.orders import Signs, reorder, unit_signs
from flwr_hetero.core.pair_balance import Vectors

MEMORY = 0.5
"""Weight of the past in the overlap of a node's company."""
LONGEST = 1e150
"""Above this, lengths are all the same: their squares must be numbers."""
PAIRS_REMEMBERED = 64
"""Pairs over which the usual length of a node's differences is taken, about."""


class Report(NamedTuple):
    """What a node saw on its way through its order.

    Parameters
    ----------
    node : str
        Stable identity.
    version : int
        Version of the order; 0 is ``range(num_units)``.
    num_units : int
        Length of the order.
    first_pair : int
        Position of the first pair.
    diffs : ndarray of float, shape (num_pairs, dim)
        Difference of each pair from there on, weighted as the node is in the model.
    """

    node: str
    version: int
    num_units: int
    first_pair: int
    diffs: Vectors


class Answer(NamedTuple):
    """What a node needs in order to be at a version of its order.

    Parameters
    ----------
    version : int
        The version wanted.
    signs : ndarray of int8, shape (num_units // 2,), or None
        Signs of the pairs of the version before; None for version 0, or if ``order`` is given.
    order : ndarray of int64, shape (num_units,), or None
        The whole order, for a node that has lost its own.
    first_pair : int
        With a whole order: the pair to go on from.
    """

    version: int = 0
    signs: Signs | None = None
    order: NDArray[np.int64] | None = None
    first_pair: int = 0


@dataclass
class OrderBook:
    """One node's order and what was seen of it.

    Parameters
    ----------
    order : ndarray of int64, shape (num_units,)
        The current order.
    version : int
        Its number.
    signs : ndarray of int8, shape (num_units // 2,), or None
        By which it came from the one before.
    seen : ndarray of int8
        Signs of those pairs of the current order that have theirs, from the first on.
    own_sum : ndarray of float, shape (dim,)
        Signed sum of these pairs.
    company : frozenset of str or None
        The nodes that it was balanced with last, itself among them.
    overlap : float
        Running part of its partners that it had met the time before.
    lost : bool
        The node does not have this order; it gets it whole.
    squares, num_measured : float
        Fading sum of squared lengths of the node's differences, and of how many they are.

    Examples
    --------
    >>> book = OrderBook(np.arange(4))
    >>> book.add(np.array([1, -1], np.int8))
    >>> book.version, book.order.tolist()
    (1, [0, 3, 2, 1])
    """

    order: NDArray[np.int64]
    version: int = 0
    signs: Signs | None = None
    seen: Signs = field(default_factory=lambda: np.zeros(0, np.int8))
    own_sum: Vectors = field(default_factory=lambda: np.zeros(0, np.float32))
    company: frozenset[str] | None = None
    overlap: float = 1.0
    lost: bool = False
    squares: float = 0.0
    num_measured: float = 0.0

    def answer(self) -> Answer:
        """Tell the node which order is next; the same until it reports from that order."""
        if self.lost:
            return Answer(self.version, order=self.order, first_pair=len(self.seen))
        return Answer(self.version, signs=self.signs)

    def follows(self, report: Report) -> bool:
        """Tell whether a report can be balanced, and notice a node without the right order.

        Parameters
        ----------
        report : Report
            Of this node.

        Returns
        -------
        bool
            True if its pairs are the next ones of the current order. A pass through the order
            that begins anew is taken from there; one with a gap has to begin anew.
        """
        one_behind = report.version == self.version - 1 and self.signs is not None
        self.lost = report.version != self.version and (self.lost or not one_behind)
        if report.version != self.version or not len(report.diffs):
            return False
        if report.first_pair == 0:
            self.seen = np.zeros(0, np.int8)
            self.own_sum = np.zeros(report.diffs.shape[1], report.diffs.dtype)
        return report.first_pair == len(self.seen)

    def meet(self, company: frozenset[str], num_known: int) -> None:
        """Note with whom the node is balanced.

        Parameters
        ----------
        company : frozenset of str
            All nodes of the company, this one among them.
        num_known : int
            How many of them were in its company the last time, itself among them.
        """
        if self.company is not None:
            kept = (num_known - 1) / max(1, len(company) - 1)
            self.overlap = MEMORY * self.overlap + (1 - MEMORY) * kept
        self.company = company

    def measure(self, diffs: Vectors) -> tuple[float, float]:
        """Take the lengths of differences into the node's usual length.

        Parameters
        ----------
        diffs : ndarray of float, shape (num_pairs, dim)
            Of the next pairs.

        Returns
        -------
        length, num_pairs : float
            Root mean square of the last lengths, these among them, and of how many pairs.
        """
        fade = (1 - 1 / PAIRS_REMEMBERED) ** len(diffs)
        with np.errstate(over="ignore"):
            length = min(float(np.linalg.norm(diffs)), LONGEST)
        self.squares = fade * self.squares + length**2
        self.num_measured = fade * self.num_measured + len(diffs)
        return (self.squares / self.num_measured) ** 0.5, self.num_measured

    def add(self, signs: Signs) -> None:
        """Take the signs of the next pairs, and make the next order if these were the last.

        Parameters
        ----------
        signs : ndarray of int8, shape (num_pairs,)
            +1 or -1.
        """
        self.seen = np.concatenate([self.seen, signs])
        num_units = len(self.order)
        if len(self.seen) == num_units // 2:
            self.signs, self.seen = self.seen, self.seen[:0]
            self.order = reorder(self.order, unit_signs(self.signs, num_units))
            self.version += 1
