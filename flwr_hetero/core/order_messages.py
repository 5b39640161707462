"""What nodes and order server write into their records, and what they accept from there."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero import keys
from flwr_hetero.core.order_book import Answer, Report
from flwr_hetero.core.order_wire import (
    pack_order,
    pack_signs,
    pack_vectors,
    unpack_order,
    unpack_signs,
    unpack_vectors,
)
from flwr_hetero.core.served_walk import Seen

MAX_UNITS = 1 << 20
"""Longest order that a node may have."""
MAX_COUNT = 1 << 53
"""Largest number in a record: one more must still fit on the wire, and into a float."""


class Terms(NamedTuple):
    """What server and node must agree on for a report to count.

    Parameters
    ----------
    server_round : int
        Round of the instruction.
    sketch_size : int
        Numbers per vector; 0 for whole gradients.
    sketch_seed : int
        Seed of the sketch.
    num_units : int
        Units in every node's order; 0: each node's own choice.
    """

    server_round: int = 0
    sketch_size: int = 0
    sketch_seed: int = 0
    num_units: int = 0


def write_instruction(terms: Terms, answer: Answer) -> dict[str, int | bytes]:
    r"""Write what the server wants of a node.

    Parameters
    ----------
    terms : Terms
        The same for all nodes.
    answer : Answer
        The node's own.

    Returns
    -------
    dict
        For a ConfigRecord.

    Examples
    --------
    >>> answer = Answer(3, signs=np.array([1, -1], np.int8))
    >>> record = write_instruction(Terms(server_round=7), answer)
    >>> record["version"], record["signs"], read_terms(record).server_round
    (3, b'\x80', 7)
    """
    record: dict[str, int | bytes] = {
        keys.SERVER_ROUND: terms.server_round,
        keys.SKETCH_SIZE: terms.sketch_size,
        keys.SKETCH_SEED: terms.sketch_seed,
        keys.NUM_UNITS: terms.num_units,
        keys.VERSION: answer.version,
    }
    if answer.order is not None:
        record[keys.WHOLE_ORDER] = pack_order(answer.order)
        record[keys.FIRST_PAIR] = answer.first_pair
    elif answer.signs is not None:
        record[keys.SIGNS] = pack_signs(answer.signs)
    return record


def read_terms(record: Mapping[str, Any]) -> Terms:
    """Read the terms of an instruction or a report.

    Parameters
    ----------
    record : mapping
        From :func:`write_instruction` or :func:`write_report`.

    Returns
    -------
    Terms
        As they are there.

    Raises
    ------
    ValueError
        If one is missing or no whole number from 0 to 2**53.
    """
    return Terms(*(_count(record, key) for key in _TERMS))


def read_answer(record: Mapping[str, Any], num_units: int) -> Answer:
    """Read what the server wants of this node.

    Parameters
    ----------
    record : mapping
        From :func:`write_instruction`.
    num_units : int
        Units of the node.

    Returns
    -------
    Answer
        Without an order or signs if those there are for another number of units: the node's
        next report tells the server.

    Examples
    --------
    >>> answer = Answer(3, signs=np.array([1, -1], np.int8))
    >>> read_answer(write_instruction(Terms(), answer), num_units=4).signs
    array([ 1, -1], dtype=int8)
    """
    version = _count(record, keys.VERSION)
    try:
        if keys.WHOLE_ORDER in record:
            first = min(_count(record, keys.FIRST_PAIR), num_units // 2)
            order = unpack_order(record[keys.WHOLE_ORDER], num_units)
            return Answer(version, order=order, first_pair=first)
        if keys.SIGNS in record:
            return Answer(version, signs=unpack_signs(record[keys.SIGNS], num_units // 2))
    except ValueError:
        return Answer()
    return Answer(version)


def write_report(terms: Terms, num_units: int, seen: Seen) -> dict[str, int | float | str | bytes]:
    """Write what a node saw.

    Parameters
    ----------
    terms : Terms
        Of the instruction.
    num_units : int
        Units of the node.
    seen : Seen
        Its pairs; sketches go in half precision, whole gradients as they are.

    Returns
    -------
    dict
        For a ConfigRecord.

    Examples
    --------
    >>> seen = Seen(version=0, first_pair=0, diffs=np.array([[0.5, -2.0]], np.float32))
    >>> record = write_report(Terms(sketch_size=2), 2, seen)
    >>> record["dtype"], record["num-units"]
    ('float16', 2)
    """
    dtype = "float16" if terms.sketch_size else str(seen.diffs.dtype)
    packed = pack_vectors(seen.diffs, dtype)
    return {
        keys.SERVER_ROUND: terms.server_round,
        keys.SKETCH_SIZE: seen.diffs.shape[1],
        keys.SKETCH_SEED: terms.sketch_seed,
        keys.NUM_UNITS: num_units,
        keys.VERSION: seen.version,
        keys.FIRST_PAIR: seen.first_pair,
        keys.DTYPE: dtype,
        keys.VECTORS: packed.data,
        keys.SCALE: packed.scale,
    }


def read_report(record: Mapping[str, Any], node: str, terms: Terms) -> Report:
    """Check and read what a node saw.

    Parameters
    ----------
    record : mapping
        From :func:`write_report`, or whatever the node made of it.
    node : str
        Its identity.
    terms : Terms
        Of the instruction.

    Returns
    -------
    Report
        Not weighted yet.

    Raises
    ------
    ValueError
        With the reason why it cannot count.

    Examples
    --------
    >>> seen = Seen(version=0, first_pair=0, diffs=np.array([[0.5, -2.0]], np.float32))
    >>> read_report(write_report(Terms(), 2, seen), "node-3", Terms()).diffs
    array([[ 0.5, -2. ]], dtype=float32)
    """
    said = read_terms(record)
    version, first = _count(record, keys.VERSION), _count(record, keys.FIRST_PAIR)
    num_units, dim = said.num_units, said.sketch_size
    for name, is_, must in (
        ("round", said.server_round, terms.server_round),
        ("sketch seed", said.sketch_seed, terms.sketch_seed),
    ):
        if is_ != must:
            raise ValueError(f"its order record is of {name} {is_} instead of {must}")
    if not 1 <= num_units <= MAX_UNITS:
        raise ValueError(f"its order has {num_units} units")
    if terms.sketch_size and dim > terms.sketch_size:
        raise ValueError(f"its sketches have {dim} numbers instead of {terms.sketch_size}")
    data, scale, dtype = (record.get(key) for key in (keys.VECTORS, keys.SCALE, keys.DTYPE))
    if not (isinstance(data, bytes) and isinstance(scale, float) and isinstance(dtype, str)):
        raise ValueError("its order record lacks vectors, their scale or their type")
    diffs = unpack_vectors(data, scale, dim=dim, dtype=dtype) if data else np.zeros((0, dim), "f4")
    if first + len(diffs) > num_units // 2:
        raise ValueError(f"pairs {first}..{first + len(diffs) - 1} of {num_units} units")
    return Report(node, version, num_units, first, diffs)


_TERMS = (keys.SERVER_ROUND, keys.SKETCH_SIZE, keys.SKETCH_SEED, keys.NUM_UNITS)


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"its order record has {key} {value!r} instead of a whole number")
    return value
