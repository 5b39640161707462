"""The records that nodes and the order server exchange."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.cd_grab.algorithm import Vectors
from flwr_hetero.errors import invalid

HALF = "<f2"  # type of sketches on the wire
SINGLE = "<f4"  # type of whole gradients
MAX_UNITS = 1 << 20  # longest order of a node
MAX_COUNT = 1 << 53  # largest number in a record: one more still fits on the wire and in a float
MAX_VALUE = 1e15  # largest entry of a vector, so that sums and squares of entries fit a float32


class Terms(NamedTuple):
    """What server and node must agree on for a report to count."""

    server_round: int = 0
    sketch_size: int = 0
    sketch_seed: int = 0
    num_units: int = 0


_TERMS = (keys.SERVER_ROUND, keys.SKETCH_SIZE, keys.SKETCH_SEED, keys.NUM_UNITS)


class Answer(NamedTuple):
    """A node's order and its version; without an order while the server has none for the node."""

    version: int = 0
    order: NDArray[np.int64] | None = None


class Report(NamedTuple):
    """Differences of pairs that a node visited one after the other."""

    version: int
    num_units: int
    first_pair: int
    diffs: Vectors


def write_instruction(terms: Terms, answer: Answer) -> dict[str, int | bytes]:
    """Write which order a node should follow, and under which terms."""
    record: dict[str, int | bytes] = dict(zip(_TERMS, terms, strict=True))
    record[keys.VERSION] = answer.version
    if answer.order is not None:
        record[keys.WHOLE_ORDER] = np.asarray(answer.order, "<i4").tobytes()
    return record


def read_terms(record: Mapping[str, Any]) -> Terms:
    """Read the terms of an instruction or a report."""
    return Terms(*(_count(record, key) for key in _TERMS))


def read_answer(record: Mapping[str, Any], num_units: int) -> Answer:
    """Read the order of an instruction; an empty answer if it is not of ``num_units`` units."""
    order = np.frombuffer(record.get(keys.WHOLE_ORDER, b""), "<i4").astype(np.int64)
    return Answer(record[keys.VERSION], order) if len(order) == num_units else Answer()


def write_report(terms: Terms, report: Report) -> dict[str, int | float | str | bytes]:
    """Write the differences of the pairs that a node visited."""
    data, scale = pack_vectors(report.diffs, HALF if terms.sketch_size else SINGLE)
    terms = terms._replace(sketch_size=report.diffs.shape[1], num_units=report.num_units)
    return {
        keys.VECTORS: data,
        keys.SCALE: scale,
        keys.VERSION: report.version,
        keys.FIRST_PAIR: report.first_pair,
        **dict(zip(_TERMS, terms, strict=True)),
    }


def read_report(record: Mapping[str, Any], terms: Terms) -> Report:
    """Read what a node reports (Alg. 4, l. 5); ValueError with the reason if it is unusable."""
    reported = read_terms(record)
    version = _count(record, keys.VERSION)
    first_pair = _count(record, keys.FIRST_PAIR)
    if reported.server_round != terms.server_round:
        raise invalid(keys.SERVER_ROUND, reported.server_round, f"be {terms.server_round}")
    # Fewer numbers are allowed: a model may have fewer parameters than a sketch has numbers.
    if terms.sketch_size and reported.sketch_size > terms.sketch_size:
        raise invalid(keys.SKETCH_SIZE, reported.sketch_size, f"be at most {terms.sketch_size}")
    if not 1 <= reported.num_units <= MAX_UNITS:
        raise invalid(keys.NUM_UNITS, reported.num_units, f"lie in 1..{MAX_UNITS}")
    diffs = read_vectors(record, reported.sketch_size, HALF if terms.sketch_size else SINGLE)
    if first_pair + len(diffs) > reported.num_units // 2:
        rule = f"leave room for {len(diffs)} pairs of {reported.num_units} units"
        raise invalid(keys.FIRST_PAIR, first_pair, rule)
    return Report(version, reported.num_units, first_pair, diffs)


def read_vectors(record: Mapping[str, Any], dim: int, kind: str = HALF) -> Vectors:
    """Read the vectors of a record: (num_vectors, dim)."""
    data = record.get(keys.VECTORS)
    scale = record.get(keys.SCALE)
    if not isinstance(data, bytes) or not isinstance(scale, float):
        raise invalid(keys.VECTORS, (type(data), type(scale)), "be bytes, with a scale")
    if not data:
        return np.zeros((0, dim), "f4")
    if dim < 1 or len(data) % (dim * np.dtype(kind).itemsize):
        raise invalid(keys.VECTORS, f"{len(data)} bytes", f"be whole rows of {dim} numbers")
    values: Vectors = np.frombuffer(data, kind).reshape(-1, dim).astype("f4")
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scale
        largest = float(np.abs(values).max())
    # A comparison with NaN is false, so NaN is refused.
    if not (scale > 0 and largest <= MAX_VALUE):
        rule = f"be finite and at most {MAX_VALUE:g}"
        raise invalid(keys.VECTORS, largest, rule, "the node's training has diverged")
    return values


def pack_vectors(vectors: Vectors, kind: str = HALF) -> tuple[bytes, float]:
    """Write vectors; half precision gets a common scale so that small gradients survive it."""
    scale = float(np.abs(vectors).max(initial=0.0) or 1.0) if kind == HALF else 1.0
    return (vectors / vectors.dtype.type(scale)).astype(kind).tobytes(), scale


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise invalid(key, value, f"be a whole number in 0..{MAX_COUNT}")
    return value
