"""What a run without rounds asks its strategy: whom to ask, when to merge, when a round ends."""

from typing import Any, NamedTuple, Protocol

from flwr.app import Message

from flwr_hetero.asynchronous.mail import Sent
from flwr_hetero.server.context import Exchange


class Arrival(NamedTuple):
    """A good reply to training: the instruction with the model it started from, and when."""

    sent: Sent
    reply: Message
    version: int
    """Merges made when the instruction was sent."""
    arrived_s: float


class Rule(Protocol):
    """What decides which nodes start and which replies are merged."""

    unit: str
    """What a round is called in the log."""
    evaluates_each_round: bool
    """Whether nodes evaluate every round's model; else in a tenth of the time at most."""
    paused: Any
    """What the last run left in flight, an ``engine.Paused``, or None."""

    @property
    def wake_s(self) -> float:
        """Until when to wait for the next reply at most, on the fleet's clock."""

    def next_nodes(self, idle: list[int], at_work: int, buffer: list[Arrival]) -> list[int]:
        """Choose which of the idle nodes start now."""

    def due(self, buffer: list[Arrival], team: int) -> list[Arrival]:
        """Return what is merged now, of nodes that are so many at a time; empty: nothing yet."""

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""

    def merging(self, context: Exchange, arrivals: list[Arrival], version: int) -> None:
        """Learn what is about to be merged, and into which version of the model."""

    def ends_round(self, team: int) -> bool:
        """Return whether the merge that was just made is the last one of its round."""
