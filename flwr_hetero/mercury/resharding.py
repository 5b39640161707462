"""Importance-aware resharding (section 4.2): which samples move, and which node holds what.

**Raw samples leave the devices through this module**, if the server runs the ``Resharding``
strategy and the ClientApp calls :meth:`NodeShard.open` and :meth:`NodeShard.close`.

    node      choose important samples of every group        offer
              send copies, a part with each reply            NodeShard.offers, close
    server    store the copies, in ``strategy``              SwapTable.add
              pair the slots of different nodes, exchange    SwapTable.swap, match
              send each node what it holds, until confirmed  SwapTable.deliver, confirm
    node      replace its samples                            NodeShard.open
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.random import Generator
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.samplers import load_state, save_state
from flwr_hetero.mercury.algorithm import Floats, Groups, Indices
from flwr_hetero.records import configs_in
from flwr_hetero.state_dict import StateDict

MAX_SLOTS = 2**31  # a slot is a number of four bytes
Choose = Callable[[int, bool], Indices | None]
"""``choose(count, by_importance)`` returns the samples to offer; None if it cannot say yet."""


def offer(importance: Floats, groups: Groups, num_offers: int, rng: Generator) -> Indices:
    """Choose the samples that a device gives away: important ones, from every group.

    importance: (n,), at least 0 -> (num_offers,), distinct, in random order.
    """
    num_samples = len(groups.order)
    # Section 4.2: group i gives N_o M_i / sum_j M_j samples, rounded at random.
    exact = num_offers * groups.sizes / num_samples
    counts = exact.astype(np.int64)
    num_missing = num_offers - int(counts.sum())
    if num_missing:
        probs = (exact - counts) / (exact - counts).sum()
        counts[rng.choice(len(counts), num_missing, replace=False, p=probs)] += 1
    # Eq. 7: the largest values of log I + Gumbel noise are successive draws without replacement.
    with np.errstate(divide="ignore"):
        scores = np.maximum(np.log(importance), -1e6) + rng.gumbel(size=num_samples)
    offered = []
    for group, count in enumerate(counts):
        members = groups.members(group)
        offered.append(members[np.argsort(-scores[members], kind="stable")[:count]])
    return rng.permutation(np.concatenate(offered))


class Delivery(NamedTuple):
    """Other nodes' samples that a node holds in its slots, with the content of those sent."""

    slots: list[int]
    sample_ids: list[int]
    sent: list[int]
    content: bytes

    def to_record(self) -> dict[str, bytes]:
        """Write this for a ``flwr-hetero.resharding`` record."""
        return {
            keys.SLOTS: ints_to_bytes(self.slots),
            keys.VERSIONS: ints_to_bytes(self.sample_ids),
            keys.SENT: ints_to_bytes(self.sent),
            keys.CONTENT: self.content,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Delivery":
        """Read what :meth:`to_record` wrote."""
        return cls(
            ints_in(record, keys.SLOTS),
            ints_in(record, keys.VERSIONS),
            ints_in(record, keys.SENT),
            bytes_in(record, keys.CONTENT),
        )


class NodeShard:
    """The samples that a node holds in a run with resharding, for one message.

    ``held`` maps slots to other nodes' samples. Slots that are ``missing`` must not be trained on.
    Those that are ``fresh`` hold a new sample.
    """

    def __init__(self, record: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        self.record = record
        # All slots that the node will ever offer.
        self.queue: list[int] = []
        self.num_samples = 0
        # By slot: number of the sample, and its content.
        self._others: dict[int, tuple[int, bytes]] = {}
        if state:
            slots = state["slots"].tolist()
            sample_ids = state["sample_ids"].tolist()
            self._receive(Delivery(slots, sample_ids, slots, state["content"].tobytes()))
            self.queue = state["queue"].tolist()
        self._receive(Delivery.from_record(record))

    @classmethod
    def open(cls, message: Message, context: Context) -> "NodeShard | None":
        """Read the samples of an instruction; None if the server does not reshard."""
        record = configs_in(message.content).get(keys.RESHARDING)
        return None if record is None else cls(record, load_state(context, "shard"))

    def _receive(self, delivery: Delivery) -> None:
        """Hold the samples that the server assigns to this node, and no others."""
        ids = dict(zip(delivery.slots, delivery.sample_ids, strict=True))
        size = len(delivery.content) // max(len(delivery.sent), 1)
        new = {}
        for place, slot in enumerate(delivery.sent):
            new[slot] = (ids[slot], delivery.content[place * size : (place + 1) * size])
        self.fresh = [slot for slot in new if self._others.get(slot) != new[slot]]
        held = self._others | new
        # Drop samples that the server has since assigned to another node.
        self._others = {slot: held[slot] for slot in held if held[slot][0] == ids.get(slot)}
        self.held = {slot: content for slot, (_, content) in self._others.items()}
        self.missing = [slot for slot in delivery.slots if slot not in self.held]

    def offers(self, num_samples: int, sample_bytes: int, choose: Choose) -> list[int]:
        """Return the slots to offer with this reply: the next ones that the server lacks."""
        self.num_samples = num_samples
        if not self.queue:
            count = int(np.ceil(self.record[keys.SHARE] * num_samples))
            chosen = choose(min(count, num_samples), self.record[keys.BY_IMPORTANCE])
            self.queue = [] if chosen is None else chosen.tolist()
        first = self.record[keys.RECEIVED]
        return self.queue[first : first + self.record[keys.BUDGET] // sample_bytes]

    def close(self, reply: Message, context: Context, slots: list[int], content: bytes) -> None:
        """Put the offered samples into the reply and keep the shard."""
        save_state(context, "shard", self.state_dict())
        lists = {keys.SLOTS: ints_to_bytes(slots), keys.MISSING: ints_to_bytes(self.missing)}
        record = ConfigRecord({**lists, keys.CONTENT: content, keys.NUM_SAMPLES: self.num_samples})
        reply.content[keys.RESHARDING] = record

    def state_dict(self) -> StateDict:
        """Return all that is needed to continue, flat."""
        return {
            "slots": np.array(list(self._others), dtype=np.int64),
            "sample_ids": np.array([number for number, _ in self._others.values()], dtype=np.int64),
            "content": np.frombuffer(b"".join(self.held.values()), np.uint8),
            "queue": np.array(self.queue, dtype=np.int64),
        }


def ints_to_bytes(values: list[int]) -> bytes:
    """Write a list of whole numbers as little-endian int32."""
    return np.array(values, dtype="<i4").tobytes()


def ints_in(record: Mapping[str, Any], key: str, most: int = MAX_SLOTS) -> list[int]:
    """Read what :func:`ints_to_bytes` wrote; ValueError if there are more than ``most`` numbers."""
    content = bytes_in(record, key)
    if len(content) > 4 * most:
        raise ValueError(f"{key} must hold at most {most} numbers, got {len(content) // 4}.")
    return [int(value) for value in np.frombuffer(content, dtype="<i4")]


def bytes_in(record: Mapping[str, Any], key: str) -> bytes:
    """Read an entry that must be bytes, else ValueError."""
    value = record.get(key)
    if not isinstance(value, bytes):
        raise ValueError(f"{key} must be bytes, got {type(value).__name__}")
    return value


def pack(inputs: NDArray[np.float32], targets: Indices) -> bytes:
    """Write samples for the wire: inputs (n, ...) as float32, each followed by its label."""
    width = int(np.prod(inputs.shape[1:]))
    rows = np.ascontiguousarray(inputs, dtype="<f4").reshape(len(inputs), width).view(np.uint8)
    labels = np.ascontiguousarray(targets, dtype="<i8").reshape(-1, 1).view(np.uint8)
    return np.hstack([rows, labels]).tobytes()


def unpack(
    content: bytes, shape: tuple[int, ...], num_classes: int
) -> tuple[NDArray[np.float32], Indices]:
    """Read what :func:`pack` wrote: inputs (n, *shape), targets (n,); ValueError if damaged."""
    width = 4 * int(np.prod(shape))
    if len(content) % (width + 8):
        raise ValueError(f"{len(content)} bytes are no samples of {width + 8} bytes.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width + 8)
    inputs = rows[:, :width].copy().view("<f4").astype(np.float32).reshape(-1, *shape)
    targets = rows[:, width:].copy().view("<i8").astype(np.int64).reshape(-1)
    if not np.isfinite(inputs).all() or ((targets < 0) | (targets >= num_classes)).any():
        raise ValueError("a sample holds NaN, infinity or an unknown label.")
    return inputs, targets
