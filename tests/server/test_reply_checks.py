import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.server.aggregate import view_array
from flwr_hetero.server.checks import Expected, judge_latency, why_bad


def reply_with(arrays=None, metrics=None):
    be_server_task(1, 1, 1)
    message = Message(RecordDict(), 7, "train")
    set_message_id(message, "1")
    content = RecordDict()
    if arrays is not None:
        content["arrays"] = ArrayRecord({k: Array(v) for k, v in arrays.items()})
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    return Message(content, reply_to=message)


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        ("float32", np.full((2, 3), 9e14, np.float32), None),  # as much as may be
        ("float32", np.full((2, 3), -1e38, np.float32), "holds values above 1e+15"),
        ("float32", np.full((2, 3), 2e15, np.float64), "holds values above 1e+15"),
        ("float32", np.full((2, 3), 1e300, np.float64), "holds values above 1e+15"),
        ("int64", np.full((2, 3), 1e30), "holds values above 1e+15"),
        ("float16", np.full((2, 3), -70000), "holds figures too large for float16"),
        ("int32", np.full((2, 3), 1e12), "holds figures too large for int32"),
        ("float32", np.full((2, 3), np.inf, np.float16), "NaN or infinity"),
        ("float32", np.full((2, 3), -np.inf, np.float32), "NaN or infinity"),
        ("float32", np.zeros((3, 2), np.float32), "shape"),
        ("float32", np.array([["a"] * 3] * 2), "cannot be averaged"),
        *((m, np.eye(2, 3, dtype=k), None) for m in ("f2", "f4", "f8", "i8", "?") for k in "fdl?"),
    ],
)
def test_arrays_are_checked(model, values, reason):
    sent = ArrayRecord({"w": Array(np.zeros((2, 3), model))})
    found = why_bad(reply_with({"w": values}, {"num-examples": 1}), Expected(sent, "num-examples"))
    assert found is None if reason is None else reason in found


def test_empty_arrays_are_good():
    empty = np.zeros((0, 2), np.float16)
    expected = Expected(ArrayRecord({"w": Array(empty)}), metrics=False)
    assert why_bad(reply_with({"w": empty.astype(float)}), expected) is None


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2]])
def test_weights_are_checked(weight):
    reply = reply_with(metrics={"num-examples": weight})
    assert "num-examples" in why_bad(reply, Expected(weight_key="num-examples"))


def test_nothing_is_unpickled():
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        view_array(Array("object", (1,), "numpy.ndarray", stream.getvalue()))


def test_view_array_is_the_array():
    for values in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)), np.array(4)):
        assert np.array_equal(view_array(Array(values)), values)


def npy(header: str, values: bytes = bytes(16)) -> Array:
    """Write an npy file with any header."""
    file = io.BytesIO()
    file.write(np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header.encode())
    return Array("float32", (4,), "numpy.ndarray", file.getvalue() + values)


def whole(**changes: str) -> str:
    entries = {"descr": "'<f4'", "fortran_order": "False", "shape": "(4,)"} | changes
    return "{" + ", ".join(f"'{key}': {value}" for key, value in entries.items()) + "}\n"


HEADERS = {
    "unclosed bracket": "{'descr': '<f4', 'shape': (4,",
    "unclosed quote": whole() + "'''",
    "nested too deeply": "(" * 3000,
    "long minus": "-" * 9000 + "1",
    "negative length": whole(shape="(-4,)"),
    "unhashable key": "{[]: 1}",
    "negative among others": whole(shape="(-2, -2)"),
    "more than there is": whole(shape="(5,)"),
}


@pytest.mark.parametrize("header", sorted(HEADERS))
def test_broken_header_is_a_bad_reply(header):
    reply = reply_with()
    reply.content["arrays"] = ArrayRecord({"w": npy(HEADERS[header])})
    sent = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    assert "array 'w' cannot be read (" in why_bad(reply, Expected(sent, metrics=False))


JUNK = [-1.0, float("nan"), float("inf"), 1e308, "3", b"3", [3.0], True, 2**64 - 1]


def timed(train_s, emulated):
    reply = reply_with(metrics={"num-examples": 1})
    record = {keys.TRAIN_TIME: train_s, keys.TRANSFER_TIME: 0.5, keys.EMULATED: emulated}
    reply.content[keys.TIMING] = ConfigRecord(record)
    return reply


@pytest.mark.parametrize(
    ("train_s", "emulated", "round_trip_s", "simulated", "seconds", "source"),
    [
        (3.0, True, 0.1, True, 3.5, "emulated"),
        (3.0, False, 9.0, False, 3.5, "reported"),
        (30.0, False, 9.0, False, 9.0, "observed"),  # more than the server saw
        (3.0, True, 9.0, False, 9.0, "observed"),  # emulation claimed by a real node
        *((bad, False, 9.0, False, 9.0, "observed") for bad in JUNK),
        (float("nan"), False, None, False, None, None),
        (3.0, 1, 9.0, False, 3.5, "reported"),  # not True
    ],
)
def test_latency_is_judged(train_s, emulated, round_trip_s, simulated, seconds, source):
    latency, _ = judge_latency(timed(train_s, emulated), round_trip_s, simulated=simulated)
    assert (latency and latency.seconds, latency and latency.source) == (seconds, source)
