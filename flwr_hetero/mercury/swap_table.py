"""The server's side of resharding: which offered samples swap places, and who holds what."""

import math
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_hetero.mercury.resharding import MAX_SLOTS, Delivery
from flwr_hetero.state_dict import StateDict, check_state

MOST = 2.0
"""A node may offer as many samples as this times the median node."""

Swap = tuple[tuple[str, int], tuple[str, int]]
"""Two slots, each as (node, slot), that exchange what they hold."""


def match(offers: Mapping[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Pair slots of different nodes at random, always from the nodes with the most slots left."""
    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}
    # nodes by how many slots they have left: a swap costs the same however many nodes there are
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


@dataclass
class Slot:
    """A place in a node's data: what it holds, is it offered, exchanged, known to have arrived."""

    sample_id: int
    offered: bool = True
    exchanged: bool = False
    confirmed: bool = False


class SwapTable:
    """Which node holds which sample; samples are opaque byte strings."""

    # the table alone decides: a node that has not received a delivery does not train on the slot,
    # so a failure at any point neither loses a sample nor lets two nodes train on it

    def __init__(self) -> None:
        self.store: list[bytes] = []
        self.slots: dict[str, dict[int, Slot]] = {}
        self.received: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        """Slots that a node may offer in all."""

    def set_limits(self, claims: Mapping[str, int]) -> None:
        """Fix how many slots nodes may offer: as they say at first, within reason."""
        new = {node: claim for node, claim in claims.items() if node not in self.limits}
        if new:
            usual = float(np.median([*self.limits.values(), *new.values()]))
            most = math.ceil(MOST * usual)
            self.limits |= {node: min(claim, most) for node, claim in new.items()}

    def room(self, node: str) -> int:
        """Return how many more slots a node may offer; None said yet: any."""
        return self.limits.get(node, MAX_SLOTS) - len(self.slots.get(node, {}))

    def add(self, node: str, slots: list[int], content: bytes) -> None:
        """Store copies of the samples that a node offers, up to its limit; a slot once."""
        table, size = self.slots.get(node, {}), len(content) // max(len(slots), 1)
        sizes = {len(self.store[slot.sample_id]) for slot in table.values()}
        if size * len(slots) != len(content) or (slots and (sizes - {size} or not size)):
            raise ValueError(f"{len(content)} bytes are not {len(slots)} samples of one size.")
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0:
            raise ValueError("offered slots must be distinct and not negative.")
        room, self.slots[node] = self.room(node), table
        for place, slot in enumerate(slots):
            if slot in table:  # the table knows better than the node what is there
                table[slot].offered = True
            elif room > 0:
                room -= 1
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
            "limits": np.array([self.limits.get(node, MAX_SLOTS) for node in nodes], np.int64),
            "slots": np.array(rows, dtype=np.int64).reshape(-1, 6),
            "lengths": np.array([len(sample) for sample in self.store], dtype=np.int64),
            "content": np.frombuffer(b"".join(self.store), np.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        vector = ((-1,), "i")
        schema = {"nodes": str, "slots": ((-1, 6), "i"), "content": ((-1,), "u")}
        vectors = dict.fromkeys(("received", "limits", "lengths"), vector)
        check_state(state, schema | vectors, "Resharding")
        nodes, rows = state["nodes"].splitlines(), state["slots"].tolist()
        lengths, content = state["lengths"], state["content"]
        if (
            not len(nodes) == len(state["received"]) == len(state["limits"])
            or any(not (0 <= r[0] < len(nodes) and 0 <= r[2] < len(lengths)) for r in rows)
            or (lengths < 1).any()
            or lengths.sum() != len(content)
        ):
            raise ValueError("the state of Resharding is damaged: nodes, slots, samples disagree.")
        self.store = [part.tobytes() for part in np.split(content, lengths.cumsum())[:-1]]
        self.received = dict(zip(nodes, state["received"].tolist(), strict=True))
        self.limits = dict(zip(nodes, state["limits"].tolist(), strict=True))
        self.slots = {node: {} for node in nodes}
        for node, number, sample_id, *flags in rows:
            self.slots[nodes[node]][number] = Slot(sample_id, *map(bool, flags))
