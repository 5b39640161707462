"""What a client of Flower's older API is sent and answers, and what a strategy sees of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from flwr_hetero import keys
from flwr_hetero._flwr import OLDER_OK, OlderReply, is_older_reply, older_content, read_older
from flwr_hetero.errors import invalid
from flwr_hetero.server.aggregate import view_array

METRICS, LOSS = "metrics", "loss"


class Asked(NamedTuple):
    """An instruction as the strategy wrote it: "train" or "evaluate", and the arrays' names."""

    category: str
    arrays_key: str
    names: tuple[str, ...]


class NoReplyError(ValueError):
    """A client of the older API says that it has not done what it was asked."""


def asked_in(content: RecordDict, category: str) -> Asked:
    """Note how a strategy names the model in an instruction."""
    found = list(content.array_records.items())
    if len(found) != 1:
        rule = "send one ArrayRecord, as the older API has one list of arrays"
        raise invalid("the strategy", [name for name, _ in found], rule)
    ((name, arrays),) = found
    return Asked(category, name, tuple(arrays))


def to_older(content: RecordDict, asked: Asked) -> RecordDict:
    """Write an instruction in the form of the older API; records of this package stay beside it."""
    config: dict[str, Any] = {}
    for name, record in content.config_records.items():
        if not name.startswith(keys.PREFIX):
            config |= record
    for key, value in config.items():
        if isinstance(value, list):
            hint = "give a list as several keys, or as text"
            raise invalid(f"config {key!r}", value, "be one value for clients of Flower", hint)
    older = older_content(asked.category, content.array_records[asked.arrays_key], config)
    older.update(_own_records(content))
    return older


def from_older(content: RecordDict, asked: Asked) -> tuple[RecordDict, dict[str, str]]:
    """Read a reply; return it in today's form, and the kinds of metrics that are no numbers."""
    if not is_older_reply(content, asked.category):
        return content, {}
    reply = read_older(content, asked.category)
    if reply.status != OLDER_OK:
        raise NoReplyError(reply.message)
    records: dict[str, Any] = {}
    if asked.category == "train":
        records[asked.arrays_key] = _named(reply.tensors, reply.tensor_type, asked.names)
    numbers, others = _split(reply.metrics)
    records[METRICS] = MetricRecord(numbers | _reported(reply, asked.category))
    return RecordDict(records | _own_records(content)), others


def _reported(reply: OlderReply, category: str) -> dict[str, Any]:
    loss = {} if category == "train" else {LOSS: float(reply.loss)}
    return loss | {keys.NUM_EXAMPLES: int(reply.num_examples)}


def _named(tensors: Sequence[bytes], stype: str, names: tuple[str, ...]) -> ArrayRecord:
    """Give a list of arrays the names of the model; none is unpacked."""
    if len(tensors) != len(names):
        raise NoReplyError(f"fit() returned {len(tensors)} arrays, the model has {len(names)}")
    return ArrayRecord(dict(zip(names, (_array(data, stype) for data in tensors), strict=True)))


def _array(data: bytes, stype: str) -> Array:
    """Describe an array by what its own header says; a bad one is left to the check of replies."""
    bare = Array("", (), stype, data)
    try:
        values = view_array(bare)
    except Exception:  # the parser of a header raises what it likes
        return bare
    return Array(str(values.dtype), values.shape, stype, data)


def _split(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Part metrics into numbers, yes as 1, and the types of all others by name."""
    numbers = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
    others = sorted(metrics.keys() - numbers.keys())
    return numbers, {name: type(metrics[name]).__name__ for name in others}


def _own_records(content: RecordDict) -> dict[str, Any]:
    return {name: record for name, record in content.items() if name.startswith(keys.PREFIX)}
