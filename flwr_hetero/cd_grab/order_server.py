"""What the order server knows of one node's order, and what the two tell each other."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import (
    Signs,
    Vectors,
    own_share,
    reorder,
    shared_balance,
    unit_signs,
)

MEMORY = 0.5
"""Weight of the past in the overlap of a node's company."""


LONGEST = 1e150
"""Above this, lengths are all the same: their squares must be numbers."""


PAIRS_REMEMBERED = 64
"""Pairs over which the usual length of a node's differences is taken, about."""


class Report(NamedTuple):
    """What a node saw on its way through its order."""

    node: str
    version: int
    num_units: int
    first_pair: int
    diffs: Vectors


class Answer(NamedTuple):
    """What a node needs in order to be at a version of its order."""

    version: int = 0
    signs: Signs | None = None
    order: NDArray[np.int64] | None = None
    first_pair: int = 0


@dataclass
class OrderBook:
    """One node's order and what was seen of it."""

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
        """Tell whether a report can be balanced, and notice a node without the right order."""
        one_behind = report.version == self.version - 1 and self.signs is not None
        self.lost = report.version != self.version and (self.lost or not one_behind)
        if report.version != self.version or not len(report.diffs):
            return False
        if report.first_pair == 0:
            self.seen = np.zeros(0, np.int8)
            self.own_sum = np.zeros(report.diffs.shape[1], report.diffs.dtype)
        return report.first_pair == len(self.seen)

    def meet(self, company: frozenset[str], num_known: int) -> None:
        """Note with whom the node is balanced."""
        if self.company is not None:
            kept = (num_known - 1) / max(1, len(company) - 1)
            self.overlap = MEMORY * self.overlap + (1 - MEMORY) * kept
        self.company = company

    def measure(self, diffs: Vectors) -> tuple[float, float]:
        """Take the lengths of differences into the node's usual length."""
        fade = (1 - 1 / PAIRS_REMEMBERED) ** len(diffs)
        with np.errstate(over="ignore"):
            length = min(float(np.linalg.norm(diffs)), LONGEST)
        self.squares = fade * self.squares + length**2
        self.num_measured = fade * self.num_measured + len(diffs)
        return (self.squares / self.num_measured) ** 0.5, self.num_measured

    def add(self, signs: Signs) -> None:
        """Take the signs of the next pairs, and make the next order if these were the last."""
        self.seen = np.concatenate([self.seen, signs])
        num_units = len(self.order)
        if len(self.seen) == num_units // 2:
            self.signs, self.seen = self.seen, self.seen[:0]
            self.order = reorder(self.order, unit_signs(self.signs, num_units))
            self.version += 1


NEARLY = 1.03
"""Orders are taken as equally long up to this factor."""


OUTLIER = 3.0
"""A node whose differences are longer than this many times the median node's walks alone."""


ENOUGH = 16
"""Pairs that tell how long a node's differences are; of fewer it takes more to be an outlier."""


class Balanced(NamedTuple):
    """What the reports of a round came to."""

    num_pairs: int = 0
    num_together: int = 0
    own_share: float = 0.0
    signed_sum: float = 0.0


class OrderServer:
    """Balance pairs that arrive round by round, and keep every node's order (Algorithm 4).

    Nodes at the same place of orders about equally long are balanced together, each of the others
    by itself: a common sum is of no use to nodes that do not walk side by side. How much weight a
    node's own sum has is up to :func:`~flwr_hetero.cd_grab.algorithm.own_share`.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.books: dict[str, OrderBook] = {}

    def answer(self, node: str) -> Answer:
        """Tell a node which order is next."""
        book = self.books.get(node)
        return Answer() if book is None else book.answer()

    def receive(self, reports: Iterable[Report]) -> Balanced:
        """Balance the pairs of a round."""
        fitting = [report for report in reports if self._book(report).follows(report)]
        together = _side_by_side(fitting)
        if not self.exact:
            together = [part for company in together for part in self._without_loud(company)]
        facts = [self._balance(company) for company in together]
        if not facts:
            return Balanced()
        pairs = [fact.num_pairs for fact in facts]
        return Balanced(
            sum(pairs),
            sum(fact.num_together for fact in facts),
            float(np.average([fact.own_share for fact in facts], weights=pairs)),
            max(fact.signed_sum for fact in facts),
        )

    def rename(self, old: str, new: str) -> None:
        """Keep a node's book under a better identity."""
        book = self.books.pop(old, None)
        if book is not None:
            self.books.setdefault(new, book)

    def _book(self, report: Report) -> OrderBook:
        book = self.books.get(report.node)
        if book is None or len(book.order) != report.num_units:
            book = OrderBook(np.arange(report.num_units))
            if report.version:  # its order is not known here: it gets a fresh one
                book.version, book.lost = report.version + 1, True
            self.books[report.node] = book
        return book

    def _without_loud(self, company: list[Report]) -> list[list[Report]]:
        """Let nodes with far longer vectors walk by themselves.

        One pair may well be long; it is the node's usual length that counts. One that was too
        long is forgotten, so that the next report is judged by itself.
        """
        measured = [self.books[report.node].measure(report.diffs) for report in company]
        limit = OUTLIER * float(np.median([length for length, _ in measured]))
        quiet, loud = [], []
        for report, (length, num_pairs) in zip(company, measured, strict=True):
            if length <= limit * max(1.0, (ENOUGH / num_pairs) ** 0.5):
                quiet.append(report)
            else:
                loud.append([report])
                self.books[report.node].squares = self.books[report.node].num_measured = 0.0
        return [quiet, *loud]

    def _balance(self, company: Sequence[Report]) -> Balanced:
        books = [self.books[report.node] for report in company]
        _introduce(books, frozenset(report.node for report in company))
        diffs = [report.diffs for report in company]
        overlaps = [book.overlap for book in books]
        shares = own_share(overlaps, len(books)) if len(books) > 1 else np.ones(1)
        running_sum, signs = shared_balance([book.own_sum for book in books], diffs, shares)
        for book, own in zip(books, signs, strict=True):
            book.add(own)
        lengths = [np.linalg.norm(each) for each in diffs]
        num_pairs = sum(map(len, signs))
        usual = float(np.linalg.norm(lengths) / np.sqrt(num_pairs)) or 1.0
        together = num_pairs if len(books) > 1 else 0
        signed_sum = float(np.linalg.norm(running_sum)) / usual
        return Balanced(num_pairs, together, float(shares.mean()), signed_sum)

    # --- state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all books, flat: ``node/field``, and the companies once each."""
        number: dict[frozenset[str] | None, int] = {None: -1}
        state: dict[str, Any] = {}
        for node, book in self.books.items():
            fields = vars(book) | {"own_sum": book.own_sum.copy()}  # it is changed in place
            fields["company"] = number.setdefault(book.company, len(number) - 1)
            state |= {f"{node}/{name}": value for name, value in fields.items()}
        companies = [sorted(company) for company in number if company is not None]
        state = {name: value for name, value in state.items() if value is not None}
        return state | {"companies": json.dumps(companies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; every node gets its order whole, it may have lost it."""
        companies: list[frozenset[str] | None] = [
            frozenset(names) for names in json.loads(state["companies"])
        ]
        fields: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            node, _, name = key.rpartition("/")
            if node:
                fields.setdefault(node, {})[name] = value
        for values in fields.values():
            values["company"] = [*companies, None][values["company"]]
            values["own_sum"], values["lost"] = values["own_sum"].copy(), True
        self.books = {node: OrderBook(**values) for node, values in fields.items()}


def _side_by_side(reports: Sequence[Report]) -> list[list[Report]]:
    """Put nodes together that are at the same place of orders about equally long."""
    places = _places(reports)
    together: dict[tuple[int, ...], list[Report]] = {}
    for report in reports:
        together.setdefault(places[_place(report)], []).append(report)
    return list(together.values())


def _place(report: Report) -> tuple[int, int, int]:
    return report.first_pair, report.num_units, len(report.diffs)


def _places(reports: Sequence[Report]) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """Map each place to the first one, in rising order, that is nearly the same."""
    places: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    leader = (-1, 0, 0)
    for place in sorted({_place(report) for report in reports}):
        near = (max(a, b) <= NEARLY * min(a, b) for a, b in zip(place[1:], leader[1:], strict=True))
        if place[0] != leader[0] or not all(near):
            leader = place
        places[place] = leader
    return places


def _introduce(books: Sequence[OrderBook], company: frozenset[str]) -> None:
    """Tell nodes with whom they are now; companies are compared once each."""
    known: dict[frozenset[str] | None, int] = {None: 0}
    for book in books:
        if book.company not in known:
            known[book.company] = len(company & (book.company or frozenset()))
        book.meet(company, known[book.company])
