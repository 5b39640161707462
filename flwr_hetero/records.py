"""Reading and measuring Flower's records."""

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

MAX_NUMBER = 1e18
"""Largest number of a node that is believed: sums, products and squares of it are finite."""


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
        kind: Any = type(record)
        own[name] = record if kind is ArrayRecord else kind(dict(record.items()))
    return own


def config_of(message: Message) -> ConfigRecord:
    """Return the first ConfigRecord of an instruction; one is made where there is none."""
    for record in message.content.config_records.values():
        return record
    message.content["config"] = ConfigRecord()
    return message.content.config_records["config"]


def read_number(record: Mapping[str, Any], key: str, default: float = nan) -> float:
    """Return a finite number from a record of a node, cut to 1e18; ``default`` if it is none."""
    value = record.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
        return max(-MAX_NUMBER, min(float(value), MAX_NUMBER))
    return default
