"""Send instructions, wait for replies, and know when each one came."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero.core.clock import round_time_s
from flwr_hetero.strategy.grid_view import is_simulated
from flwr_hetero.strategy.latency import reported_latency

POLL_S = 0.1
"""Pause between two looks for replies, in seconds."""


class Exchange(NamedTuple):
    """What came back.

    Parameters
    ----------
    replies : list of Message
        In order of arrival.
    round_trip_s : dict of str to float
        Message id of the instruction to seconds until its reply was there, on the server's
        clock; empty on a virtual grid, where the reports are the truth.
    missing : list of Message
        Instructions without an answer.
    virtual_s, wall_s : float
        How long it took by the fleet's clock and by ours; the same for real devices.
    """

    replies: list[Message]
    round_trip_s: dict[str, float]
    missing: list[Message]
    virtual_s: float
    wall_s: float


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    timeout_s: float,
    enough: int | None = None,
    *,
    emulated: bool = False,
) -> Exchange:
    """Send instructions and collect the replies until all are there or time is up.

    Parameters
    ----------
    grid : Grid
        Flower's grid, or an emulated one with a ``virtual_time_s``.
    messages : sequence of Message
        At most one per node: a node does one job at a time.
    timeout_s : float
        Seconds to wait, on the fleet's clock.
    enough : int, optional
        Do not wait for more replies than this; errors do not count. None: wait for all.
    emulated : bool
        Whether simulated nodes are known to emulate devices, from replies before: their clock
        counts then, also if this time all of them are away or err.

    Returns
    -------
    Exchange
        Replies and times.
    """
    start_s = time.monotonic()
    if not messages:
        return Exchange([], {}, [], 0.0, 0.0)
    virtual_start_s = getattr(grid, "virtual_time_s", None)
    if virtual_start_s is not None:
        ids = grid.push_messages(messages)
        replies = getattr(grid, "wait_for")(ids, timeout_s, enough)  # noqa: B009
        round_trip_s: dict[str, float] = {}
    elif is_simulated(grid):  # whoever is fast there is fast on the devices' clock, not on ours
        replies, round_trip_s = _wait(grid, messages, timeout_s, None)
        replies = _first(replies, enough)
    else:
        replies, round_trip_s = _wait(grid, messages, timeout_s, enough)
    answered = {reply.metadata.reply_to_message_id for reply in replies}
    missing = [m for m in messages if m.metadata.message_id not in answered]
    wall_s = time.monotonic() - start_s
    if virtual_start_s is not None:
        # to the nanosecond, so that a resumed run, whose clock began later, counts the same
        virtual_s = round(float(getattr(grid, "virtual_time_s")) - virtual_start_s, 9)  # noqa: B009
    elif not is_simulated(grid):
        virtual_s = wall_s
    else:
        late = 0 if _is_enough(replies, enough) else len(missing)
        latencies = _emulated_latencies(replies)
        virtual_s = _virtual_s(latencies, late, timeout_s) if latencies or emulated else wall_s
    return Exchange(replies, round_trip_s, missing, virtual_s, wall_s)


def _wait(
    grid: Grid, messages: Sequence[Message], timeout_s: float, enough: int | None
) -> tuple[list[Message], dict[str, float]]:
    start_s = time.monotonic()
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    replies: list[Message] = []
    round_trip_s: dict[str, float] = {}
    while waiting and time.monotonic() - start_s < timeout_s and not _is_enough(replies, enough):
        arrived = list(grid.pull_messages(waiting))
        for reply in arrived:
            round_trip_s[reply.metadata.reply_to_message_id] = time.monotonic() - start_s
        replies += arrived
        waiting -= round_trip_s.keys()
        if waiting and not arrived:
            time.sleep(POLL_S)
    return replies, round_trip_s


def _is_enough(replies: Sequence[Message], enough: int | None) -> bool:
    return enough is not None and sum(reply.has_content() for reply in replies) >= enough


def _first(replies: list[Message], enough: int | None) -> list[Message]:
    """Keep errors and the first ``enough`` replies on the devices' own clock."""
    if enough is None:
        return replies
    timed = [(reported_latency(r), r) for r in replies if r.has_content()]
    timed.sort(key=lambda pair: pair[0].seconds if pair[0] else float("inf"))
    first = {id(reply) for _, reply in timed[:enough]}
    return [reply for reply in replies if reply.has_error() or id(reply) in first]


def _emulated_latencies(replies: Sequence[Message]) -> list[float]:
    return [
        latency.seconds
        for reply in replies
        if reply.has_content() and (latency := reported_latency(reply)) and latency.emulated
    ]


def _virtual_s(latencies: list[float], missing: int, timeout_s: float) -> float:
    """Length of the exchange on the devices' own clock; an error takes no time, as in LocalGrid."""
    late = sum(latency > timeout_s for latency in latencies)
    in_time = [latency for latency in latencies if latency <= timeout_s]
    return round_time_s(in_time, num_missing=missing + late, timeout_s=timeout_s)
