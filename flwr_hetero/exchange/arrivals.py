"""When an exchange is over: all or enough good replies are here, or nodes are far behind others.

A reply is judged when it is here, so that bad replies take no place of good ones.
"""

from collections.abc import Callable, Collection
from math import inf
from statistics import median_high
from typing import Any

from flwr.app import Message

from flwr_hetero.errors import check_number
from flwr_hetero.records import reported_latency

LATE_LIMIT = 50.0
"""Median times of the nodes after which one is late; the paper's fastest and slowest: 40 apart."""
LEAST_TIMED, MOST_TIMED = 4, 100
"""Other nodes whose times are known before one is late; of the last ones to answer they are."""
LEAST_S = 10.0
"""Seconds that every real node has, for its app may have to start first."""

Judge = Callable[[Message, int], bool]
"""Whether a reply of a node would be accepted; asked once, when the reply is here."""


class Arrivals:
    """The replies to an exchange so far, how many are good, and how long to wait for others."""

    def __init__(self, exchange: Any, sent: Collection[str], *, is_real: bool) -> None:
        self.exchange = exchange
        self.is_real = is_real
        # By message, the nodes that are waited for.
        self.waiting: dict[str, int] = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in exchange.messages
            if message.metadata.message_id in sent
        }
        self.replies: list[Message] = []
        # By node: how long it took for its good reply.
        self.took_s: dict[str, float] = {}
        self._num_useful = len(self.waiting)
        self._known_at = 0

    def add(self, reply: Message, took_s: float) -> None:
        """Judge a reply that is here."""
        self.replies.append(reply)
        node_id = self.waiting.pop(reply.metadata.reply_to_message_id)
        judge: Judge | None = self.exchange.judge
        if judge(reply, node_id) if judge else reply.has_content():
            self.took_s[self.exchange.identity(node_id)] = took_s
        else:
            self._num_useful -= 1
            self._known_at = 0

    def are_enough(self) -> bool:
        """Return whether so many good replies are here that the others are not waited for."""
        return is_enough(self.took_s, self.exchange.enough)

    def is_over(self) -> bool:
        """Return whether nobody has to be waited for."""
        return not self.waiting or self.are_enough()

    def limit_s(self) -> float:
        """Return how long to wait at most, since the instructions were sent."""
        return min(float(self.exchange.timeout_s), self.late_s())

    def tells_more(self) -> bool:
        """Return whether more is known since the last call of how long to wait.

        To find that out for each reply would take time in proportion to the square of their number.
        """
        if len(self.took_s) < self._known_at:
            return False
        few = max(self._most - len(self.took_s), LEAST_TIMED - len(self._times_s()))
        self._known_at = len(self.took_s) + few if few > 0 else self._num_useful + 1
        return True

    @property
    def _most(self) -> int:
        """How many are most of the nodes that have not failed."""
        return self._num_useful // 2 + 1

    def late_s(self) -> float:
        """Return after how long a node is late beside the others; infinity if they do not tell."""
        limit: float | None = self.exchange.fleet.late_limit
        if limit is None or len(self.took_s) < self._most:
            return inf
        # These nodes did the same work. Where they are few, earlier times count as well.
        least_s = limit * sorted(self.took_s.values())[self._most - 1]
        return max(least_s, late_after_s(self._times_s(), limit, is_real=self.is_real))

    def _times_s(self) -> list[float]:
        """Return how long nodes took the last time that are not waited for."""
        late = set(map(self.exchange.identity, self.waiting.values()))
        known_s = self._known_s() | self.took_s
        return [seconds for name, seconds in known_s.items() if name not in late]

    def _known_s(self) -> dict[str, float]:
        """Return how long nodes took for their last good reply to a message of this type."""
        kind = self.exchange.messages[0].metadata.message_type
        known: dict[str, float] = self.exchange.fleet.times_s.setdefault(kind, {})
        return known

    def close(self) -> None:
        """Keep the times for later exchanges, and note it if nodes are late beside the others."""
        late_s = self.late_s()
        if not self.is_over() and late_s < self.exchange.timeout_s:
            self.exchange.late_s = late_s
        known = self._known_s()
        for name, took_s in self.took_s.items():
            if took_s < inf:
                known.pop(name, None)
                known[name] = took_s
        for name in [*known][:-MOST_TIMED]:
            del known[name]


def late_after_s(times_s: Collection[float], limit: float | None, *, is_real: bool) -> float:
    """Return after how long a node is late beside others that took these times."""
    if limit is None or len(times_s) < LEAST_TIMED:
        return inf
    return max(limit * median_high(times_s), LEAST_S if is_real else 0.0)


def device_s(reply: Message) -> float:
    """Return how long a device took by its own clock; infinity if it does not say."""
    if not reply.has_content():
        return 0.0
    latency = reported_latency(reply)
    return latency.seconds if latency else inf


def is_enough(good: Collection[object], enough: int | None) -> bool:
    """Return whether so many good replies are here."""
    return enough is not None and len(good) >= enough


def check_late_limit(limit: float | None) -> float | None:
    """Check after how many of the others' times a node is late."""
    if limit is None:
        return None
    return check_number("late_limit", limit, "(1, inf)", "or None: only the time-out counts")
