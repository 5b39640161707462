"""Times of a ClientApp by the node's clock, and the node's pace (Mercury, section 4.3)."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable, is_message_process, set_entries
from flwr_hetero.client import warn_once
from flwr_hetero.client.device import FORWARD_SHARE
from flwr_hetero.client.samplers import save_state
from flwr_hetero.client.session import CURRENT, TORCH_WATCH, Session
from flwr_hetero.compression.wire import unpacking
from flwr_hetero.records import configs_in, read_number


def timing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report how long the ClientApp worked on a message, by the monotonic clock.

    Its ConfigRecord is ignored by Flower's strategies.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[timing])
    """
    # The times and the pace of an emulated node come from its profile.
    if context.node_config.get(keys.EMULATED) is True:
        return call_app(message, context, call_next)
    start_s = time.monotonic()
    reply = call_app(message, context, call_next)
    end_s = time.monotonic()
    # A node is idle from its reply to a training message until the next instruction.
    pace = pace_record(context)
    replied_s = pace.pop(keys.REPLIED_AT, None)
    if isinstance(replied_s, float) and start_s > replied_s:
        note_pace(context, start_s - replied_s, nan)
    if message.metadata.message_type == MessageType.TRAIN:
        pace[keys.REPLIED_AT] = end_s
    if reply.has_content():
        record = timing_record(context, end_s - start_s, 0.0, emulated=False)
        record.update(times_beside(start_s) if is_message_process() else {})
        if in_simulation():
            # Flower and Ray need time to collect the last reply and to hand the message over. The
            # worker may also have been idle because there was no message.
            created_s = start_s - max(0.0, time.time() - message.metadata.created_at)
            ended_s = _last_end_s.get("worker", start_s)
            record[keys.WORKER] = f"{platform.node()}-{os.getpid()}"
            record[keys.HANDOVER_TIME] = max(0.0, start_s - max(ended_s, created_s))
        reply.content[keys.TIMING] = record
    _last_end_s["worker"] = end_s
    return reply


def in_simulation() -> bool:
    """Return whether this process is a worker of Flower's simulation engine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


_last_end_s: dict[str, float] = {}
"""When this worker returned its last reply, by the monotonic clock."""


def call_app(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Call the ClientApp, save what continues, and add records of its steps and samplers."""
    trains = message.metadata.message_type == MessageType.TRAIN
    session = Session(message, context, trains=trains)
    token = CURRENT.set(session)
    try:
        with TORCH_WATCH.on():
            reply: Any = unpacking(call_next)(message, context)
        # Without a reply a SuperNode would wait for ever.
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
        records = _finish(session, trained=trains)
    except StopIteration as error:
        steps = session.work.steps
        if not steps:
            raise
        raise RuntimeError(
            f"StopIteration: hetero.batches gives {steps} batches here, as the server asks for. "
            "A loop by steps takes `for _ in range(hetero.num_steps(msg, default=N))`"
        ) from error
    finally:
        CURRENT.reset(token)
    # Records that the app itself has added take precedence.
    for name, record in records.items():
        if reply.has_content() and name not in reply.content:
            reply.content[name] = ConfigRecord(dict(record))
    return reply


def _finish(session: Session, *, trained: bool) -> dict[str, Mapping[str, Any]]:
    """Check and save what a ClientApp's function used; return the records for the reply."""
    # First discard batches drawn but not trained, so that they are neither saved nor reported.
    for sampler in session.iterated:
        sampler.settle()
        reason = sampler.why_not_trained()
        if trained and reason:
            raise RuntimeError(reason)
    records: dict[str, Mapping[str, Any]] = {}
    for sampler in session.followers:
        records |= sampler.reply_records()
    if trained:
        records |= session.work.finish()
        session.carried.save(session.work.steps, session.work.job_steps)
    for name, (kept, context) in session.kept.items():
        save_state(context, name, kept.state_dict())
    if trained and not session.has_saved:
        for sampler in session.iterated:
            if sampler.learns:
                hint = (
                    "loader = hetero.batches(loader, msg), or keep(loader.batch_sampler, context)"
                )
                loss = "is not kept: what it learns is lost after each round"
                warn_once(f"{type(sampler).__name__} {loss}; add: {hint}")
    return records


def timing_record(
    context: Context, train_s: float, transfer_s: float, *, emulated: bool
) -> ConfigRecord:
    """Make the record that a timing mod adds to a reply."""
    entries: dict[str, Any] = {
        keys.TRAIN_TIME: train_s,
        keys.TRANSFER_TIME: transfer_s,
        keys.EMULATED: emulated,
    }
    if keys.PARTITION_ID in context.node_config:
        entries[keys.PARTITION_ID] = int(context.node_config[keys.PARTITION_ID])
    record = ConfigRecord()
    set_entries(record, entries)
    return record


def times_beside(called_s: float) -> dict[str, float]:
    """Return the times that this process and its SuperNode spent beside the app.

    ``called_s``: when the app was called. A process that starts while the message is on its way
    starts, in this count, when the message arrived.
    """
    try:
        reported = json.loads(Path(os.environ[keys.TIMES_FILE]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        reported = None
    if not isinstance(reported, dict):
        # The SuperNode has not measured its times.
        reported = {}
    times = {key: read_number(reported, key, -1.0) for key in (keys.RECEIVE_TIME, keys.SEND_TIME)}
    began_s = process_start_s()
    if began_s is not None:
        began_s = max(began_s, read_number(reported, keys.RECEIVED_AT, began_s))
        times[keys.START_TIME] = max(0.0, called_s - began_s)
    return {key: seconds for key, seconds in times.items() if seconds >= 0}


def process_start_s() -> float | None:
    """Return when this process started, by the monotonic clock; None if the system hides it."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        # The name, in brackets, may hold anything. Field 22 counts from the system's start.
        fields = stat.rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    except (AttributeError, IndexError, OSError, ValueError):
        return None
    return time.monotonic() - age_s


class NodePace(NamedTuple):
    """Idle time of a node per round, and its time to score one example; smoothed."""

    idle_s: float
    score_s: float


def read_pace(context: Context) -> NodePace | None:
    """Read a node's pace from its state; None before the first observation."""
    record: Any = configs_in(context.state).get(keys.PACE, {})
    if keys.IDLE_TIME not in record:
        return None
    example_s = read_number(record, keys.EXAMPLE_TIME, 0.0)
    return NodePace(read_number(record, keys.IDLE_TIME, 0.0), FORWARD_SHARE * example_s)


def pace_record(context: Context) -> Any:
    """Return the record of a node's pace in its state; one is made where there is none."""
    record = configs_in(context.state).get(keys.PACE)
    if record is None:
        context.state[keys.PACE] = record = ConfigRecord()
    return record


def note_pace(context: Context, idle_s: float, example_s: float) -> None:
    """Update a node's pace by one round; NaN is no observation."""
    record = pace_record(context)
    is_first = keys.IDLE_TIME not in record
    for key, new in ((keys.IDLE_TIME, idle_s), (keys.EXAMPLE_TIME, example_s)):
        mean = old = read_number(record, key, 0.0)
        if isfinite(new) and new >= 0.0:
            # A moving average that follows a change within a few rounds.
            mean = new if is_first else 0.5 * old + 0.5 * new
        set_entries(record, {key: mean})
