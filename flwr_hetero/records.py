"""Reading and measuring Flower's records."""

from collections.abc import Mapping
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_hetero import keys

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How names end of arrays that are no parameters, in torch's batch normalisation."""
MAX_NUMBER = 1e18
"""Largest number of a node that is believed: sums, products and squares of it are finite."""


def configs_in(content: RecordDict) -> dict[str, ConfigRecord]:
    """Return the ConfigRecords by name; ``content.config_records`` checks and copies each entry."""
    return {name: each for name, each in content.items() if isinstance(each, ConfigRecord)}


def metrics_in(content: RecordDict) -> dict[str, MetricRecord]:
    """Return the MetricRecords by name."""
    return {name: each for name, each in content.items() if isinstance(each, MetricRecord)}


def arrays_in(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the ArrayRecords by name."""
    return {name: each for name, each in content.items() if isinstance(each, ArrayRecord)}


def payload_bytes(content: RecordDict) -> int:
    """Size of a message's payload, in bytes."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
            continue
        for value in record.values():
            for item in value if isinstance(value, list) else (value,):
                total += len(item) if isinstance(item, (bytes, str)) else 8
    return total


def own_records(content: RecordDict) -> RecordDict:
    """Copy records, arrays left out: Flower's strategies share one record among all messages."""
    own = RecordDict()
    for name, record in content.items():
        own[name] = record if isinstance(record, ArrayRecord) else record.copy()
    return own


def config_of(message: Message) -> ConfigRecord:
    """Return the first ConfigRecord of an instruction; one is made where there is none."""
    for record in configs_in(message.content).values():
        return record
    message.content["config"] = made = ConfigRecord()
    return made


def read_number(record: Mapping[str, Any], key: str, default: float = nan) -> float:
    """Return a finite number from a record of a node, cut to 1e18; ``default`` if it is none."""
    value = record.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -inf < value < inf:
        return float(max(-MAX_NUMBER, min(value, MAX_NUMBER)))
    return default


class Latency(NamedTuple):
    """How long a node took for a message; ``source``: emulated, reported or observed."""

    seconds: float
    emulated: bool
    source: str
    parts: Mapping[str, float] | None = None
    """Seconds of the round trip by part; None if they are unknown."""


def reported_latency(reply: Message) -> Latency | None:
    """Read what a reply says of its latency: a timing record, else a metric."""
    record = configs_in(reply.content).get(keys.TIMING)
    if record is not None:
        parts = [read_number(record, key) for key in (keys.TRAIN_TIME, keys.TRANSFER_TIME)]
    else:
        metrics = [m for m in metrics_in(reply.content).values() if keys.TRAIN_TIME in m]
        parts = [read_number(metrics[0], keys.TRAIN_TIME)] if metrics else [nan]
    if not (all(seconds >= 0 for seconds in parts) and isfinite(sum(parts))):
        return None
    emulated = record is not None and record.get(keys.EMULATED) is True
    return Latency(sum(parts), emulated, "emulated" if emulated else "reported")


MEASURED = {
    "start": keys.START_TIME,
    "receive": keys.RECEIVE_TIME,
    "train": keys.TRAIN_TIME,
    "send": keys.SEND_TIME,
}
"""Parts of a round trip that nodes measure, and their names on the wire."""


def divide(reply: Message, seen_s: float) -> dict[str, float] | None:
    """Divide a round trip into what the node says of it and "wait", the rest; None if it cannot be.

    A node that says less than it could has more of "wait". "steps" is what those took of "train".
    """
    record = configs_in(reply.content).get(keys.TIMING, ConfigRecord())
    parts = {part: read_number(record, key) for part, key in MEASURED.items() if key in record}
    rest_s = seen_s - sum(parts.values())
    # that of an earlier reply, which may have been slower
    if rest_s < 0 and parts.pop("send", 0.0) > 0:
        rest_s = seen_s - sum(parts.values())
    if "train" not in parts or not all(seconds >= 0 for seconds in parts.values()) or rest_s < 0:
        return None
    work = configs_in(reply.content).get(keys.WORK, ConfigRecord())
    steps_s = read_number(work, keys.STEP_TIME, 0.0) * read_number(work, keys.NUM_STEPS, 0.0)
    steps = {"steps": min(steps_s, parts["train"])} if steps_s > 0 else {}
    return {"wait": rest_s, **parts, **steps}
