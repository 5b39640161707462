"""Resharding: nodes exchange raw samples (opt-in, as raw data leave the devices)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.mercury.resharding import MAX_SLOTS, Delivery, bytes_in, ints_in
from flwr_hetero.records import configs_in, read_number
from flwr_hetero.server.client_support import ClientSupport
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

SAMPLES = ClientSupport(
    keys.RESHARDING,
    "samples offered and received",
    "    from flwr_hetero.mercury.resharding import NodeShard, pack, unpack\n"
    "    if shard := NodeShard.open(msg, context):  # before training: others' samples\n"
    '        slots, content = list(shard.held), b"".join(shard.held.values())\n'
    "        inputs[slots], targets[slots] = unpack(content, inputs.shape[1:], num_classes)\n"
    "    if shard:  # after training: SAMPLES LEAVE THE NODE\n"
    "        # choose() is as in flwr_hetero_studies/papers/mercury/app.py\n"
    "        slots = shard.offers(len(targets), 4 * inputs[0].size + 8, choose)\n"
    "        shard.close(reply, context, slots, pack(inputs[slots], targets[slots]))",
    "which exchange none",
)
"""What nodes must do; ``flwr_hetero_studies/papers/mercury/app.py`` does it."""
MOST = 2.0
"""A node may offer at most this many times the samples of the median node."""
Swap = tuple[tuple[str, int], tuple[str, int]]
"""Two slots, each as (node, slot), that exchange what they hold."""


def match(offers: Mapping[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Pair slots of different nodes at random, always from the nodes with the most slots left."""
    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}

    def pick_fullest(nodes: list[str]) -> str:
        most = max(len(left[node]) for node in nodes)
        fullest = [node for node in nodes if len(left[node]) == most]
        return fullest[int(rng.integers(len(fullest)))]

    swaps: list[Swap] = []
    while True:
        nodes = [node for node, slots in left.items() if slots]
        if len(nodes) < 2:
            return swaps
        one = pick_fullest(nodes)
        other = pick_fullest([node for node in nodes if node != one])
        swaps.append(((one, left[one].pop()), (other, left[other].pop())))


@dataclass
class Slot:
    """A place in a node's data: which sample it holds, and whether the node confirmed that."""

    sample_id: int
    offered: bool = True
    exchanged: bool = False
    confirmed: bool = False


class SwapTable:
    """Which node holds which sample; samples are opaque byte strings."""

    # The table alone decides. A node does not train on a slot before it has received the sample
    # there, so a failure at any point neither loses a sample nor lets two nodes train on it.

    def __init__(self) -> None:
        self.store: list[bytes] = []
        self.slots: dict[str, dict[int, Slot]] = {}
        # By node: number of slots in its offers so far, and how many slots it may offer in all.
        self.received: dict[str, int] = {}
        self.limits: dict[str, int] = {}

    def set_limits(self, claims: Mapping[str, int]) -> None:
        """Limit a new node's offers to its first claim, and to twice the median node's."""
        new = {node: claim for node, claim in claims.items() if node not in self.limits}
        if new:
            most = ceil(MOST * float(np.median([*self.limits.values(), *new.values()])))
            self.limits |= {node: min(claim, most) for node, claim in new.items()}

    def room(self, node: str) -> int:
        """Return how many more slots a node may offer; any number while it has no limit."""
        return self.limits.get(node, MAX_SLOTS) - len(self.slots.get(node, {}))

    def add(self, node: str, slots: list[int], content: bytes) -> None:
        """Store copies of the samples that a node offers, each slot once and up to its limit."""
        table = self.slots.get(node, {})
        size = len(content) // max(len(slots), 1)
        sizes = {len(self.store[slot.sample_id]) for slot in table.values()}
        if size * len(slots) != len(content) or (slots and (sizes - {size} or not size)):
            raise ValueError(f"{len(content)} bytes are not {len(slots)} samples of one size.")
        if len(set(slots)) < len(slots) or min(slots, default=0) < 0:
            raise ValueError("offered slots must be distinct and not negative.")
        room = self.room(node)
        for place, slot in enumerate(slots):
            # The stored sample counts: a node that lost its state may send an older one.
            if slot in table:
                table[slot].offered = True
            elif room > 0:
                room -= 1
                table[slot] = Slot(len(self.store))
                self.store.append(content[place * size : (place + 1) * size])
        self.slots[node] = table
        self.received[node] = self.received.get(node, 0) + len(slots)

    def swap(self, rng: np.random.Generator) -> int:
        """Exchange as many offered slots of different nodes as possible; return their number."""
        # Only samples of equal size are exchanged, because a node cannot train on others.
        by_bytes: dict[int, dict[str, list[int]]] = {}
        for node, slots in self.slots.items():
            offered = [number for number, slot in slots.items() if slot.offered]
            if offered:
                size = len(self.store[slots[offered[0]].sample_id])
                by_bytes.setdefault(size, {})[node] = offered
        swaps = [pair for _, offers in sorted(by_bytes.items()) for pair in match(offers, rng)]
        for (one, one_slot), (other, other_slot) in swaps:
            one_id = self.slots[one][one_slot].sample_id
            other_id = self.slots[other][other_slot].sample_id
            self.slots[one][one_slot] = Slot(other_id, offered=False, exchanged=True)
            self.slots[other][other_slot] = Slot(one_id, offered=False, exchanged=True)
        return len(swaps)

    def deliver(self, node: str) -> Delivery:
        """Return what a node holds, with the content of slots that it has not confirmed."""
        held = {n: s for n, s in sorted(self.slots.get(node, {}).items()) if s.exchanged}
        sent = [number for number, slot in held.items() if not slot.confirmed]
        content = b"".join(self.store[held[number].sample_id] for number in sent)
        return Delivery(list(held), [slot.sample_id for slot in held.values()], sent, content)

    def confirm(self, node: str, missing: list[int]) -> None:
        """Mark a node's slots as delivered; those that it still lacks are sent again."""
        for number, slot in self.slots.get(node, {}).items():
            slot.confirmed = number not in missing

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the slots of all nodes."""
        return (slot for slots in self.slots.values() for slot in slots.values())

    def state_dict(self) -> StateDict:
        """Return the table as text, and the samples one after the other."""
        rows = {
            node: {number: list(vars(slot).values()) for number, slot in slots.items()}
            for node, slots in self.slots.items()
        }
        sizes = [len(sample) for sample in self.store]
        return {
            "table": json.dumps([rows, self.received, self.limits, sizes]),
            "content": np.frombuffer(b"".join(self.store), np.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        rows, self.received, self.limits, sizes = json.loads(state["table"])
        self.slots = {
            node: {int(number): Slot(*fields) for number, fields in slots.items()}
            for node, slots in rows.items()
        }
        parts = np.split(state["content"], np.cumsum([0, *sizes]))
        self.store = [part.tobytes() for part in parts[1:-1]]


class Resharding(Wrapper):
    """Exchange samples between nodes, the important ones first (Mercury, SenSys 2021, sec. 4.2).

    **Raw samples leave the devices and pass through the server, which keeps a copy of every
    sample moved until the run ends.** Use it only where that is allowed.

    Each node offers a share of its samples once. The server swaps offered samples of different
    nodes at random, keeps a table of which node holds which sample, and sends lost samples again.
    MissingClientSupportError in the first round if no node takes part in the exchange.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    share : float
        Part of its samples that a node offers, in (0, 1].
    budget_bytes : int
        Bytes of samples in a reply, such as the link can carry beside the model.
    by_importance : bool
        False: any samples, the importance-agnostic baseline.
    seed : int
        Seed of the swaps.

    Examples
    --------
    >>> strategy = Resharding(share=0.2, budget_bytes=500_000)
    """

    name: ClassVar[str] = "resharding"
    decides = frozenset({"samples"})
    client_support = (SAMPLES,)
    only_rounds = "samples move between rounds, when no node is in flight"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        share: float = 0.1,
        budget_bytes: int = 1_000_000,
        by_importance: bool = True,
        seed: int = 0,
    ) -> None:
        self.share = check_number("share", share, "(0, 1]")
        self.budget_bytes = check_count("budget_bytes", budget_bytes, 1)
        self.seed = check_count("seed", seed)
        self.rng = np.random.default_rng(seed)
        super().__init__(strategy)
        self.by_importance = by_importance
        self.table = SwapTable()
        self._asked: set[int] = set()
        self._info: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the samples belong to."""
        self._identify(run.exchange(run.round + 1), run.grid)

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Identify new nodes: one that took part before may have exchanged samples."""
        self._identify(context, grid)
        return grid

    def _identify(self, context: Exchange, grid: Grid) -> None:
        # A node without an identity would be sent no samples, and would train on its own samples
        # although other nodes hold them.
        registry = self.fleet.nodes
        nodes = set(grid.get_node_ids()) - self.fleet.queue_on(grid).busy.keys() - self._asked
        unknown = {node for node in nodes if not registry.knows(node)}
        if unknown and any(slot.exchanged for slot in self.table):
            self._asked |= unknown
            identify_nodes(self, context, grid, context.timeout_s)

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Send each node the samples that it holds, and how much it may offer."""
        self._info = {"delivered_bytes": 0, "offered_bytes": 0}
        for message in messages:
            node = self.identity(message.metadata.dst_node_id)
            delivery = self.table.deliver(node)
            self._info["delivered_bytes"] += len(delivery.content)
            terms = {
                keys.SHARE: self.share,
                keys.BY_IMPORTANCE: self.by_importance,
                keys.BUDGET: self.budget_bytes if self.table.room(node) > 0 else 0,
                keys.RECEIVED: self.table.received.get(node, 0),
            }
            message.content[keys.RESHARDING] = ConfigRecord({**terms, **delivery.to_record()})
        return messages

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Store the samples that nodes offer, and swap."""
        records = {}
        for reply in replies:
            if keys.RESHARDING in configs_in(reply.content):
                node = self.identity(reply.metadata.src_node_id)
                records[node] = reply.content.pop(keys.RESHARDING)
        # Limit each node's offers to the share of the data size that it reports at first.
        sizes = {node: read_number(record, keys.NUM_SAMPLES) for node, record in records.items()}
        self.table.set_limits(
            {node: ceil(self.share * min(n, MAX_SLOTS)) for node, n in sizes.items() if n > 0}
        )
        for node, record in records.items():
            # Only a bad offer is dropped: the model in the same reply still counts.
            try:
                self._take(node, record)
            except ValueError as error:
                context.fleet.nodes.warn(node, f"offered samples not taken: {error}")
        self._info["swaps"] = self.table.swap(self.rng)
        self._info["waiting"] = sum(slot.offered for slot in self.table)
        return replies

    def _take(self, node: str, record: Mapping[str, Any]) -> None:
        """Store the samples that a node offers; ValueError if the offer is not valid."""
        num_slots = len(self.table.slots.get(node, {}))
        self.table.confirm(node, ints_in(record, keys.MISSING, num_slots))
        content = bytes_in(record, keys.CONTENT)
        if len(content) > self.budget_bytes:
            raise ValueError(f"{len(content)} bytes, the budget is {self.budget_bytes}")
        if node not in self.table.limits:
            raise ValueError(f"{keys.NUM_SAMPLES} must be a number above 0")
        self.table.add(node, ints_in(record, keys.SLOTS, len(content)), content)
        self._info["offered_bytes"] += len(content)

    def round_info(self) -> dict[str, Any]:
        """Return this round's swaps, waiting offers and bytes of samples."""
        return self._info

    def state_dict(self) -> StateDict:
        """Return the table with every sample moved so far, and the generator."""
        return {**self.table.state_dict(), "rng": rng_to_str(self.rng)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"rng": str, "table": str, "content": ((-1,), "u")}, "Resharding")
        self.table.load_state_dict(state)
        self.rng = rng_from_str(str(state["rng"]))
