"""What a client of Flower's older API is sent and answers, and what a strategy sees of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flwr_hetero import keys
from flwr_hetero._flwr import OLDER_OK, is_older_reply, older_content, read_older
from flwr_hetero.errors import invalid
from flwr_hetero.server.aggregate import view_array

CATEGORIES = ("train", "evaluate")


class OlderMessage(NamedTuple):
    """An instruction in the older form, and how the strategy named the model and its arrays."""

    message: Message
    category: str = ""
    arrays_key: str = ""
    names: tuple[str, ...] = ()


class NoReplyError(ValueError):
    """A client of the older API says that it has not done what it was asked."""


def to_older(message: Message) -> OlderMessage:
    """Write an instruction in the form of the older API; records of this package stay beside it."""
    content, category = message.content, message.metadata.message_type.partition(".")[0]
    if category not in CATEGORIES:
        return OlderMessage(message)
    found = list(content.array_records.items())
    if len(found) != 1:
        rule = "send one ArrayRecord, as the older API has one list of arrays"
        raise invalid("the strategy", [name for name, _ in found], rule)
    config: dict[str, Any] = {}
    for name, record in content.config_records.items():
        config |= {} if name.startswith(keys.PREFIX) else record
    for key, value in config.items():
        if isinstance(value, list):
            hint = "give a list as several keys, or as text"
            raise invalid(f"config {key!r}", value, "be one value for clients of Flower", hint)
    ((name, arrays),) = found
    older = older_content(category, arrays, config)
    older.update(_own_records(content))
    # a twin shares the metadata, so that both get the id when it is sent
    twin = Message(older, metadata=message.metadata)  # type: ignore[call-overload]
    return OlderMessage(twin, category, name, tuple(arrays))


def from_older(content: RecordDict, sent: OlderMessage) -> tuple[RecordDict, dict[str, str]]:
    """Read a reply; return it in today's form, and the kinds of metrics that are no numbers."""
    if not is_older_reply(content, sent.category):
        return content, {}
    reply = read_older(content, sent.category)
    if reply.status != OLDER_OK:
        raise NoReplyError(reply.message)
    numbers: dict[str, Any] = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in reply.metrics.items()
        if isinstance(value, int | float)
    }
    others = sorted(reply.metrics.keys() - numbers.keys())
    numbers |= {} if sent.category == "train" else {"loss": float(reply.loss)}
    numbers[keys.NUM_EXAMPLES] = int(reply.num_examples)
    records: dict[str, Any] = {"metrics": MetricRecord(numbers)}
    if sent.category == "train":
        records[sent.arrays_key] = _named(reply.tensors, reply.tensor_type, sent.names)
    kinds = {name: type(reply.metrics[name]).__name__ for name in others}
    return RecordDict(records | _own_records(content)), kinds


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


def _own_records(content: RecordDict) -> dict[str, Any]:
    return {name: record for name, record in content.items() if name.startswith(keys.PREFIX)}
