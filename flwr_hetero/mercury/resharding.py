"""Which samples move between devices, and who holds what (Mercury, section 4.2)."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.keep import load_state, save_state
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.algorithm import Groups


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
    >>> from flwr_hetero.mercury.algorithm import make_groups
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
    the slot (see :class:`~flwr_hetero.mercury.resharding.Shard`), so a failure at any point neither
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


def write_delivery(delivery: Delivery) -> dict[str, bytes]:
    """Write what a node holds, for a ``flwr-hetero.resharding`` record.

    Parameters
    ----------
    delivery : Delivery
        From the ledger.

    Returns
    -------
    dict of str to bytes
        Entries of the record.

    Examples
    --------
    >>> read_delivery(ConfigRecord(write_delivery(Delivery([3], [1], [3], b"sample"))))
    Delivery(slots=[3], versions=[1], sent=[3], content=b'sample')
    """
    return {
        keys.SLOTS: ints_to_bytes(delivery.slots),
        keys.VERSIONS: ints_to_bytes(delivery.versions),
        keys.SENT: ints_to_bytes(delivery.sent),
        keys.CONTENT: delivery.content,
    }


def read_delivery(record: ConfigRecord) -> Delivery:
    """Read what :func:`write_delivery` wrote.

    Parameters
    ----------
    record : ConfigRecord
        From an instruction.

    Returns
    -------
    Delivery
        What the node holds.

    Raises
    ------
    ValueError
        If an entry is missing or of the wrong type.
    """
    return Delivery(
        ints_in(record, keys.SLOTS),
        ints_in(record, keys.VERSIONS),
        ints_in(record, keys.SENT),
        value_in(record, keys.CONTENT, bytes),
    )


def ints_to_bytes(values: list[int]) -> bytes:
    """Write a list of whole numbers as little-endian int32.

    Parameters
    ----------
    values : list of int
        Each fits into 32 bits.

    Returns
    -------
    bytes
        Four bytes each.
    """
    return np.array(values, dtype="<i4").tobytes()


def ints_in(record: ConfigRecord, key: str) -> list[int]:
    """Read what :func:`ints_to_bytes` wrote.

    Parameters
    ----------
    record : ConfigRecord
        Of an instruction or a reply.
    key : str
        Name of the entry.

    Returns
    -------
    list of int
        The numbers.

    Raises
    ------
    ValueError
        If the entry is missing or no such byte string.
    """
    return [int(value) for value in np.frombuffer(value_in(record, key, bytes), dtype="<i4")]


def value_in(record: ConfigRecord, key: str, kind: type) -> Any:
    """Read an entry of a certain type.

    Parameters
    ----------
    record : ConfigRecord
        Of an instruction or a reply.
    key : str
        Name of the entry.
    kind : type
        What it must be.

    Returns
    -------
    Any
        The value, of type ``kind``.

    Raises
    ------
    ValueError
        If the entry is missing or of another type.

    Examples
    --------
    >>> value_in(ConfigRecord({"plan": 1}), "plan", int)
    1
    """
    value = record.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key} must be {kind.__name__}, got {type(value).__name__}")
    return value


class Foreign(NamedTuple):
    """Another device's sample in one of our slots.

    Attributes
    ----------
    version : int
        The swap that brought it.
    content : bytes
        The sample.

    Examples
    --------
    >>> shard = Shard()
    >>> _ = shard.receive(Delivery([3], [1], [3], b"B0"))
    >>> shard.foreign[3] == Foreign(version=1, content=b"B0")
    True
    """

    version: int
    content: bytes


class Shard:
    """What a device received, and what it still wants to offer.

    Attributes
    ----------
    foreign : dict of int to Foreign
        All that was ever received, by slot.
    held : dict of int to bytes
        Of these what counts by the last delivery: slot to another device's sample.
    plan : int
        The plan that the queue belongs to; 0 for none yet.
    queue : list of int
        Slots to offer in this plan.

    Examples
    --------
    >>> shard = Shard()
    >>> shard.receive(Delivery([3], [1], [3], b"B0"))
    ([3], [])
    >>> shard.held
    {3: b'B0'}
    >>> Shard().receive(Delivery([3], [1], [], b""))  # lost its state: must not use slot 3
    ([], [3])
    """

    def __init__(self) -> None:
        self.foreign: dict[int, Foreign] = {}
        self.held: dict[int, bytes] = {}
        self.plan = 0
        self.queue: list[int] = []

    def receive(self, delivery: Delivery) -> tuple[list[int], list[int]]:
        """Take over what the server says we hold; doing it twice changes nothing.

        Parameters
        ----------
        delivery : Delivery
            From the server.

        Returns
        -------
        fresh : list of int
            Slots whose content is new.
        missing : list of int
            Slots that another device's sample belongs in which we do not have: our own sample
            of that slot is elsewhere by now, so neither may be trained on.

        Raises
        ------
        ValueError
            If the delivery does not fit together; the shard is then unchanged.
        """
        versions = dict(zip(delivery.slots, delivery.versions, strict=True))
        size = len(delivery.content) // max(len(delivery.sent), 1)
        fits = size * len(delivery.sent) == len(delivery.content) and bool(
            size or not delivery.sent
        )
        if not fits or set(delivery.sent) - set(versions):
            raise ValueError("the delivery's slots and content do not fit together.")
        fresh = []
        for place, slot in enumerate(delivery.sent):
            new = Foreign(versions[slot], delivery.content[place * size : (place + 1) * size])
            if self.foreign.get(slot) != new:
                self.foreign[slot] = new
                fresh.append(slot)
        self.held = {
            slot: foreign.content
            for slot, foreign in self.foreign.items()
            if foreign.version == versions.get(slot)
        }
        return fresh, [slot for slot in delivery.slots if slot not in self.held]

    def offers(self, received: int, sample_bytes: int, budget_bytes: int) -> list[int]:
        """Continue the plan's queue where the server's receipt says it stopped.

        Parameters
        ----------
        received : int
            Offers of this plan that the server has taken.
        sample_bytes, budget_bytes : int
            Size of a sample, and of what may be sent this round.

        Returns
        -------
        list of int
            Slots to offer now.
        """
        return chunk(self.queue[max(received, 0) :], sample_bytes, budget_bytes)[0]

    def state(self) -> dict[str, NDArray[np.generic] | int]:
        """Return all that is needed to continue, flat."""
        slots = sorted(self.foreign)
        content = b"".join(self.foreign[slot].content for slot in slots)
        return {
            "slots": np.array(slots, dtype=np.int64),
            "versions": np.array([self.foreign[slot].version for slot in slots], dtype=np.int64),
            "content": np.frombuffer(content, np.uint8).copy(),
            "plan": self.plan,
            "queue": np.array(self.queue, dtype=np.int64),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> "Shard":
        """Restore a shard; a lost or damaged state gives an empty one, which the server refills.

        Parameters
        ----------
        state : dict or None
            From :meth:`state`.

        Returns
        -------
        Shard
            Never partly restored.
        """
        shard = cls()
        if state is None:
            return shard
        try:
            slots = [int(slot) for slot in state["slots"]]
            versions = [int(version) for version in state["versions"]]
            content = np.asarray(state["content"], np.uint8).tobytes()
            queue = [int(slot) for slot in state["queue"]]
            plan = int(state["plan"])
            shard.receive(Delivery(slots, versions, slots, content))
        except (KeyError, TypeError, ValueError):
            return cls()
        shard.plan, shard.queue = plan, queue
        return shard


def pack(inputs: NDArray[np.float32], targets: NDArray[np.int64]) -> bytes:
    """Write samples for the wire, one after the other, all of one size.

    Parameters
    ----------
    inputs : ndarray of float32, shape (n, ...)
        Inputs.
    targets : ndarray of int64, shape (n,)
        Labels.

    Returns
    -------
    bytes
        Per sample its input as little-endian float32, then its label as int64.

    Examples
    --------
    >>> len(pack(np.zeros((2, 3), np.float32), np.zeros(2, np.int64)))
    40
    """
    width = int(np.prod(inputs.shape[1:]))
    rows = np.ascontiguousarray(inputs, dtype="<f4").reshape(len(inputs), width).view(np.uint8)
    labels = np.ascontiguousarray(targets, dtype="<i8").reshape(-1, 1).view(np.uint8)
    return np.hstack([rows, labels]).tobytes()


def unpack(
    content: bytes, shape: tuple[int, ...], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read what :func:`pack` wrote.

    Parameters
    ----------
    content : bytes
        Samples.
    shape : tuple of int
        Of one input.
    num_classes : int
        Labels must lie below it.

    Returns
    -------
    inputs : ndarray of float32, shape (n, *shape)
        Inputs.
    targets : ndarray of int64, shape (n,)
        Labels.

    Raises
    ------
    ValueError
        If the bytes are no such samples.

    Examples
    --------
    >>> unpack(pack(np.ones((1, 2), np.float32), np.array([4])), (2,), 10)
    (array([[1., 1.]], dtype=float32), array([4]))
    """
    width = 4 * int(np.prod(shape))
    if len(content) % (width + 8):
        raise ValueError(f"{len(content)} bytes are no samples of {width + 8} bytes.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width + 8)
    inputs = rows[:, :width].copy().view("<f4").astype(np.float32).reshape(-1, *shape)
    targets = rows[:, width:].copy().view("<i8").astype(np.int64).reshape(-1)
    if not np.isfinite(inputs).all() or ((targets < 0) | (targets >= num_classes)).any():
        raise ValueError("a sample holds NaN, infinity or an unknown label.")
    return inputs, targets


class NodeShard:
    """The samples a node holds in a run with resharding, for one message.

    **Raw samples leave the device through this class.** It does so only when the server runs
    the ``Resharding`` strategy and the ClientApp calls :meth:`close`.

    Parameters
    ----------
    record : ConfigRecord
        From the instruction.
    shard : Shard
        What the node holds so far.

    Attributes
    ----------
    held : dict of int to bytes
        Slot to the sample of another node that belongs there.
    fresh : list of int
        Slots that just got another sample.
    missing : list of int
        Slots not to be trained on, see :meth:`~flwr_hetero.mercury.resharding.Shard.receive`.
    """

    def __init__(self, record: ConfigRecord, shard: Shard) -> None:
        self.record, self.shard = record, shard
        self.fresh, self.missing = shard.receive(read_delivery(record))
        self.held = shard.held

    @classmethod
    def open(cls, message: Message, context: Context) -> "NodeShard | None":
        """Take in what an instruction delivers.

        Parameters
        ----------
        message : Message
            The instruction.
        context : Context
            Holds the node's shard.

        Returns
        -------
        NodeShard or None
            None if the server does not reshard.

        Raises
        ------
        ValueError
            If the record is damaged.
        """
        record = message.content.config_records.get(keys.RESHARDING)
        if record is None:
            return None
        return cls(record, Shard.from_state(load_state(context, "shard")))

    def offers(
        self,
        num_samples: int,
        sample_bytes: int,
        choose: Callable[[int, bool], NDArray[np.int64] | None],
    ) -> list[int]:
        """Name the slots to offer with this reply.

        Parameters
        ----------
        num_samples : int
            Samples the node holds.
        sample_bytes : int
            Size of one on the wire.
        choose : callable
            Called as ``choose(num_offers, by_importance)`` when a new plan begins; returns
            slots, the first to be offered first, or None to be asked again with the next
            message, for instance because little is known of importance yet.

        Returns
        -------
        list of int
            What fits into the budget, from where the server says it stopped.
        """
        plan = value_in(self.record, keys.PLAN, int)
        if self.shard.plan != plan:
            count = int(np.ceil(value_in(self.record, keys.SHARE, float) * num_samples))
            chosen = choose(
                min(count, num_samples), value_in(self.record, keys.BY_IMPORTANCE, bool)
            )
            if chosen is None:
                return []
            self.shard.plan, self.shard.queue = plan, chosen.tolist()
        received = value_in(self.record, keys.RECEIVED, int)
        return self.shard.offers(received, sample_bytes, value_in(self.record, keys.BUDGET, int))

    def close(self, reply: Message, context: Context, slots: list[int], content: bytes) -> None:
        """Put the offered samples into the reply and keep the shard.

        Parameters
        ----------
        reply : Message
            Gets a ``flwr-hetero.resharding`` record.
        context : Context
            Keeps the shard until the next message.
        slots : list of int
            From :meth:`offers`.
        content : bytes
            Their samples, one after the other.
        """
        save_state(context, "shard", self.shard.state())
        reply.content[keys.RESHARDING] = ConfigRecord(
            {
                keys.PLAN: self.shard.plan,
                keys.SLOTS: ints_to_bytes(slots),
                keys.MISSING: ints_to_bytes(self.missing),
                keys.CONTENT: content,
            }
        )
