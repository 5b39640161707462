"""Who holds which sample while samples move between devices: none lost, none doubled."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.core.resharding import match


class Holding(NamedTuple):
    """What a slot of a device holds since its last swap.

    Attributes
    ----------
    version : int
        Number of the swap, from 1.
    sample : int
        Position in the ledger's store.

    Examples
    --------
    >>> ledger = Ledger()
    >>> _ = ledger.take("a", [3], b"A3"), ledger.take("b", [0], b"B0")
    >>> _ = ledger.swap(np.random.default_rng(0))
    >>> ledger.holdings["a"][3] == Holding(version=1, sample=1)
    True
    """

    version: int
    sample: int


class Delivery(NamedTuple):
    """What a device must know and receive before it trains.

    Attributes
    ----------
    slots, versions : list of int
        All its slots that hold another's sample, and since which swap.
    sent : list of int
        Those whose content goes along.
    content : bytes
        Their samples, one after the other, all of one size.
    """

    slots: list[int]
    versions: list[int]
    sent: list[int]
    content: bytes


class Ledger:
    """The server's book of a resharding; samples are opaque byte strings of one size.

    A device uploads copies of samples it offers (:meth:`take`); :meth:`swap` exchanges slots
    whose copies are both here; :meth:`deliver` says what a device holds from now on. Only the
    book decides who holds a sample: a device that has not received a delivery does not train on
    the slot (see :class:`~flwr_hetero.core.shard.Shard`), so a failure at any point neither
    loses a sample nor lets two devices train on it. Content is sent again until confirmed.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.take("a", [3], b"A3"), ledger.take("b", [0], b"B0")
    (1, 1)
    >>> ledger.swap(np.random.default_rng(0))
    1
    >>> ledger.deliver("a")
    Delivery(slots=[3], versions=[1], sent=[3], content=b'B0')
    >>> ledger.confirm("a", missing=[])
    >>> ledger.deliver("a").sent
    []
    """

    def __init__(self) -> None:
        self.store: list[bytes] = []
        self.holdings: dict[str, dict[int, Holding]] = {}
        self.waiting: dict[str, dict[int, int]] = {}
        self.unconfirmed: dict[str, set[int]] = {}
        self.num_swaps = 0
        self.sample_bytes = 0

    def settle(self, offers: Iterable[tuple[int, int]]) -> bool:
        """Agree on the size of a sample before the offers of a round are taken.

        What most devices of a round send is right; before the first swap, two that agree also
        overrule what was taken earlier, which is then forgotten.

        Parameters
        ----------
        offers : iterable of (int, int)
            Per device how many samples it offers, and their bytes together.

        Returns
        -------
        bool
            Whether earlier offers were forgotten.

        Examples
        --------
        >>> ledger = Ledger()
        >>> ledger.settle([(1, 3), (1, 2), (2, 4)])
        False
        >>> ledger.take("a", [3], b"A33")
        Traceback (most recent call last):
        ...
        ValueError: 3 bytes are not 1 samples of 2 bytes.
        """
        sizes = Counter(
            length // count for count, length in offers if length and count and not length % count
        )
        if not sizes or self.num_swaps:
            return False
        usual, votes = sizes.most_common(1)[0]
        if self.store and votes <= max(1, sizes[self.sample_bytes]):
            return False
        forgets, self.sample_bytes = bool(self.store), usual
        if forgets:
            self.store, self.waiting = [], {}
        return forgets

    def take(self, node: str, slots: list[int], content: bytes) -> int:
        """Store copies of the samples that a device offers.

        Parameters
        ----------
        node : str
            Stable identity of the device.
        slots : list of int
            Distinct and not negative.
        content : bytes
            The samples, one after the other.

        Returns
        -------
        int
            Number of offers taken: all.

        Raises
        ------
        ValueError
            If slots and content do not fit together, or samples are of another size than
            was settled or, without that, than the first; nothing is taken then.
        """
        if not slots:
            return 0
        size, rest = divmod(len(content), len(slots))
        if rest or not size or size != (self.sample_bytes or size):
            what = f"of {self.sample_bytes} bytes" if self.sample_bytes else "of one size"
            raise ValueError(f"{len(content)} bytes are not {len(slots)} samples {what}.")
        if len(set(slots)) < len(slots) or min(slots) < 0:
            raise ValueError("offered slots must be distinct and not negative.")
        self.sample_bytes = size
        waiting, holdings = self.waiting.setdefault(node, {}), self.holdings.get(node, {})
        for place, slot in enumerate(slots):
            if slot in holdings:  # the book knows better than the device what is there
                waiting[slot] = holdings[slot].sample
            elif slot not in waiting:
                waiting[slot] = len(self.store)
                self.store.append(content[place * size : (place + 1) * size])
        return len(slots)

    def swap(self, rng: np.random.Generator) -> int:
        """Exchange as many waiting slots of different devices as possible.

        Parameters
        ----------
        rng : np.random.Generator
            Decides who exchanges with whom.

        Returns
        -------
        int
            Number of swaps.
        """
        swaps = match({node: list(slots) for node, slots in self.waiting.items()}, rng)
        for node, slot, other_node, other_slot in swaps:
            mine, theirs = self.waiting[node].pop(slot), self.waiting[other_node].pop(other_slot)
            self.num_swaps += 1
            for place, at, sample in ((node, slot, theirs), (other_node, other_slot, mine)):
                self.holdings.setdefault(place, {})[at] = Holding(self.num_swaps, sample)
                self.unconfirmed.setdefault(place, set()).add(at)
        return len(swaps)

    def deliver(self, node: str) -> Delivery:
        """Say what a device holds, with the content that it has not confirmed.

        Parameters
        ----------
        node : str
            Stable identity of the device.

        Returns
        -------
        Delivery
            To go along with the next instruction; calling twice changes nothing.
        """
        holdings = self.holdings.get(node, {})
        slots = sorted(holdings)
        sent = sorted(self.unconfirmed.get(node, ()))
        content = b"".join(self.store[holdings[slot].sample] for slot in sent)
        return Delivery(slots, [holdings[slot].version for slot in slots], sent, content)

    def confirm(self, node: str, missing: list[int]) -> None:
        """Note what a device still lacks after a delivery: nothing, or all if it lost its state.

        Parameters
        ----------
        node : str
            Stable identity of the device.
        missing : list of int
            Slots of :meth:`deliver` whose content it does not have.
        """
        self.unconfirmed[node] = set(missing) & self.holdings.get(node, {}).keys()

    def state(self) -> dict[str, NDArray[np.generic] | int | str]:
        """Return the book as flat arrays: one row per slot, one per stored sample."""
        nodes = sorted({*self.holdings, *self.waiting, *self.unconfirmed})
        number = {node: index for index, node in enumerate(nodes)}
        held = [
            (number[node], slot, *holding, slot in self.unconfirmed.get(node, ()))
            for node, slots in self.holdings.items()
            for slot, holding in slots.items()
        ]
        offered = [
            (number[node], slot, sample)
            for node, slots in self.waiting.items()
            for slot, sample in slots.items()
        ]
        size = len(self.store[0]) if self.store else 0
        return {
            "nodes": "\n".join(nodes),
            "held": np.array(held, dtype=np.int64).reshape(-1, 5),
            "offered": np.array(offered, dtype=np.int64).reshape(-1, 3),
            "store": np.frombuffer(b"".join(self.store), np.uint8).reshape(len(self.store), size),
            "num_swaps": self.num_swaps,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Ledger":
        """Restore a book from :meth:`state`.

        Parameters
        ----------
        state : dict
            From :meth:`state`.

        Returns
        -------
        Ledger
            Equal to the one saved.

        Raises
        ------
        ValueError
            If an entry is missing or points outside the book.
        """
        ledger = cls()
        try:
            nodes, store = str(state["nodes"]).split("\n"), np.asarray(state["store"], np.uint8)
            ledger.store = [row.tobytes() for row in store]
            ledger.sample_bytes = len(ledger.store[0]) if ledger.store else 0
            ledger.num_swaps = int(state["num_swaps"])
            for node, slot, version, sample, unconfirmed in np.asarray(state["held"]).tolist():
                holding = Holding(version, range(len(store))[sample])
                ledger.holdings.setdefault(nodes[node], {})[slot] = holding
                if unconfirmed:
                    ledger.unconfirmed.setdefault(nodes[node], set()).add(slot)
            for node, slot, sample in np.asarray(state["offered"]).tolist():
                ledger.waiting.setdefault(nodes[node], {})[slot] = range(len(store))[sample]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"the resharding ledger is damaged ({error}).") from error
        return ledger
