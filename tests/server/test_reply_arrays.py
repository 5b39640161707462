"""Arrays of a reply that cannot be read, or cannot be averaged: they cost that reply only."""

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian
from toy import toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.reply_checks import Expected, why_bad
from flwr_hetero.strategy import CDGraB


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
def test_a_broken_header_costs_that_reply_only(header, inner):
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
def test_figures_too_large_for_the_model_are_refused(model, figures, what):
    assert check(np.zeros(2, model), figures) == f"array 'w' holds {what}"


@pytest.mark.parametrize("model", ["float16", "float32", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("kind", ["float64", "float32", "int64", "bool"])
def test_other_types_of_usual_size_pass(model, kind):
    assert check(np.zeros(2, model), np.array([0, 1], kind)) is None
    assert check(np.zeros((0, 2), model), np.zeros((0, 2), kind)) is None
