"""Importance-aware resharding (section 4.2): which samples move, and which node holds what.

**Raw samples leave the devices through this module.** It does nothing unless the server runs
the ``Resharding`` strategy and the ClientApp calls :meth:`NodeShard.open` and
:meth:`NodeShard.close`.

    node      choose important samples of every group        offer
              send copies, a part with each reply            NodeShard.offers, close
    server    store the copies                               SwapTable.add
              pair the slots of different nodes, exchange    SwapTable.swap, match
              send each node what it holds, until confirmed  SwapTable.deliver, confirm
    node      replace its samples                            NodeShard.receive
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.keep import load_state, save_state
from flwr_hetero.errors import invalid
from flwr_hetero.mercury.algorithm import Groups
from flwr_hetero.state_dict import StateDict, check_state

# --- which samples move -------------------------------------------------------------------


def offer(
    importance: NDArray[np.float64],
    groups: Groups,
    num_offers: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    r"""Choose the samples that a device gives away: important ones, from every group.

    Group i gives :math:`N_o M_i / \sum_j M_j` samples (rounded at random), drawn without
    replacement in proportion to their importance (Eq. 7); those of no importance come last.
    """
    total = len(groups.order)
    if not 0 <= num_offers <= total:
        raise invalid("num_offers", num_offers, f"lie in 0..{total}")
    exact = num_offers * groups.sizes / total
    counts = exact.astype(np.int64)
    if missing := num_offers - int(counts.sum()):
        probs = (exact - counts) / (exact - counts).sum()
        counts[rng.choice(len(counts), missing, replace=False, p=probs)] += 1
    # the largest of log I + Gumbel: successive draws without replacement
    with np.errstate(divide="ignore"):
        scores = np.maximum(np.log(importance), -1e6) + rng.gumbel(size=total)
    offered = []
    for group, count in enumerate(counts):
        members = groups.members(group)
        offered.append(members[np.argsort(-scores[members], kind="stable")[:count]])
    return rng.permutation(np.concatenate(offered))


Swap = tuple[tuple[str, int], tuple[str, int]]
"""Two slots, each as (node, slot), that exchange what they hold."""


def match(offers: Mapping[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Pair slots of different nodes at random, always from the nodes with the most slots left.

    Nodes are kept by how many slots they have left: a swap costs the same however many they are.
    """
    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}
    by_size: list[list[str]] = [[] for _ in range(1 + max(map(len, left.values()), default=0))]
    for node, slots in left.items():
        by_size[len(slots)].append(node)  # in the order of their names

    def take_fullest() -> str:
        fullest = next(nodes for nodes in reversed(by_size) if nodes)
        return fullest.pop(int(rng.integers(len(fullest))))

    swaps: list[Swap] = []
    num_left = len(left) - len(by_size[0])
    while num_left > 1:
        one, other = take_fullest(), take_fullest()
        swaps.append(((one, left[one].pop()), (other, left[other].pop())))
        for node in (one, other):
            insort(by_size[len(left[node])], node)
            num_left -= not left[node]
    return swaps


# --- the server's side --------------------------------------------------------------------


class Delivery(NamedTuple):
    """What a node holds of others: ``sample_ids`` in ``slots``, the content of those ``sent``."""

    slots: list[int]
    sample_ids: list[int]
    sent: list[int]
    content: bytes

    def to_record(self) -> dict[str, bytes]:
        """Write this for a ``flwr-hetero.resharding`` record."""
        lists = {keys.SLOTS: self.slots, keys.VERSIONS: self.sample_ids, keys.SENT: self.sent}
        return {key: ints_to_bytes(x) for key, x in lists.items()} | {keys.CONTENT: self.content}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Delivery":
        """Read what :meth:`to_record` wrote."""
        slots, ids, sent = (ints_in(record, k) for k in (keys.SLOTS, keys.VERSIONS, keys.SENT))
        return cls(slots, ids, sent, bytes_in(record, keys.CONTENT))


@dataclass
class Slot:
    """A place in a node's data: what it holds, is it offered, exchanged, known to have arrived."""

    sample_id: int
    offered: bool = True
    exchanged: bool = False
    confirmed: bool = False


class SwapTable:
    """Which node holds which sample; samples are opaque byte strings.

    The table alone decides: a node that has not received a delivery does not train on the slot,
    so a failure at any point neither loses a sample nor lets two nodes train on it. Content is
    sent again until confirmed. Only samples of the same number of bytes are exchanged.
    """

    def __init__(self) -> None:
        self.store: list[bytes] = []
        self.slots: dict[str, dict[int, Slot]] = {}
        self.received: dict[str, int] = {}

    def add(self, node: str, slots: list[int], content: bytes) -> None:
        """Store copies of the samples that a node offers; a slot is stored once."""
        table, size = self.slots.get(node, {}), len(content) // max(len(slots), 1)
        sizes = {len(self.store[slot.sample_id]) for slot in table.values()}
        if size * len(slots) != len(content) or (slots and (sizes - {size} or not size)):
            raise ValueError(f"{len(content)} bytes are not {len(slots)} samples of one size.")
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0:
            raise ValueError("offered slots must be distinct and not negative.")
        self.slots[node] = table
        for place, slot in enumerate(slots):
            if slot in table:  # the table knows better than the node what is there
                table[slot].offered = True
            else:
                table[slot] = Slot(len(self.store))
                self.store.append(content[place * size : (place + 1) * size])
        self.received[node] = self.received.get(node, 0) + len(slots)

    def swap(self, rng: np.random.Generator) -> int:
        """Exchange as many offered slots of different nodes as possible."""
        by_bytes: dict[int, dict[str, list[int]]] = {}
        for node, slots in self.slots.items():
            offers = [number for number, slot in slots.items() if slot.offered]
            if offers:
                size = len(self.store[slots[offers[0]].sample_id])
                by_bytes.setdefault(size, {})[node] = offers
        swaps = [pair for _, offers in sorted(by_bytes.items()) for pair in match(offers, rng)]
        for pair in swaps:
            one, other = (self.slots[node][number] for node, number in pair)
            one.sample_id, other.sample_id = other.sample_id, one.sample_id
            for slot in (one, other):
                slot.offered, slot.exchanged, slot.confirmed = False, True, False
        return len(swaps)

    def deliver(self, node: str) -> Delivery:
        """Say what a node holds, with the content that it has not confirmed."""
        held = {n: s for n, s in sorted(self.slots.get(node, {}).items()) if s.exchanged}
        sent = [number for number, slot in held.items() if not slot.confirmed]
        content = b"".join(self.store[held[number].sample_id] for number in sent)
        return Delivery(list(held), [slot.sample_id for slot in held.values()], sent, content)

    def confirm(self, node: str, missing: list[int]) -> None:
        """Note what a node still lacks after a delivery: nothing, or all if it lost its state."""
        lacking = set(missing)
        for number, slot in self.slots.get(node, {}).items():
            slot.confirmed = number not in lacking

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the slots of all nodes."""
        return (slot for slots in self.slots.values() for slot in slots.values())

    def state_dict(self) -> StateDict:
        """Return the table as arrays: one row per slot, one length per stored sample."""
        nodes = sorted(self.slots)
        rows = [
            (index, number, slot.sample_id, slot.offered, slot.exchanged, slot.confirmed)
            for index, node in enumerate(nodes)
            for number, slot in self.slots[node].items()
        ]
        return {
            "nodes": "\n".join(nodes),
            "received": np.array([self.received[node] for node in nodes], dtype=np.int64),
            "slots": np.array(rows, dtype=np.int64).reshape(-1, 6),
            "lengths": np.array([len(sample) for sample in self.store], dtype=np.int64),
            "content": np.frombuffer(b"".join(self.store), np.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        vector = ((-1,), "i")
        schema = {"nodes": str, "received": vector, "slots": ((-1, 6), "i"), "lengths": vector}
        check_state(state, schema | {"content": ((-1,), "u")}, "Resharding")
        nodes, rows = state["nodes"].splitlines(), state["slots"].tolist()
        lengths, content = state["lengths"], state["content"]
        if (
            len(nodes) != len(state["received"])
            or any(not (0 <= r[0] < len(nodes) and 0 <= r[2] < len(lengths)) for r in rows)
            or (lengths < 1).any()
            or lengths.sum() != len(content)
        ):
            raise ValueError("the state of Resharding is damaged: nodes, slots, samples disagree.")
        self.store = [part.tobytes() for part in np.split(content, lengths.cumsum())[:-1]]
        self.received = dict(zip(nodes, state["received"].tolist(), strict=True))
        self.slots = {node: {} for node in nodes}
        for node, number, sample_id, *flags in rows:
            self.slots[nodes[node]][number] = Slot(sample_id, *map(bool, flags))


# --- the node's side ----------------------------------------------------------------------


class NodeShard:
    """The samples that a node holds in a run with resharding, for one message.

    ``held`` maps slots to others' samples; slots of ``missing`` must not be trained on; slots
    of ``fresh`` hold something new. **Raw samples leave the device** with :meth:`close`.
    """

    def __init__(self, record: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        self.record, self.queue = record, list[int]()
        self._others: dict[int, tuple[int, bytes]] = {}
        with suppress(ValueError):  # damaged is as lost: the server sends all of it again
            self._load(state or {})
        self._receive(Delivery.from_record(record))

    @classmethod
    def open(cls, message: Message, context: Context) -> "NodeShard | None":
        """Take in what an instruction delivers; None if the server does not reshard."""
        record = message.content.config_records.get(keys.RESHARDING)
        return None if record is None else cls(record, load_state(context, "shard"))

    def _receive(self, delivery: Delivery) -> None:
        """Take over what the server says this node holds."""
        ids = dict(zip(delivery.slots, delivery.sample_ids, strict=True))
        size, rest = divmod(len(delivery.content), max(len(delivery.sent), 1))
        if rest or bool(size) != bool(delivery.sent) or set(delivery.sent) - set(ids):
            raise ValueError("the delivery's slots and content do not fit together.")
        self.fresh = []
        for place, slot in enumerate(delivery.sent):
            new = ids[slot], delivery.content[place * size : (place + 1) * size]
            if self._others.get(slot) != new:
                self._others[slot] = new
                self.fresh.append(slot)
        self._others = {s: x for s, x in self._others.items() if x[0] == ids.get(s)}
        self.held = {slot: content for slot, (_, content) in self._others.items()}
        self.missing = [slot for slot in delivery.slots if slot not in self.held]

    def offers(
        self,
        num_samples: int,
        sample_bytes: int,
        choose: Callable[[int, bool], NDArray[np.int64] | None],
    ) -> list[int]:
        """Name the slots to offer with this reply, from where the server's receipt stopped.

        ``choose(count, by_importance)`` names all of them once; None: not yet.
        """
        if not self.queue:
            count = int(np.ceil(self.record[keys.SHARE] * num_samples))
            chosen = choose(min(count, num_samples), self.record[keys.BY_IMPORTANCE])
            self.queue = [] if chosen is None else chosen.tolist()
        first, fits = self.record[keys.RECEIVED], self.record[keys.BUDGET] // sample_bytes
        return self.queue[first : first + fits]

    def close(self, reply: Message, context: Context, slots: list[int], content: bytes) -> None:
        """Put the offered samples into the reply and keep the shard."""
        save_state(context, "shard", self.state_dict())
        lists = {keys.SLOTS: ints_to_bytes(slots), keys.MISSING: ints_to_bytes(self.missing)}
        reply.content[keys.RESHARDING] = ConfigRecord({**lists, keys.CONTENT: content})

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue, flat."""
        return {
            "slots": np.array(list(self._others), dtype=np.int64),
            "sample_ids": np.array([i for i, _ in self._others.values()], dtype=np.int64),
            "content": np.frombuffer(b"".join(self.held.values()), np.uint8),
            "queue": np.array(self.queue, dtype=np.int64),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        vector = ((-1,), "i")
        schema = {"slots": vector, "sample_ids": vector, "queue": vector, "content": ((-1,), "u")}
        check_state(state, schema, "NodeShard")
        slots, ids = state["slots"].tolist(), state["sample_ids"].tolist()
        self._receive(Delivery(slots, ids, slots, state["content"].tobytes()))
        self.queue = state["queue"].tolist()


# --- samples and lists on the wire --------------------------------------------------------


def ints_to_bytes(values: list[int]) -> bytes:
    """Write a list of whole numbers as little-endian int32."""
    return np.array(values, dtype="<i4").tobytes()


def ints_in(record: Mapping[str, Any], key: str) -> list[int]:
    """Read what :func:`ints_to_bytes` wrote."""
    return [int(value) for value in np.frombuffer(bytes_in(record, key), dtype="<i4")]


def bytes_in(record: Mapping[str, Any], key: str) -> bytes:
    """Read an entry that must be bytes."""
    value = record.get(key)
    if not isinstance(value, bytes):
        raise ValueError(f"{key} must be bytes, got {type(value).__name__}")
    return value


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
