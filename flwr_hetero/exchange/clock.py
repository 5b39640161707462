"""The clock of a run, and what its messages cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from flwr.app import Message

from flwr_hetero.records import payload_bytes, reported_latency


@dataclass
class Clock:
    """Time of the run, on the clock of the devices if these are emulated.

    Only a :class:`~flwr_hetero.exchange.queue.MessageQueue` moves it on.
    """

    virtual_s: float = 0.0
    emulated: bool = False
    """Whether a simulated node has reported an emulated time."""


@dataclass
class PendingCost:
    """An instruction without a reply: when it was sent, when it is given up, the time counted."""

    sent_s: float
    until_s: float
    counted_s: float = 0.0


@dataclass
class Costs:
    """Bytes on the links, and seconds for which nodes worked, at most until they replied."""

    bytes_down: int = 0
    bytes_up: int = 0
    device_s: float = 0.0
    pending: dict[str, PendingCost] = field(default_factory=dict)
    on_wire: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of messages in another form, by their id and the id that they answer."""

    def size(self, message: Message) -> int:
        """Return the bytes of a message that was sent."""
        ids = message.metadata.message_id, message.metadata.reply_to_message_id
        size = self.on_wire.pop(ids, None)
        if size is not None:
            return size
        return payload_bytes(message.content) if message.has_content() else 0

    def sent(self, messages: Sequence[Message], now_s: float, timeout_s: float = inf) -> None:
        """Count instructions that were sent now, so that they have an id."""
        for message in messages:
            self.bytes_down += self.size(message)
            self.pending[message.metadata.message_id] = PendingCost(now_s, now_s + timeout_s)

    def answered(self, replies: Sequence[Message], now_s: float) -> None:
        """Count replies that arrive now."""
        for reply in replies:
            self.bytes_up += self.size(reply)
            job = self.pending.pop(reply.metadata.reply_to_message_id, None)
            if job is None:
                continue
            took_s = now_s - job.sent_s
            latency = reported_latency(reply) if reply.has_content() else None
            if latency is not None:
                took_s = min(took_s, latency.seconds)
            self.device_s += took_s - job.counted_s

    def until(self, now_s: float) -> dict[str, float]:
        """Return the costs since the last call, including those of messages without a reply."""
        for job in self.pending.values():
            worked_s = max(job.counted_s, min(now_s, job.until_s) - job.sent_s)
            self.device_s += worked_s - job.counted_s
            job.counted_s = worked_s
        spent: dict[str, float] = {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up}
        spent["device_s"] = round(self.device_s, 9)
        self.bytes_down = 0
        self.bytes_up = 0
        self.device_s = 0.0
        return spent
