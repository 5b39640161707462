"""Flower's records and arrays: read where they lie, checked, measured, and written.

``Array.numpy()`` and ``Array(values)`` copy each array two or three times, which costs the server
of a large model most of its time and memory. ``content.config_records`` checks and copies entries.
"""

import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import sha256
from math import inf, nan
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY
from flwr_hetero.errors import shown

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How names end of arrays that are no parameters, in torch's batch normalisation."""
MAX_NUMBER = 1e18
"""Largest number of a node that is believed: sums, products and squares of it are finite."""


def configs_in(content: RecordDict) -> dict[str, ConfigRecord]:
    """Return the ConfigRecords by name."""
    return {name: each for name, each in content.items() if isinstance(each, ConfigRecord)}


def metrics_in(content: RecordDict) -> dict[str, MetricRecord]:
    """Return the MetricRecords by name."""
    return {name: each for name, each in content.items() if isinstance(each, MetricRecord)}


def arrays_in(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the ArrayRecords by name."""
    return {name: each for name, each in content.items() if isinstance(each, ArrayRecord)}


def config_in(content: RecordDict, name: str) -> ConfigRecord | None:
    """Return the ConfigRecord of a name, if there is one."""
    record = content.get(name)
    return record if isinstance(record, ConfigRecord) else None


def metrics_of(reply: Message) -> MetricRecord:
    """Return the metrics of a good reply."""
    return next(each for each in reply.content.values() if isinstance(each, MetricRecord))


def model_of(message: Message) -> ArrayRecord:
    """Return the arrays of a message that has one model."""
    return next(each for each in message.content.values() if isinstance(each, ArrayRecord))


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
    return sum(math.prod(array.shape) for array in arrays.values())


def own_records(content: RecordDict) -> RecordDict:
    """Copy records, arrays left out: Flower's strategies share one record among all messages."""
    own = content.copy()
    for name, record in content.items():
        if not isinstance(record, ArrayRecord):
            own[name] = record.copy()
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


def named_metrics(reply: Message) -> dict[str, float | None]:
    """Return metrics by name and length, without those of the protocol; None for a list."""
    found = metrics_of(reply).items()
    named = {shape_of(name, v): v for name, v in found if name not in keys.PROTOCOL}
    return {name: None if isinstance(v, list) else v for name, v in named.items()}


def shape_of(name: str, value: float | list[float] | list[int]) -> str:
    """Return the name of a metric, of a list with its length."""
    return f"{name}[{len(value)}]" if isinstance(value, list) else name


def keep_metrics(reply: Message, kept: Set[str]) -> None:
    """Take out all other metrics but those of the protocol."""
    metrics = metrics_of(reply)
    for name, value in list(metrics.items()):
        if shape_of(name, value) not in kept | keys.PROTOCOL:
            del metrics[name]


def names_in(reply: Message) -> str:
    """Return a digest of the names of records and metrics, which Flower wants to be equal."""
    content = reply.content
    found = arrays_in(content), metrics_in(content), named_metrics(reply)
    return _digest(*(tuple(sorted(names)) for names in found))


# Most nodes send the same names.
@lru_cache(maxsize=1024)
def _digest(*names: tuple[str, ...]) -> str:
    return sha256(json.dumps(names).encode()).hexdigest()[:16]


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
                text = f"reports {name!r} as {_short(said)}, counts as {_short(counts)}"
                cut.setdefault(place, text)
    limited = []
    for place, (content, name) in enumerate(pairs):
        copied = content.copy()
        metrics = metrics_in(content)[name]
        copied[name] = MetricRecord(found[place]) if place in cut else metrics.copy()
        limited.append(copied)
    return limited, cut


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
    assigned = max((read_number(c, keys.NUM_STEPS, 1.0) for c in configs.values()), default=1.0)
    return max(1.0, min(assigned, read_number(metrics_of(reply), keys.NUM_STEPS, inf)))


class Latency(NamedTuple):
    """How long a node took for a message; ``source``: emulated, reported or observed."""

    seconds: float
    emulated: bool
    source: str
    parts: Mapping[str, float] | None = None
    """Seconds of the round trip by part; None if they are unknown."""


def reported_latency(reply: Message) -> Latency | None:
    """Read what a reply says of its latency: a timing record, else a metric."""
    record = config_in(reply.content, keys.TIMING)
    if record is not None:
        train_s = read_number(record, keys.TRAIN_TIME)
        transfer_s = read_number(record, keys.TRANSFER_TIME)
        emulated = record.get(keys.EMULATED) is True
    else:
        metrics = [m for m in metrics_in(reply.content).values() if keys.TRAIN_TIME in m]
        train_s = read_number(metrics[0], keys.TRAIN_TIME) if metrics else nan
        transfer_s = 0.0
        emulated = False
    # A comparison with NaN is false.
    if not (train_s >= 0 and transfer_s >= 0):
        return None
    return Latency(train_s + transfer_s, emulated, "emulated" if emulated else "reported")


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
    record: Mapping[str, Any] = config_in(reply.content, keys.TIMING) or {}
    parts = {part: read_number(record, key) for part, key in MEASURED.items() if key in record}
    rest_s = seen_s - sum(parts.values())
    # The time to send is that of an earlier reply, which may have been slower.
    if rest_s < 0 and parts.pop("send", 0.0) > 0:
        rest_s = seen_s - sum(parts.values())
    if "train" not in parts or not all(seconds >= 0 for seconds in parts.values()) or rest_s < 0:
        return None
    work: Mapping[str, Any] = config_in(reply.content, keys.WORK) or {}
    steps_s = read_number(work, keys.STEP_TIME, 0.0) * read_number(work, keys.NUM_STEPS, 0.0)
    steps = {"steps": min(steps_s, parts["train"])} if steps_s > 0 else {}
    return {"wait": rest_s, **parts, **steps}


# --- arrays ----------------------------------------------------------------------------------
BLOCK = 1 << 17
"""Numbers of an array that are computed at a time: intermediate values then stay in the cache."""
Read = Callable[[slice], NDArray[Any]]
"""Returns a part of an array as if this had one dimension; the part must not be changed."""


def view_array(array: Array) -> NDArray[Any]:
    """View an array without copying its payload and without pickle; it must not be changed."""
    if isinstance(array, MovedArray):
        return array.numpy()
    # Other versions are for structured types only.
    if array.data[6:7] != b"\1":
        raise ValueError("not an npy file of version 1")
    start = 10 + int.from_bytes(array.data[8:10], "little")
    shape, fortran, dtype = _parse_header(array.data[:start])
    flat = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return flat.reshape(shape, order="F" if fortran else "C")


# The same few headers come again and again.
@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject:
        raise ValueError("the array holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


def array_of(values: NDArray[Any]) -> Array:
    """Return ``Array(values)``, byte for byte, but with a single copy.

    >>> array_of(np.eye(2)) == Array(np.eye(2))
    True
    """
    return Array(_name_of(values.dtype), values.shape, NUMPY, _npy(values))


# To write the name of a type takes as long as to add up 100,000 numbers.
_name_of = lru_cache(str)


def _npy(values: NDArray[Any]) -> bytes:
    """Return what ``np.save`` writes."""
    header = io.BytesIO()
    entries = np.lib.format.header_data_from_array_1_0(values)
    np.lib.format.write_array_header_1_0(header, entries)
    ordered = values.T if entries["fortran_order"] else values
    return b"".join((header.getvalue(), np.asarray(ordered, order="C").data))


def step_between(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    """Return the difference of two arrays, at least in single precision."""
    dtype = np.result_type(after, before, np.float32)
    return np.asarray(np.subtract(after, before, dtype=dtype))


class MovedArray(Array):
    r"""The array :math:`base + s \, (after - before)`, which is computed each time it is read.

    It needs no memory of its own, so the updates of many nodes can be moved before they are added
    up one after the other.
    """

    def __init__(self, base: Array, before: Array, after: Array, scale: float) -> None:
        # What a node writes beside its array, such as a type, may be wrong.
        own = after if isinstance(after, MovedArray) else view_array(after)
        dtype = _name_of(own.dtype) if np.dtype(own.dtype).kind == "f" else before.dtype
        # Flower's `__init__` and `__setattr__` are about bytes, which this array does not keep.
        vars(self).update(dtype=dtype, shape=tuple(before.shape), stype=NUMPY)
        vars(self).update(base=base, before=before, after=after, scale=scale)

    def numpy(self) -> NDArray[Any]:
        """Compute the array."""
        return self.reader()(slice(None)).reshape(self.shape)

    def reader(self) -> Read:
        """Return a function that computes a part of the array."""
        entries = vars(self)
        base, before, after = (reader_of(entries[name]) for name in ("base", "before", "after"))

        def read(part: slice) -> NDArray[Any]:
            step = step_between(before(part), after(part))
            step *= entries["scale"]
            start = base(part)
            fits = np.result_type(start, step) == step.dtype
            return np.asarray(np.add(start, step, out=step if fits else None), self.dtype)

        return read

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array as ``np.save`` writes it."""
        return _npy(self.numpy())


# --- in blocks -------------------------------------------------------------------------------
def reader_of(array: Array) -> Read:
    """Return a function that returns a part of an array."""
    if isinstance(array, MovedArray):
        return array.reader()
    return view_array(array).reshape(-1).__getitem__


def blocks_of(size: int) -> Iterator[slice]:
    """Divide so many numbers into parts of at most :data:`BLOCK`."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def mixed(old: NDArray[Any], new: NDArray[Any], part: float) -> NDArray[Any]:
    r"""Return :math:`(1 - p) \, old + p \, new`, of arrays of one shape, in the type of ``new``.

    >>> mixed(np.zeros(2), np.array([1.0, 2.0]), part=0.5)
    array([0.5, 1. ])
    """
    mean = np.empty(new.size, new.dtype)
    before = old.reshape(-1)
    after = new.reshape(-1)
    for block in blocks_of(mean.size):
        np.multiply(after[block], part, out=mean[block])
        mean[block] += (1 - part) * before[block]
    return mean.reshape(new.shape)
