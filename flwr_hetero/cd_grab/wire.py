"""Signs, orders and vectors as bytes, for the records that nodes and order server exchange."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import Signs, checked_order
from flwr_hetero.cd_grab.node_order import Seen
from flwr_hetero.cd_grab.order_server import Answer, Report
from flwr_hetero.errors import invalid

DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
"""Types of vectors on the wire."""


class Packed(NamedTuple):
    """Vectors on the wire."""

    data: bytes
    scale: float


def pack_vectors(vectors: ArrayLike, dtype: str = "float16") -> Packed:
    """Write vectors; half precision gets a common scale so that small gradients survive it."""
    values = np.asarray(vectors)
    largest = float(np.abs(values).max(initial=0.0)) if dtype == "float16" else 1.0
    scale = largest or 1.0
    return Packed((values / values.dtype.type(scale)).astype(DTYPES[dtype]).tobytes(), scale)


def unpack_vectors(
    data: bytes, scale: float, *, dim: int, dtype: str = "float16"
) -> NDArray[np.floating]:
    """Read vectors that a node sent."""
    if dtype not in DTYPES:
        raise invalid("dtype", dtype, f"be one of {list(DTYPES)}", "use pack_vectors")
    row = dim * np.dtype(DTYPES[dtype]).itemsize
    if dim < 1 or len(data) % row:
        rule = f"be whole rows of {dim} {dtype}, got {len(data)} bytes"
        raise ValueError(f"vectors must {rule}: the sketch sizes of server and node differ.")
    raw = np.frombuffer(data, DTYPES[dtype]).reshape(-1, dim)
    values: NDArray[np.floating] = raw.astype("f8" if dtype == "float64" else "f4")
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scale
    if not (scale > 0 and np.isfinite(values).all()):
        raise ValueError("vectors must be finite: the node's training has diverged.")
    return values


def pack_signs(signs: ArrayLike) -> bytes:
    """Write signs as bits."""
    return np.packbits(np.asarray(signs) > 0).tobytes()


def unpack_signs(data: bytes, num_pairs: int) -> Signs:
    """Read signs."""
    if len(data) != -(-num_pairs // 8):
        rule = f"be {-(-num_pairs // 8)} bytes for {num_pairs} pairs"
        raise invalid("signs", f"{len(data)} bytes", rule, "number the units alike")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=num_pairs)
    return 2 * bits.view(np.int8) - 1


def pack_order(order: ArrayLike) -> bytes:
    """Write a whole order."""
    return np.asarray(order, "<i4").tobytes()


def unpack_order(data: bytes, num_units: int) -> NDArray[np.int64]:
    """Read a whole order."""
    if len(data) != 4 * num_units:
        rule = f"be {4 * num_units} bytes for {num_units} units"
        raise invalid("order", f"{len(data)} bytes", rule, "number the units alike")
    return checked_order(np.frombuffer(data, "<i4"))


MAX_UNITS = 1 << 20
"""Longest order that a node may have."""


MAX_COUNT = 1 << 53
"""Largest number in a record: one more must still fit on the wire, and into a float."""


class Terms(NamedTuple):
    """What server and node must agree on for a report to count."""

    server_round: int = 0
    sketch_size: int = 0
    sketch_seed: int = 0
    num_units: int = 0


def write_instruction(terms: Terms, answer: Answer) -> dict[str, int | bytes]:
    r"""Write what the server wants of a node."""
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
    """Read the terms of an instruction or a report."""
    return Terms(*(_count(record, key) for key in _TERMS))


def read_answer(record: Mapping[str, Any], num_units: int) -> Answer:
    """Read what the server wants of this node."""
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
    """Write what a node saw."""
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
    """Check and read what a node saw."""
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
