"""Reading and measuring Flower's records."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from hashlib import sha256
from math import inf, isfinite, nan, prod
from statistics import median
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_hetero import keys
from flwr_hetero.errors import shown

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


def num_parameters(arrays: ArrayRecord) -> int:
    """Return how many numbers a model holds."""
    return sum(prod(array.shape) for array in arrays.values())


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


# --- metrics of nodes ------------------------------------------------------------------------
MOST_NAMES = MOST_VALUES = 20_000
"""Characters of all names of a reply's metrics together, and numbers in them."""
LONGEST_NAME = 200
"""Characters of one of them."""
FARTHEST = 10.0
"""How far a value may be from the median: in medians, or in median distances from it."""


def check_metrics(content: RecordDict) -> None:
    """Check that metrics can be shown; ValueError says why not."""
    for record in metrics_in(content).values():
        if not (names := "".join(record)).isprintable():
            raise ValueError("names of its metrics cannot be printed")
        if len(names) > MOST_NAMES or max(map(len, record), default=0) > LONGEST_NAME:
            most = f"{LONGEST_NAME}, or {MOST_NAMES} together"
            raise ValueError(f"names of its metrics have more characters than {most}")
        if sum(len(v) if isinstance(v, list) else 1 for v in record.values()) > MOST_VALUES:
            raise ValueError(f"its metrics hold more than {MOST_VALUES} numbers")


def named_metrics(content: RecordDict) -> dict[str, float | None]:
    """Return metrics by name and length, without those of the protocol; None for a list."""
    return {
        shape_of(name, value): None if isinstance(value, list) else value
        for record in metrics_in(content).values()
        for name, value in record.items()
        if name not in keys.PROTOCOL
    }


def shape_of(name: str, value: float | list[float] | list[int]) -> str:
    """Return the name of a metric, of a list with its length."""
    return f"{name}[{len(value)}]" if isinstance(value, list) else name


def keep_metrics(contents: Iterable[RecordDict], kept: Set[str]) -> None:
    """Take out all other metrics but those of the protocol."""
    for record in (record for content in contents for record in metrics_in(content).values()):
        for name, value in list(record.items()):
            if shape_of(name, value) not in kept | keys.PROTOCOL:
                del record[name]


def names_in(content: RecordDict) -> str:
    """Return a digest of the names of records and metrics, which Flower wants to be equal."""
    found = sorted(arrays_in(content)), sorted(metrics_in(content)), sorted(named_metrics(content))
    return sha256(json.dumps(found).encode()).hexdigest()[:16]


def honest_range(name: str, values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the least, usual and largest value that counts of a metric; None if none is finite.

    A median has as many values below as above: less than half of the nodes cannot move it far.

    >>> honest_range("eval-acc", [0.5, 0.625, 0.75, 7.0])
    (0.0, 0.6875, 1.0)
    >>> honest_range("train-loss", [2.0, 2.5, 3.0, 1e308])
    (-24.75, 2.75, 30.25)
    """
    known = [float(max(-MAX_NUMBER, min(v, MAX_NUMBER))) for v in values if -inf < v < inf]
    if not known:
        return None
    usual = median(known)
    if "acc" in name.lower() and 0 <= usual <= 1:
        return 0.0, usual, 1.0
    far = FARTHEST * max(median(abs(v - usual) for v in known), abs(usual))
    return min(0.0, usual - far), usual, max(1.0, usual + far)


def limit_metrics(
    contents: Sequence[RecordDict],
    skipped: Collection[str],
    reported: dict[str, list[float]],
    others: Sequence[Mapping[str, float | None]] = (),
) -> tuple[list[RecordDict], dict[int, str]]:
    """Return copies whose metrics are within what most report, and by place what was not.

    They are compared with what was reported before, to which they are added, and with ``others``.
    """
    places = [next(iter(metrics_in(content))) for content in contents]
    pairs = list(zip(contents, places, strict=True))
    found: list[dict[str, Any]] = [dict(content[place]) for content, place in pairs]
    cut: dict[int, str] = {}
    for name in [n for n in found[0] if n not in skipped and all(n in own for own in found)]:
        values: list[Any] = [own[name] for own in found]
        if any(isinstance(value, list) for value in values):
            columns = [_limited(name, column) for column in zip(*values, strict=True)]
            counted: list[Any] = [list(row) for row in zip(*columns, strict=True)]
        else:
            before = reported.setdefault(name, [])
            known = [value for own in others if (value := own.get(name)) is not None]
            counted = _limited(name, values, [*before, *known])
            before += [value for value in counted if -inf < value < inf]
        for place, (said, counts) in enumerate(zip(values, counted, strict=True)):
            if said is not counts and said != counts:
                found[place][name] = counts
                cut.setdefault(
                    place, f"reports {name!r} as {_short(said)}, counts as {_short(counts)}"
                )
    both = zip(pairs, found, strict=True)
    return [RecordDict({**content, p: MetricRecord(own)}) for (content, p), own in both], cut


def _limited(name: str, values: Sequence[Any], before: Sequence[float] = ()) -> list[Any]:
    """Cut values to what most report, and take the usual one for one that is not finite."""
    if (limits := honest_range(name, [*before, *values])) is None:
        return list(values)
    low, usual, high = limits
    known = [value if -inf < value < inf else usual for value in values]
    return [value if low <= value <= high else min(max(value, low), high) for value in known]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else shown(value)[:40]


def steps_that_count(instruction: Message, reply: Message) -> float:
    """Return the steps that a node was assigned, or fewer if it says so; 1 if it chose them."""
    configs = configs_in(instruction.content)
    metrics = metrics_in(reply.content)
    assigned = max((read_number(c, keys.NUM_STEPS, 1.0) for c in configs.values()), default=1.0)
    reported = min((read_number(m, keys.NUM_STEPS, inf) for m in metrics.values()), default=inf)
    return max(1.0, min(assigned, reported))


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
    # The time to send is that of an earlier reply, which may have been slower.
    if rest_s < 0 and parts.pop("send", 0.0) > 0:
        rest_s = seen_s - sum(parts.values())
    if "train" not in parts or not all(seconds >= 0 for seconds in parts.values()) or rest_s < 0:
        return None
    work = configs_in(reply.content).get(keys.WORK, ConfigRecord())
    steps_s = read_number(work, keys.STEP_TIME, 0.0) * read_number(work, keys.NUM_STEPS, 0.0)
    steps = {"steps": min(steps_s, parts["train"])} if steps_s > 0 else {}
    return {"wait": rest_s, **parts, **steps}
