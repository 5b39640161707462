"""Waiting for replies: until all or enough good ones are here, or nodes are far behind the others.

What is here is judged in the order of its arrival, so that bad replies take no place of good ones.
"""

import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from statistics import median_high
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.errors import check_number
from flwr_hetero.records import reported_latency

POLL_S, POLL_SHARE = 0.1, 0.1
"""Pause between two polls for replies, in seconds; most time for polls, which may be slow."""
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

    def __init__(self, exchange: Any, grid: Grid) -> None:
        self.exchange, self.enough, self.is_real = exchange, exchange.enough, False
        # as long as the message lives, or until nodes that do not have it are known
        sent = {message_id for message_id in grid.push_messages(exchange.messages) if message_id}
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in exchange.messages}
        self.waiting = {i: node_id for i, node_id in asked.items() if i in sent}
        # replies, and how long the nodes took for the good ones
        self.replies: list[Message] = []
        self.took_s: dict[str, float] = {}
        self._num_useful = len(self.waiting)

    @property
    def most(self) -> int:
        """How many are most of the nodes that have not failed."""
        return self._num_useful // 2 + 1

    def add(self, reply: Message, took_s: float) -> None:
        """Judge a reply that is here."""
        self.replies.append(reply)
        node_id = self.waiting.pop(reply.metadata.reply_to_message_id, None)
        # a copy, or a reply to something else
        if node_id is None:
            return
        judge: Judge | None = self.exchange.judge
        if judge(reply, node_id) if judge else reply.has_content():
            self.took_s[self.exchange.identity(node_id)] = took_s
        else:
            self._num_useful -= 1

    def is_over(self) -> bool:
        """Return whether nobody has to be waited for."""
        return not self.waiting or is_enough(self.took_s, self.enough)

    def missing(self) -> int | None:
        """Return how many further good replies change how long to wait; None: no number does."""
        few = max(self.most - len(self.took_s), LEAST_TIMED - len(self._times_s()))
        numbers = [few, self.enough - len(self.took_s)] if self.enough else [few]
        return min((number for number in numbers if number > 0), default=None)

    def late_s(self) -> float:
        """Return after how long a node is late beside the others; infinity if they do not tell."""
        limit: float | None = self.exchange.fleet.late_limit
        number = self.most
        if limit is None or len(self.took_s) < number:
            return inf
        # of nodes that did the same; no less than usual, where they are few
        least_s = limit * sorted(self.took_s.values())[number - 1]
        return max(least_s, late_after_s(self._times_s().values(), limit, is_real=self.is_real))

    def _times_s(self) -> dict[str, float]:
        """Return how long nodes took the last time that are not waited for."""
        late = set(map(self.exchange.identity, self.waiting.values()))
        return {name: s for name, s in (self.known_s | self.took_s).items() if name not in late}

    def limit_s(self) -> float:
        """Return how long to wait at most, since the instructions were sent."""
        return min(float(self.exchange.timeout_s), self.late_s())

    @property
    def known_s(self) -> dict[str, float]:
        """How long nodes took for their last good reply to a message of this type."""
        kind = self.exchange.messages[0].metadata.message_type
        known: dict[str, float] = self.exchange.fleet.times_s.setdefault(kind, {})
        return known

    def close(self) -> None:
        """Keep the times for later exchanges, and note it if nodes are late beside the others."""
        known, late_s = self.known_s, self.late_s()
        if not self.is_over() and late_s < self.exchange.timeout_s:
            self.exchange.late_s = late_s
        for name in [name for name, took_s in self.took_s.items() if took_s < inf]:
            known.pop(name, None)
            known[name] = self.took_s[name]
        for name in [*known][:-MOST_TIMED]:
            del known[name]

    # --- on each kind of grid ----------------------------------------------------------------
    def wait_locally(self, grid: Any) -> None:
        """Wait on a LocalGrid, which has the clock."""
        began_s, trips_s = grid.virtual_time_s, self.exchange.round_trip_s
        while not self.is_over():
            left_s = began_s + self.limit_s() - grid.virtual_time_s
            arrived = grid.wait_for(self.waiting, max(0.0, left_s), self.missing())
            # to the nanosecond, so that a resumed run, whose clock began later, counts the same
            trips_s |= {i: round(at_s - began_s, 9) for i, at_s in grid.arrived_s.items()}
            for reply in arrived:
                self.add(reply, trips_s.get(reply.metadata.reply_to_message_id, 0.0))
            if not arrived:
                break

    def poll(self, grid: Grid) -> None:
        """Poll a real fleet."""
        self.is_real = True
        poll(grid, self.waiting, self._add_now, self.limit_s, self.is_over)

    def _add_now(self, reply: Message, took_s: float) -> None:
        self.exchange.round_trip_s[reply.metadata.reply_to_message_id] = took_s
        self.add(reply, took_s)

    def poll_simulation(self, grid: Grid) -> list[Message]:
        """Poll Flower's simulation for all replies; count those first on the devices' own clock.

        Return all. A round trip there holds the wait for a worker: where devices are not emulated,
        nobody is late beside the others.
        """
        arrived: list[tuple[float, Message]] = []
        waiting, trips_s = dict(self.waiting), self.exchange.round_trip_s

        def keep(reply: Message, took_s: float) -> None:
            trips_s[reply.metadata.reply_to_message_id] = took_s
            waiting.pop(reply.metadata.reply_to_message_id, None)
            arrived.append((device_s(reply), reply))

        poll(grid, waiting, keep, lambda: float(self.exchange.timeout_s), lambda: not waiting)
        arrived.sort(key=lambda pair: pair[0])
        for at_s, reply in arrived:
            emulated = at_s < inf and self.exchange.fleet.clock.emulated
            if self.is_over() or (emulated and at_s > self.late_s()):
                break
            self.add(reply, at_s)
        return [reply for _, reply in arrived]


def late_after_s(times_s: Collection[float], limit: float | None, *, is_real: bool) -> float:
    """Return after how long a node is late beside others that took these times."""
    if limit is None or len(times_s) < LEAST_TIMED:
        return inf
    return max(limit * median_high(times_s), LEAST_S if is_real else 0.0)


def device_s(reply: Message) -> float:
    """Return when a reply came by the device's own clock; infinity if it has none."""
    if not reply.has_content():
        return 0.0
    latency = reported_latency(reply)
    return latency.seconds if latency else inf


def poll(
    grid: Grid,
    waiting: Mapping[str, int],
    add: Callable[[Message, float], None],
    limit_s: Callable[[], float],
    is_over: Callable[[], bool],
) -> None:
    """Poll for replies; ``add`` gets each and its round trip, and takes it out of ``waiting``."""
    start_s, in_time = time.monotonic(), True
    # a node that goes while it sends holds a poll up, for 180 s at most: what others have sent
    # meanwhile is fetched all the same, for the last poll begins after the time-out
    while in_time and not is_over():
        asked_s = time.monotonic()
        in_time = asked_s - start_s < limit_s()
        arrived = list(grid.pull_messages([*waiting]))
        now_s = time.monotonic()
        for reply in arrived:
            add(reply, now_s - start_s)
        if not arrived and in_time:
            rest(asked_s)


def rest(asked_s: float) -> None:
    """Sleep before the next poll, the longer the last one took, which began at ``asked_s``."""
    # Flower polls every 3 s, ten times as long as a message takes on a warm node
    time.sleep(max(POLL_S, (time.monotonic() - asked_s) * (1 / POLL_SHARE - 1)))


def is_enough(good: Collection[object], enough: int | None) -> bool:
    """Return whether so many good replies are here."""
    return enough is not None and len(good) >= enough


def check_late_limit(limit: float | None) -> float | None:
    """Check after how many of the others' times a node is late."""
    if limit is None:
        return None
    return check_number("late_limit", limit, "(1, inf)", "or None: only the time-out counts")
