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

    Notes
    -----
    Shares are rounded down and the rest is drawn by the fractions left over, so that the mean
    is exact also when there are fewer offers than groups. Where a group has fewer important
    samples than it must give, samples of no importance fill up.
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
    """Two slots, on two devices, that exchange what they hold."""

    node: str
    slot: int
    other_node: str
    other_slot: int


def match(offers: dict[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Pair the slots offered by different devices at random.

    Notes
    -----
    Devices are kept by the number of slots that they have left: a swap costs about the same
    whatever their number.
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
    """Split off what fits into a round's budget; the rest resumes there (breakpoint-resume)."""
    fits = max(0, budget_bytes // max(sample_bytes, 1))
    return slots[:fits], slots[fits:]


class Holding(NamedTuple):
    """What a slot of a device holds since its last swap."""

    version: int
    sample: int


class Delivery(NamedTuple):
    """What a device must know and receive before it trains."""

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
        """Store copies of the samples that a device offers."""
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
        """Exchange as many waiting slots of different devices as possible."""
        swaps = match({node: list(slots) for node, slots in self.waiting.items()}, rng)
        for node, slot, other_node, other_slot in swaps:
            mine, theirs = self.waiting[node].pop(slot), self.waiting[other_node].pop(other_slot)
            self.num_swaps += 1
            for place, at, sample in ((node, slot, theirs), (other_node, other_slot, mine)):
                self.holdings.setdefault(place, {})[at] = Holding(self.num_swaps, sample)
                self.unconfirmed.setdefault(place, set()).add(at)
        return len(swaps)

    def deliver(self, node: str) -> Delivery:
        """Say what a device holds, with the content that it has not confirmed."""
        holdings = self.holdings.get(node, {})
        slots = sorted(holdings)
        sent = sorted(self.unconfirmed.get(node, ()))
        content = b"".join(self.store[holdings[slot].sample] for slot in sent)
        return Delivery(slots, [holdings[slot].version for slot in slots], sent, content)

    def confirm(self, node: str, missing: list[int]) -> None:
        """Note what a device still lacks after a delivery: nothing, or all if it lost its state."""
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
        """Restore a book from :meth:`state`."""
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
    """Write what a node holds, for a ``flwr-hetero.resharding`` record."""
    return {
        keys.SLOTS: ints_to_bytes(delivery.slots),
        keys.VERSIONS: ints_to_bytes(delivery.versions),
        keys.SENT: ints_to_bytes(delivery.sent),
        keys.CONTENT: delivery.content,
    }


def read_delivery(record: ConfigRecord) -> Delivery:
    """Read what :func:`write_delivery` wrote."""
    return Delivery(
        ints_in(record, keys.SLOTS),
        ints_in(record, keys.VERSIONS),
        ints_in(record, keys.SENT),
        value_in(record, keys.CONTENT, bytes),
    )


def ints_to_bytes(values: list[int]) -> bytes:
    """Write a list of whole numbers as little-endian int32."""
    return np.array(values, dtype="<i4").tobytes()


def ints_in(record: ConfigRecord, key: str) -> list[int]:
    """Read what :func:`ints_to_bytes` wrote."""
    return [int(value) for value in np.frombuffer(value_in(record, key, bytes), dtype="<i4")]


def value_in(record: ConfigRecord, key: str, kind: type) -> Any:
    """Read an entry of a certain type."""
    value = record.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key} must be {kind.__name__}, got {type(value).__name__}")
    return value


class Foreign(NamedTuple):
    """Another device's sample in one of our slots."""

    version: int
    content: bytes


class Shard:
    """What a device received, and what it still wants to offer."""

    def __init__(self) -> None:
        self.foreign: dict[int, Foreign] = {}
        self.held: dict[int, bytes] = {}
        self.plan = 0
        self.queue: list[int] = []

    def receive(self, delivery: Delivery) -> tuple[list[int], list[int]]:
        """Take over what the server says we hold; doing it twice changes nothing."""
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
        """Continue the plan's queue where the server's receipt says it stopped."""
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
        """Restore a shard; a lost or damaged state gives an empty one, which the server refills."""
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
    """Write samples for the wire, one after the other, all of one size."""
    width = int(np.prod(inputs.shape[1:]))
    rows = np.ascontiguousarray(inputs, dtype="<f4").reshape(len(inputs), width).view(np.uint8)
    labels = np.ascontiguousarray(targets, dtype="<i8").reshape(-1, 1).view(np.uint8)
    return np.hstack([rows, labels]).tobytes()


def unpack(
    content: bytes, shape: tuple[int, ...], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read what :func:`pack` wrote."""
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
    """

    def __init__(self, record: ConfigRecord, shard: Shard) -> None:
        self.record, self.shard = record, shard
        self.fresh, self.missing = shard.receive(read_delivery(record))
        self.held = shard.held

    @classmethod
    def open(cls, message: Message, context: Context) -> "NodeShard | None":
        """Take in what an instruction delivers."""
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
        """Name the slots to offer with this reply."""
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
        """Put the offered samples into the reply and keep the shard."""
        save_state(context, "shard", self.shard.state())
        reply.content[keys.RESHARDING] = ConfigRecord(
            {
                keys.PLAN: self.shard.plan,
                keys.SLOTS: ints_to_bytes(slots),
                keys.MISSING: ints_to_bytes(self.missing),
                keys.CONTENT: content,
            }
        )
