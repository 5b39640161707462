"""One figure per node and round: latency in seconds, and where it comes from."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero.server.nodes import is_simulated


class Latency(NamedTuple):
    """How long a node took for a message."""

    seconds: float
    emulated: bool
    source: str


def reported_latency(reply: Message) -> Latency | None:
    """Read what a reply says of its latency."""
    record = reply.content.config_records.get(keys.TIMING)
    if record is not None:
        seconds = _seconds(record.get(keys.TRAIN_TIME)) + _seconds(record.get(keys.TRANSFER_TIME))
        emulated = record.get(keys.EMULATED) is True
        return _latency(seconds, emulated)
    for metrics in reply.content.metric_records.values():
        if keys.TRAIN_TIME in metrics:
            return _latency(_seconds(metrics[keys.TRAIN_TIME]), emulated=False)
    return None


def reported_partition(reply: Message) -> int | None:
    """Read the partition that a reply says it comes from."""
    record = reply.content.config_records.get(keys.TIMING)
    value = None if record is None else record.get(keys.PARTITION_ID)
    return value if isinstance(value, int) and value >= 0 else None


def judge_latency(
    reply: Message, round_trip_s: float | None, *, simulated: bool
) -> tuple[Latency | None, str | None]:
    """Decide what a node's latency was.

    A report above the round trip that the server saw is wrong, and only a simulated node may
    say that its time is emulated; then, and where there is no report, the round trip counts.
    """
    reported = reported_latency(reply)
    observed = None if round_trip_s is None else Latency(round_trip_s, False, "observed")
    if reported is None:
        return observed, None
    if reported.emulated:
        if simulated:
            return reported, None
        return observed, "claims an emulated device outside a simulation"
    if round_trip_s is not None and reported.seconds > round_trip_s:
        complaint = f"claims {reported.seconds:.3g} s, its reply was here in {round_trip_s:.3g} s"
        return observed, complaint
    return reported, None


def _seconds(value: object) -> float:
    if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
        return float(value)
    return math.nan


def _latency(seconds: float, emulated: bool) -> Latency | None:
    if math.isnan(seconds):
        return None
    return Latency(seconds, emulated, "emulated" if emulated else "reported")


def round_time_s(
    latencies_s: Iterable[float], *, num_missing: int = 0, timeout_s: float | None = None
) -> float:
    r"""Length of a synchronous round: the slowest answer, or the time-out (TiFL, Eq. 1).

    .. math:: L_r = \max_{i \in C} L_i
    """
    slowest = max(latencies_s, default=0.0)
    if num_missing and timeout_s is not None:
        return max(slowest, timeout_s)
    return slowest


POLL_S = 0.1
"""Pause between two looks for replies, in seconds."""


class Exchange(NamedTuple):
    """What came back."""

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
    """Send instructions and collect the replies until all are there or time is up."""
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
