"""What goes over the wire, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero import keys
from flwr_hetero.cd_grab.node_order import ServedOrder
from flwr_hetero.cd_grab.wire import (
    Answer,
    Report,
    Terms,
    pack_vectors,
    read_answer,
    read_report,
    unpack_order,
    unpack_signs,
    unpack_vectors,
    usual_length,
    write_instruction,
    write_report,
)

TERMS = Terms(server_round=4, sketch_size=6, sketch_seed=2, num_units=8)
DIFFS = np.random.default_rng(0).standard_normal((2, 6))


def report_record(**changes):
    record = write_report(TERMS, Report(1, 8, 1, DIFFS.astype(np.float32))) | changes
    return {key: value for key, value in record.items() if value is not None}


# --- bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "accuracy"), [("float16", 1e-3), ("float32", 1e-7)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_vectors_survive_the_wire(dtype, accuracy, scale):
    vectors = (np.random.default_rng(0).standard_normal((5, 7)) * scale).astype(np.float32)
    back = unpack_vectors(*pack_vectors(vectors, dtype), dim=7, dtype=dtype)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, vectors, atol=accuracy * np.abs(vectors).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whole_vectors_are_exact(dtype):
    back = unpack_vectors(*pack_vectors(DIFFS.astype(dtype), dtype), dim=6, dtype=dtype)
    assert back.dtype == dtype
    assert np.array_equal(back, DIFFS.astype(dtype))


@given(st.lists(st.sampled_from([-1, 1]), min_size=1, max_size=40))
def test_signs_survive_the_wire(signs):
    record = write_instruction(TERMS, Answer(1, signs=np.array(signs, np.int8)))
    assert len(record[keys.SIGNS]) == -(-len(signs) // 8)
    assert unpack_signs(record[keys.SIGNS], len(signs)).tolist() == signs


@given(st.integers(1, 40), st.randoms())
def test_orders_survive_the_wire(num_units, random):
    order = random.sample(range(num_units), num_units)
    record = write_instruction(TERMS, Answer(1, order=np.array(order)))
    assert unpack_order(record[keys.WHOLE_ORDER], num_units).tolist() == order


@pytest.mark.parametrize(
    ("lengths", "known", "usual"),
    [([], 5, 5), ([3], 0, 3), ([3], 5, 5), ([3, 3], 5, 3), ([3, 3, 5, 5], 5, 5)],
)
def test_usual_length_is_a_vote(lengths, known, usual):
    assert usual_length(lengths, known) == usual


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unpack_vectors(bytes(6), 1.0, dim=2), "whole rows of 2 float16, got '6 bytes'"),
        (lambda: unpack_vectors(bytes(8), 1.0, dim=0), "whole rows of 0"),
        (lambda: unpack_vectors(bytes(8), np.nan, dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(bytes(8), -1.0, dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(b"\xff\x7f\0\0", 1.0, dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(b"\0\x3c", 1.01e15, dim=1), "at most 1e.15"),
        (lambda: unpack_vectors(bytes(8) + b"\0\x3c", 1e39, dim=1), "at most 1e.15"),
        (lambda: unpack_signs(b"\0", 9), "signs must be 2 bytes for 9 pairs"),
        (lambda: unpack_order(bytes(8), 3), "order must be 12 bytes for 3 units"),
        (lambda: unpack_order(bytes(8), 2), "order must be a permutation"),
    ],
)
def test_bad_bytes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- records -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(),
        Answer(3, signs=np.array([1, -1, -1, 1], np.int8)),
        Answer(4, order=np.arange(8)[::-1], first_pair=3),
    ],
)
def test_answers_survive_the_wire(answer):
    back = read_answer(write_instruction(TERMS, answer), 8)
    assert (back.version, back.first_pair) == (answer.version, answer.first_pair)
    for ours, theirs in ((answer.signs, back.signs), (answer.order, back.order)):
        assert (ours is None and theirs is None) or np.array_equal(ours, theirs)
    if answer.order is not None or answer.signs is not None:
        assert read_answer(write_instruction(TERMS, answer), 30) == Answer()


def test_reports_survive_the_wire():
    report = read_report(report_record(), TERMS)
    assert report[:3] == (1, 8, 1)
    np.testing.assert_allclose(report.diffs, DIFFS, atol=2e-3)
    nothing = write_report(TERMS, ServedOrder(8).report())
    assert len(read_report(nothing, TERMS).diffs) == 0
    exact = Terms(num_units=8)
    record = write_report(exact, Report(0, 8, 0, DIFFS))
    assert np.array_equal(read_report(record, exact).diffs, DIFFS)


BAD_REPORTS = [
    ({keys.SERVER_ROUND: 3}, "server-round must be 4, got 3"),
    ({keys.SKETCH_SEED: 9}, "sketch-seed must be 2, got 9"),
    ({keys.SKETCH_SIZE: 7}, "sketch-size must be at most 6, got 7"),
    ({keys.SKETCH_SIZE: 5}, "whole rows of 5 float16, got '24 bytes'"),
    ({keys.SKETCH_SIZE: 0}, "whole rows of 0"),
    ({keys.NUM_UNITS: 1 << 40}, "num-units must lie in"),
    ({keys.NUM_UNITS: 0}, "num-units must lie in"),
    ({keys.NUM_UNITS: 5}, "first-pair must leave room for 2 pairs of 5 units, got 1"),
    ({keys.FIRST_PAIR: 3}, "first-pair must leave room for 2 pairs of 8 units, got 3"),
    ({keys.FIRST_PAIR: -1}, "first-pair must be a whole number"),
    ({keys.VERSION: "1"}, "version must be a whole number"),
    ({keys.VERSION: True}, "version must be a whole number"),
    ({keys.VERSION: None}, "version must be a whole number"),
    ({keys.VERSION: 2**64 - 1}, "version must be a whole number"),
    ({keys.VECTORS: None}, "vectors must be bytes"),
    ({keys.VECTORS: "text"}, "vectors must be bytes"),
    ({keys.VECTORS: bytes(11)}, "whole rows"),
    ({keys.VECTORS: b"\xff\x7f" * 12}, "vectors must be finite"),
    ({keys.SCALE: float("inf")}, "vectors must be finite"),
    ({keys.SCALE: 0.0}, "vectors must be finite"),
    ({keys.SCALE: None}, "vectors must be bytes, with a scale"),
    ({keys.DTYPE: "object"}, "dtype must be one of"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_REPORTS)
def test_bad_reports_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        read_report(report_record(**changes), TERMS)


def test_largest_counts_are_accepted():
    record = report_record(**{keys.VERSION: 1 << 53, keys.FIRST_PAIR: 2})
    assert read_report(record, TERMS)[:3] == (1 << 53, 8, 2)
