"""What goes over the wire, and what is refused."""

import numpy as np
import pytest

from flwr_hetero import keys
from flwr_hetero.cd_grab.node_order import ServedOrder
from flwr_hetero.cd_grab.wire import (
    Answer,
    Report,
    Terms,
    read_answer,
    read_report,
    write_instruction,
    write_report,
)

TERMS = Terms(server_round=4, sketch_size=6, sketch_seed=2, num_units=8)
DIFFS = np.random.default_rng(0).standard_normal((2, 6))


def report_record(**changes):
    record = write_report(TERMS, Report(1, 8, 1, DIFFS.astype(np.float32))) | changes
    return {key: value for key, value in record.items() if value is not None}


@pytest.mark.parametrize(("sketch_size", "accuracy"), [(6, 1e-3), (0, 0.0)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_vectors_survive_the_wire(sketch_size, accuracy, scale):
    terms = TERMS._replace(sketch_size=sketch_size)
    diffs = (DIFFS * scale).astype(np.float32)
    report = read_report(write_report(terms, Report(1, 8, 1, diffs)), terms)
    assert report[:3] == (1, 8, 1)
    np.testing.assert_allclose(report.diffs, diffs, rtol=0, atol=accuracy * np.abs(diffs).max())


@pytest.mark.parametrize("num_units", [2, 8, 17, 33])
def test_answers_survive_the_wire(num_units):
    order = np.random.default_rng(num_units).permutation(num_units)
    back = read_answer(write_instruction(TERMS, Answer(4, order)), num_units)
    assert (back.version, back.order.tolist()) == (4, order.tolist())


@pytest.mark.parametrize("change", [{}, {keys.WHOLE_ORDER: np.arange(7, dtype="<i4").tobytes()}])
def test_unfit_answers_are_no_answers(change):
    assert read_answer(write_instruction(TERMS, Answer(3)) | change, 8) == Answer()


BAD_REPORTS = [
    ({keys.SERVER_ROUND: 3}, "server-round must be 4, got 3"),
    ({keys.SKETCH_SIZE: 7}, "sketch-size must be at most 6, got 7"),
    ({keys.SKETCH_SIZE: 5}, "whole rows of 5 numbers, got '24 bytes'"),
    ({keys.NUM_UNITS: 1 << 40}, "num-units must lie in"),
    ({keys.NUM_UNITS: 0}, "num-units must lie in"),
    ({keys.NUM_UNITS: 5}, "first-pair must leave room for 2 pairs of 5 units, got 1"),
    ({keys.FIRST_PAIR: 3}, "first-pair must leave room for 2 pairs of 8 units, got 3"),
    ({keys.VERSION: "1"}, "version must be a whole number"),
    ({keys.VERSION: None}, "version must be a whole number"),
    ({keys.VERSION: 2**64 - 1}, "version must be a whole number"),
    ({keys.VECTORS: "text"}, "vectors must be bytes"),
    ({keys.VECTORS: bytes(11)}, "whole rows"),
    ({keys.VECTORS: b"\xff\x7f" * 12}, "vectors must be finite"),
    ({keys.SCALE: float("inf")}, "vectors must be finite"),
    ({keys.SCALE: -1.0}, "vectors must be finite"),
    ({keys.SCALE: 1e39, keys.VECTORS: bytes(22) + b"\0\x3c"}, "at most 1e.15"),
    ({keys.SCALE: 1.01e15, keys.VECTORS: b"\0\x3c" * 12}, "at most 1e.15"),
    ({keys.SCALE: None}, "vectors must be bytes, with a scale"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_REPORTS)
def test_bad_reports_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        read_report(report_record(**changes), TERMS)


def test_limits_are_accepted():
    record = report_record(**{keys.VERSION: 1 << 53, keys.FIRST_PAIR: 2})
    assert read_report(record, TERMS)[:3] == (1 << 53, 8, 2)
    nothing = write_report(TERMS, ServedOrder(8).report())
    assert len(read_report(nothing, TERMS).diffs) == 0
