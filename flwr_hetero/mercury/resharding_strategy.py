"""Move important samples between nodes while they train; off unless you use this wrapper."""

from collections.abc import Mapping
from logging import WARNING
from math import ceil
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.mercury.resharding import MAX_SLOTS, bytes_in, ints_in
from flwr_hetero.mercury.swap_table import SwapTable
from flwr_hetero.records import read_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.contract import Contract, check_on_missing
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state, rng_from_str, rng_to_str

SAMPLES = Contract(
    keys.RESHARDING,
    "samples offered and received",
    "    from flwr_hetero.mercury.resharding import NodeShard, pack, unpack\n"
    "    if shard := NodeShard.open(msg, context):  # before training: others' samples\n"
    '        slots, content = list(shard.held), b"".join(shard.held.values())\n'
    "        inputs[slots], targets[slots] = unpack(content, inputs.shape[1:], num_classes)\n"
    "    if shard:  # after training: SAMPLES LEAVE THE NODE; choose as in apps/mercury\n"
    "        slots = shard.offers(len(targets), 4 * inputs[0].size + 8, choose)\n"
    "        shard.close(reply, context, slots, pack(inputs[slots], targets[slots]))",
    "which exchange none",
)
"""What nodes must do: see ``apps/mercury``."""


class Resharding(Wrapper):
    """Exchange samples between nodes, the important ones first (Mercury, section 4.2).

    **Raw samples leave the devices and pass through the server, which keeps a copy of every
    sample moved until the run ends.** Use it only where that is allowed.

    Each node offers a share of its samples once; copies travel with its replies. The server swaps
    offered samples of different nodes at random, so that no node's data grows or shrinks. Its
    table alone says who holds a sample: what gets lost on the way is sent again, and no two nodes
    train on the same sample. A node offers the share of the samples that it says at first to have,
    and no more than twice the median node does.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    share : float
        Part of its samples that a node offers, in (0, 1].
    budget_bytes : int
        Samples per reply, in bytes: what the link can carry beside the model.
    by_importance : bool
        False: any samples, the importance-agnostic baseline.
    seed : int
        Of the swaps.
    on_missing : {"raise", "warn"}
        What to do if no node takes part in the exchange.

    Raises
    ------
    ValueError
        If a setting is out of range.
    MissingHelpError
        In the first round, if no node takes part in the exchange.

    Notes
    -----
    In the paper devices exchange samples among themselves while they compute. Flower's nodes
    speak to the server only, one message at a time: samples travel with the model, and their
    time is the link's.

    References
    ----------
    Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic Importance
    Sampling", SenSys 2021, section 4.2.

    Examples
    --------
    >>> strategy = Resharding(share=0.2, budget_bytes=500_000)
    >>> Resharding(share=2.0)
    Traceback (most recent call last):
    ...
    ValueError: share must be a number in (0, 1], got 2.0.
    """

    name: ClassVar[str] = "resharding"
    decides = frozenset({"samples"})
    contracts = (SAMPLES,)
    only_rounds = "samples move between rounds, when no node is at work"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        share: float = 0.1,
        budget_bytes: int = 1_000_000,
        by_importance: bool = True,
        seed: int = 0,
        on_missing: str = "raise",
    ) -> None:
        self.share = check_number("share", share, "(0, 1]")
        self.budget_bytes = check_count("budget_bytes", budget_bytes, 1)
        self.rng = np.random.default_rng(check_count("seed", seed))
        self.on_missing = check_on_missing(on_missing)
        super().__init__(strategy)
        self.by_importance, self.table = by_importance, SwapTable()
        self._asked: set[int] = set()
        self._info: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """After a resume, identify the nodes that the samples belong to."""
        self._identify(run.exchange(run.round + 1), run.grid)

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Identify newcomers: one that was here before may have swapped samples."""
        self._identify(context, grid)
        return grid

    def _identify(self, context: Exchange, grid: Grid) -> None:
        registry = self.fleet.nodes
        nodes = set(grid.get_node_ids()) - registry.in_flight.keys() - self._asked
        unknown = {node for node in nodes if not registry.knows(node)}
        if unknown and any(slot.exchanged for slot in self.table):
            self._asked |= unknown
            identify_nodes(self, context, grid, context.timeout_s)

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Tell each node what it holds and what it may offer."""
        delivered = 0
        for message in messages:
            node = self.identity(message.metadata.dst_node_id)
            delivery = self.table.deliver(node)
            delivered += len(delivery.content)
            message.content[keys.RESHARDING] = ConfigRecord(
                {
                    keys.SHARE: self.share,
                    keys.BY_IMPORTANCE: self.by_importance,
                    keys.BUDGET: self.budget_bytes if self.table.room(node) > 0 else 0,
                    keys.RECEIVED: self.table.received.get(node, 0),
                    **delivery.to_record(),
                }
            )
        self._info = {"delivered_bytes": delivered, "offered_bytes": 0}
        return messages

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Store what nodes offer, and swap."""
        records = {}
        for reply in replies:
            if (
                keys.RESHARDING in reply.content.config_records
            ):  # or the node's app does not reshard
                node = self.identity(reply.metadata.src_node_id)
                records[node] = reply.content.config_records[keys.RESHARDING]
                del reply.content[keys.RESHARDING]
        claims = {node: read_number(record, keys.SAMPLES) for node, record in records.items()}
        shares = {node: ceil(self.share * min(n, MAX_SLOTS)) for node, n in claims.items() if n > 0}
        self.table.set_limits(shares)
        for node, record in records.items():
            try:
                self._take(node, record)
            except ValueError as error:
                log(WARNING, "%s: offered samples not taken: %s", node, error)
        self._info["swaps"] = self.table.swap(self.rng)
        self._info["waiting"] = sum(slot.offered for slot in self.table)
        return replies

    def _take(self, node: str, record: Mapping[str, Any]) -> None:
        """Store what a node offers; ValueError if it may not."""
        known = len(self.table.slots.get(node, {}))
        self.table.confirm(node, ints_in(record, keys.MISSING, known))
        content = bytes_in(record, keys.CONTENT)
        if len(content) > self.budget_bytes:
            raise ValueError(f"{len(content)} bytes, the budget is {self.budget_bytes}")
        if node not in self.table.limits:
            raise ValueError(f"{keys.SAMPLES} must be a number above 0")
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
        check_state(state, {"rng": str}, "Resharding")
        self.table.load_state_dict(state)
        self.rng = rng_from_str(str(state["rng"]))
