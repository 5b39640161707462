"""Move important samples between nodes while they train; off unless you use this wrapper."""

import json
from logging import WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.mercury.resharding import Ledger, ints_in, value_in, write_delivery
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, rng_from_str, rng_to_str


class Resharding(Wrapper):
    """Exchange samples between nodes, the important ones first (Mercury, section 4.2).

    **Raw samples leave the devices and pass through the server, which keeps a copy of every
    sample moved until the run ends.** Use it only where that is allowed.

    Each plan, a node offers a share of its samples, in proportion from each of its groups and
    by importance within them. Copies travel with its replies, at most ``budget_bytes`` each;
    a plan pauses between replies and resumes where the server's receipt says. The server swaps
    offered samples of different nodes at random, so that no node's data grows or shrinks. A
    sample changes hands in the server's book and in no other place: whatever gets lost on the
    way is sent again, and no two nodes train on the same sample.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    share : float
        Part of its samples that a node offers in a plan, in (0, 1].
    budget_bytes : int
        Samples per reply, in bytes: what the link can carry beside the model.
    by_importance : bool
        False: any samples, the importance-agnostic baseline.
    every : int
        Rounds from one plan to the next; 0: one plan only.
    seed : int
        Of the swaps.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Notes
    -----
    In the paper devices exchange samples among themselves while they compute. Flower's nodes
    speak to the server only, one message at a time: samples travel with the model, and their
    time is the link's.

    References
    ----------
    .. [1] Zeng et al., "Mercury: Efficient On-Device Distributed DNN Training via Stochastic
       Importance Sampling", SenSys 2021, section 4.2.

    Examples
    --------
    >>> strategy = Resharding(share=0.2, budget_bytes=500_000)
    >>> Resharding(share=2.0)
    Traceback (most recent call last):
    ...
    ValueError: share must lie in (0, 1], got 2.0: ...
    """

    name: ClassVar[str] = "resharding"
    decides = frozenset({"samples"})

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        share: float = 0.1,
        budget_bytes: int = 1_000_000,
        by_importance: bool = True,
        every: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 < share <= 1:
            raise invalid("share", share, "lie in (0, 1]", "0.1 moves a tenth of the data")
        cure = "leave the wrapper out to move nothing"
        self.budget_bytes = check_count("budget_bytes", budget_bytes, 1, cure)
        self.every = check_count("every", every, 0, "0 makes one plan only")
        seed = check_count("seed", seed, 0, "any such number will do")
        super().__init__(strategy)
        self.share, self.by_importance = float(share), by_importance
        self.ledger, self.rng = Ledger(), np.random.default_rng(seed)
        self.plan, self.received = 0, dict[str, int]()
        self._roll: set[int] = set()
        self._info: dict[str, Any] = {}

    def before_train(self, server_round: int, grid: Grid) -> Grid:
        """Find out who newcomers are: one that was here before may have swapped samples."""
        self._identify(grid, self.session.timeout_s)
        return grid

    def _identify(self, grid: Grid, timeout_s: float) -> None:
        registry = self.session.registry
        unknown = {node for node in grid.get_node_ids() if not registry.knows(node)} - self._roll
        if unknown and self.ledger.holdings:
            self._roll |= unknown
            identify_nodes(self, grid, timeout_s)

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Tell each node what it holds and what it may offer."""
        plan = 1 + ((server_round - 1) // self.every if self.every else 0)
        if plan != self.plan:
            self.plan, self.received = plan, {}
        delivered = 0
        for message in messages:
            node = self.identity(message.metadata.dst_node_id)
            delivery = self.ledger.deliver(node)
            delivered += len(delivery.content)
            message.content[keys.RESHARDING] = ConfigRecord(
                {
                    keys.PLAN: plan,
                    keys.SHARE: self.share,
                    keys.BY_IMPORTANCE: self.by_importance,
                    keys.BUDGET: self.budget_bytes,
                    keys.RECEIVED: self.received.get(node, 0),
                    **write_delivery(delivery),
                }
            )
        self._info = {"plan": plan, "delivered_bytes": delivered, "offered_bytes": 0}
        return messages

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Take in what nodes offer, and swap."""
        records = {}
        for reply in replies:
            record = reply.content.config_records.get(keys.RESHARDING)
            if record is not None:  # else the node's app does not reshard
                records[self.identity(reply.metadata.src_node_id)] = record
                del reply.content[keys.RESHARDING]
        forgotten: dict[str, int] = {}
        if self.ledger.settle(_size(record) for record in records.values()):
            log(WARNING, "Resharding: samples of %d bytes: afresh", self.ledger.sample_bytes)
            forgotten, self.received = self.received, {}
        for node, record in records.items():
            try:
                self._take(node, record)
            except ValueError as error:
                log(WARNING, "%s: offered samples not taken: %s", node, error)
        for node in forgotten:  # what it sent before must come again
            self.received.pop(node, None)
        self._info["swaps"] = self.ledger.swap(self.rng)
        self._info["waiting"] = sum(len(slots) for slots in self.ledger.waiting.values())
        return replies

    def _take(self, node: str, record: ConfigRecord) -> None:
        self.ledger.confirm(node, ints_in(record, keys.MISSING))
        content = value_in(record, keys.CONTENT, bytes)
        if len(content) > self.budget_bytes:
            raise ValueError(f"{len(content)} bytes, the budget is {self.budget_bytes}")
        if value_in(record, keys.PLAN, int) == self.plan:
            taken = self.ledger.take(node, ints_in(record, keys.SLOTS), content)
            self.received[node] = self.received.get(node, 0) + taken
            self._info["offered_bytes"] += len(content)

    # --- the run -------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the samples belong to."""
        self.session.arrays, self.session.config = run.arrays, run.train_config
        self._identify(run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return this round's plan, swaps, waiting offers and bytes of samples."""
        return self._info

    def state_dict(self) -> StateDict:
        """Return the book with every sample moved so far, the plan and the generator."""
        return {
            **self.ledger.state(),
            "plan": self.plan,
            "received": json.dumps(self.received),
            "rng": rng_to_str(self.rng),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.ledger = Ledger.from_state(state)
        self.plan, self.received = int(state["plan"]), json.loads(str(state["received"]))
        self.rng = rng_from_str(str(state["rng"]))


def _size(record: ConfigRecord) -> tuple[int, int]:
    """Return how many samples a node offers and their bytes; none if that makes no sense."""
    try:
        return len(ints_in(record, keys.SLOTS)), len(value_in(record, keys.CONTENT, bytes))
    except ValueError:
        return 0, 0
