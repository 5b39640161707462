"""What server and node say to each other while samples move: records of RAW SAMPLES."""

from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from flwr_hetero import keys
from flwr_hetero.core.ledger import Delivery


def write_delivery(delivery: Delivery) -> dict[str, bytes]:
    """Write what a node holds, for a ``flwr-hetero.resharding`` record.

    Parameters
    ----------
    delivery : Delivery
        From the ledger.

    Returns
    -------
    dict of str to bytes
        Entries of the record.

    Examples
    --------
    >>> read_delivery(ConfigRecord(write_delivery(Delivery([3], [1], [3], b"sample"))))
    Delivery(slots=[3], versions=[1], sent=[3], content=b'sample')
    """
    return {
        keys.SLOTS: ints_to_bytes(delivery.slots),
        keys.VERSIONS: ints_to_bytes(delivery.versions),
        keys.SENT: ints_to_bytes(delivery.sent),
        keys.CONTENT: delivery.content,
    }


def read_delivery(record: ConfigRecord) -> Delivery:
    """Read what :func:`write_delivery` wrote.

    Parameters
    ----------
    record : ConfigRecord
        From an instruction.

    Returns
    -------
    Delivery
        What the node holds.

    Raises
    ------
    ValueError
        If an entry is missing or of the wrong type.
    """
    return Delivery(
        ints_in(record, keys.SLOTS),
        ints_in(record, keys.VERSIONS),
        ints_in(record, keys.SENT),
        value_in(record, keys.CONTENT, bytes),
    )


def ints_to_bytes(values: list[int]) -> bytes:
    """Write a list of whole numbers as little-endian int32.

    Parameters
    ----------
    values : list of int
        Each fits into 32 bits.

    Returns
    -------
    bytes
        Four bytes each.
    """
    return np.array(values, dtype="<i4").tobytes()


def ints_in(record: ConfigRecord, key: str) -> list[int]:
    """Read what :func:`ints_to_bytes` wrote.

    Parameters
    ----------
    record : ConfigRecord
        Of an instruction or a reply.
    key : str
        Name of the entry.

    Returns
    -------
    list of int
        The numbers.

    Raises
    ------
    ValueError
        If the entry is missing or no such byte string.
    """
    return [int(value) for value in np.frombuffer(value_in(record, key, bytes), dtype="<i4")]


def value_in(record: ConfigRecord, key: str, kind: type) -> Any:
    """Read an entry of a certain type.

    Parameters
    ----------
    record : ConfigRecord
        Of an instruction or a reply.
    key : str
        Name of the entry.
    kind : type
        What it must be.

    Returns
    -------
    Any
        The value, of type ``kind``.

    Raises
    ------
    ValueError
        If the entry is missing or of another type.

    Examples
    --------
    >>> value_in(ConfigRecord({"plan": 1}), "plan", int)
    1
    """
    value = record.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key} must be {kind.__name__}, got {type(value).__name__}")
    return value
