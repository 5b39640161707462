import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.reply_checks import Expected, judge_latency, view_array, why_bad
from flwr_hetero.strategy import CDGraB


def reply_with(arrays=None, metrics=None):
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()])
    message = Message(RecordDict(), next(iter(grid.get_node_ids())), "train")
    content = RecordDict()
    if arrays is not None:
        content["arrays"] = ArrayRecord({k: Array(v) for k, v in arrays.items()})
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    return Message(content, reply_to=message)


SENT = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32))})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((2, 3), np.float64), None),
        (np.zeros((2, 3), np.int64), None),
        (np.full((2, 3), 9e14, np.float32), None),  # as much as may be
        (np.full((2, 3), -1e38, np.float32), "holds values above 1e+15"),
        (np.full((2, 3), 2e15, np.float64), "holds values above 1e+15"),
        (np.full((2, 3), np.inf, np.float16), "NaN or infinity"),
        (np.full((2, 3), -np.inf, np.float32), "NaN or infinity"),
        (np.zeros((3, 2), np.float32), "shape"),
        (np.array([["a"] * 3] * 2), "cannot be averaged"),
    ],
)
def test_arrays_are_checked(values, reason):
    found = why_bad(reply_with({"w": values}, {"num-examples": 1}), Expected(SENT, "num-examples"))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2]])
def test_weights_are_checked(weight):
    reply = reply_with({"w": np.zeros((2, 3))}, {"num-examples": weight})
    assert "num-examples" in why_bad(reply, Expected(SENT, "num-examples"))


def test_nothing_is_unpickled():
    array = Array(np.zeros(2))
    evil = Array("object", (1,), array.stype, _object_payload())
    with pytest.raises(ValueError, match="Python objects"):
        view_array(evil)


def _object_payload():
    import io

    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    return stream.getvalue()


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
}


def answer_of_node_0(array: Array):
    """Make a fleet of three whose node 0 sends this array and whose others send ones."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        first = context.node_config["partition-id"] == 0
        new = ArrayRecord({"w": array if first else Array(np.ones(4, np.float32))})
        metrics = MetricRecord({"num-examples": 100})
        return Message(RecordDict({"arrays": new, "metrics": metrics}), reply_to=message)

    return LocalGrid(app, [DeviceProfile()] * 3)


@pytest.mark.parametrize("inner", [FedAvg, FedMedian])
@pytest.mark.parametrize("header", sorted(HEADERS))
def test_broken_header_costs_that_reply_only(header, inner):
    strategy = CDGraB(inner(fraction_evaluate=0.0))
    grid = answer_of_node_0(npy(HEADERS[header]))
    result = strategy.start(grid, toy_arrays(buffer=False), 1)
    assert [failure.node for failure in strategy.session.info.failures] == ["id-1000"]
    assert result.arrays["w"].numpy().tolist() == [1.0] * 4


def check(sent: np.ndarray, came: np.ndarray) -> str | None:
    content = RecordDict({"arrays": ArrayRecord({"w": Array(came)})})
    question = Message(RecordDict(), 7, "train")
    question.metadata.__dict__["_message_id"] = "1"
    expected = Expected(ArrayRecord({"w": Array(sent)}), metrics=False)
    return why_bad(Message(content, reply_to=question), expected)


@pytest.mark.parametrize(
    ("model", "figures", "what"),
    [
        ("float32", np.array([1e300, 0.0]), "values above 1e+15"),
        ("float32", np.array([-1e39, 0.0]), "values above 1e+15"),
        ("float16", np.array([0, -70000]), "figures too large for float16"),
        ("int32", np.array([1e12, 0.0]), "figures too large for int32"),
        ("int64", np.array([1e30, 0.0]), "values above 1e+15"),
    ],
)
def test_too_large_figures_are_refused(model, figures, what):
    assert check(np.zeros(2, model), figures) == f"array 'w' holds {what}"


@pytest.mark.parametrize("model", ["float16", "float32", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "bool"])
def test_other_types_of_usual_size_pass(model, kind):
    assert check(np.zeros(2, model), np.array([0, 1], kind)) is None
    assert check(np.zeros((0, 2), model), np.zeros((0, 2), kind)) is None


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
        (-1.0, False, 9.0, False, 9.0, "observed"),
        (float("nan"), False, None, False, None, None),
    ],
)
def test_latency_is_judged(train_s, emulated, round_trip_s, simulated, seconds, source):
    latency, _ = judge_latency(timed(train_s, emulated), round_trip_s, simulated=simulated)
    assert (latency and latency.seconds, latency and latency.source) == (seconds, source)
