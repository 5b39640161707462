"""The study of liars: what they send, when, and what its table says of it."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flwr_hetero._flwr import be_server_task
from flwr_hetero_studies.faults import liars
from flwr_hetero_studies.faults.digits import digits_app


def changed(lie, end=3.0):
    """Return what a liar sends for an update from 1 to ``end``, and its metrics."""
    be_server_task(1, 1, 1)
    app, _ = digits_app(0)
    grid = liars.LiarsGrid(app, liars.profiles_for(liars.LIES[lie], 1), seed=0)
    grid.liars = 1
    grid.lie = liars.LIES[lie]
    message = Message(RecordDict({"arrays": ArrayRecord([np.ones(2, "f4")])}), 1000, "train")
    record = {"arrays": ArrayRecord([np.full(2, end, "f4")]), "metrics": MetricRecord()}
    reply = Message(RecordDict(record), reply_to=message)
    grid.change(message, reply)
    (array,) = reply.content["arrays"].values()
    assert isinstance(array, Array)
    return array.numpy().tolist(), dict(reply.content["metrics"])


def test_what_liars_send():
    assert changed("turned") == ([-1.0, -1.0], {})
    assert changed("turned, x 20") == ([-39.0, -39.0], {})
    other, metrics = changed("another model, 2**53 examples")
    assert changed("another model, 2**53 examples", end=9.0)[0] == other
    assert metrics == {"num-examples": 2**53}


@pytest.mark.parametrize(
    ("name", "least", "most"), [("FedAvg", 1.5, 99), ("FedAvg, wrapped", 0, 1)]
)
def test_how_far_a_model_moves(name, least, most):
    found = liars.run(name, "turned, x 20", 1, 3, 0)["metrics"]
    assert least < found["displacement"] < most
    assert (found["share"] is None) == (name == "FedAvg")
    assert liars.run(name, "honest", 0, 3, 0)["metrics"]["displacement"] == 0
