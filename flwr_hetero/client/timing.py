"""Measured time of a ClientApp, and what a node knows of its own round (Mercury, section 4.3)."""

import json
import os
import platform
import sys
import time
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable, is_message_process
from flwr_hetero.client.carried import Carried, watching
from flwr_hetero.client.device import FORWARD_SHARE
from flwr_hetero.client.handler import CURRENT, Handler
from flwr_hetero.client.samplers import finish
from flwr_hetero.compression.node import unpacking
from flwr_hetero.records import configs_in, read_number


def timing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report how long the ClientApp worked on a message, by the monotonic clock.

    Its ConfigRecord is ignored by Flower's strategies.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[timing])
    """
    start_s = time.monotonic()
    reply = call_app(message, context, call_next)
    end_s = time.monotonic()
    # of an emulated node the profile gives the pace
    if context.node_config.get(keys.EMULATED) is not True:
        _observe_round(context, message, start_s, end_s)
    if reply.has_content():
        record = timing_record(context, end_s - start_s, 0.0, emulated=False)
        record.update(times_beside(start_s) if is_message_process() else {})
        if in_simulation():
            record.update(worker_times(message, start_s))
        reply.content[keys.TIMING] = record
    _last_end_s["worker"] = end_s
    return reply


def in_simulation() -> bool:
    """Return whether this process is a worker of Flower's simulation engine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def worker_times(message: Message, called_s: float) -> dict[str, str | float]:
    """Name the worker of a simulation, and tell how long the message kept it from working.

    Flower and Ray need that time: to collect the last reply, and to hand the message over.
    """
    # A worker may also be idle because no message was there.
    created_s = called_s - max(0.0, time.time() - message.metadata.created_at)
    ended_s = _last_end_s.get("worker", called_s)
    handover_s = max(0.0, called_s - max(ended_s, created_s))
    return {keys.WORKER: f"{platform.node()}-{os.getpid()}", keys.HANDOVER_TIME: handover_s}


_last_end_s: dict[str, float] = {}
"""When this worker returned its last reply, by the monotonic clock."""


def call_app(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Call the ClientApp; then keep what is to be kept, and add what its steps and samplers say."""
    trained = message.metadata.message_type == MessageType.TRAIN
    handler = Handler(message, context, carried=Carried(message, context, trains=trained))
    token = CURRENT.set(handler)
    try:
        with watching():
            reply: Any = unpacking(call_next)(message, context)
        # without a reply a SuperNode waits for ever
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
        found = finish(handler, trained=trained)
    except StopIteration as error:
        raise too_few_batches(error, handler) from error
    finally:
        CURRENT.reset(token)
    # what the app reports by itself counts
    for name, record in found.items():
        if reply.has_content() and name not in reply.content:
            reply.content[name] = ConfigRecord(dict(record))
    return reply


def too_few_batches(error: StopIteration, handler: Handler) -> Exception:
    """Return the error of a loop by steps for which there were too few batches, else this one."""
    if handler.work is None or not handler.work.steps:
        return error
    return RuntimeError(
        f"StopIteration: hetero.batches gives {handler.work.steps} batches here, as the server "
        "asks for. A loop by steps takes `for _ in range(hetero.num_steps(msg, default=N))`"
    )


def timing_record(
    context: Context, train_s: float, transfer_s: float, *, emulated: bool
) -> ConfigRecord:
    """Make the record that a timing mod adds to a reply."""
    record = ConfigRecord(
        {keys.TRAIN_TIME: train_s, keys.TRANSFER_TIME: transfer_s, keys.EMULATED: emulated}
    )
    if keys.PARTITION_ID in context.node_config:
        record[keys.PARTITION_ID] = int(context.node_config[keys.PARTITION_ID])
    return record


# --- what a message takes beside the ClientApp --------------------------------------------------
def times_beside(called_s: float) -> dict[str, float]:
    """Return what this process and its SuperNode know of it; ``called_s``: when the app was called.

    A process that starts while the message is on its way counts from when it was there.
    """
    reported = reported_times()
    times = {key: read_number(reported, key, -1.0) for key in (keys.RECEIVE_TIME, keys.SEND_TIME)}
    began_s = process_start_s()
    if began_s is not None:
        began_s = max(began_s, read_number(reported, keys.RECEIVED_AT, began_s))
        times[keys.START_TIME] = max(0.0, called_s - began_s)
    return {key: seconds for key, seconds in times.items() if seconds >= 0}


def reported_times() -> dict[str, Any]:
    """Read what the SuperNode tells of its own times; nothing if it does not."""
    try:
        reported = json.loads(Path(os.environ[keys.TIMES_FILE]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return {}
    return reported if isinstance(reported, dict) else {}


def process_start_s() -> float | None:
    """Return when this process started, by the monotonic clock; None if the system does not say."""
    try:
        # the name, in brackets, may hold anything; the 22nd field counts from the system's start
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    except (AttributeError, IndexError, OSError, ValueError):
        return None
    return time.monotonic() - age_s


# --- what a node knows of its own round ---------------------------------------------------------
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


def note_pace(context: Context, idle_s: float, example_s: float) -> None:
    """Update a node's pace by one round; NaN where nothing was observed."""
    record = context.state.config_records.setdefault(keys.PACE, ConfigRecord())
    known = keys.IDLE_TIME in record
    for key, new in ((keys.IDLE_TIME, idle_s), (keys.EXAMPLE_TIME, example_s)):
        old = read_number(record, key, 0.0)
        # a moving average that follows a change within a few rounds; bad values are skipped
        average = 0.5 * old + 0.5 * new if known else new
        record[key] = average if isfinite(new) and new >= 0.0 else old


def _observe_round(context: Context, message: Message, start_s: float, end_s: float) -> None:
    """Measure idle time: from a training reply to the next instruction."""
    record = context.state.config_records.setdefault(keys.PACE, ConfigRecord())
    replied_s = record.pop(keys.REPLIED_AT, None)
    if isinstance(replied_s, float) and start_s > replied_s:
        note_pace(context, start_s - replied_s, nan)
    if message.metadata.message_type == MessageType.TRAIN:
        record[keys.REPLIED_AT] = end_s
