import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.tasks import (
    Settings,
    evaluate_node,
    hold_out,
    initial_arrays,
    load_partition,
    open_node,
    profile_node,
    train_node,
)
from flwr_hetero_studies.tasks import node as client

RUN_CONFIG = {"model": "softmax", "partition": "iid", "policy": "an app's own key", "seed": 3}
SETTINGS = Settings.shared_part(RUN_CONFIG)
START = {name: array.numpy() for name, array in initial_arrays(SETTINGS).items()}


def grid(num_nodes=4, **run_config):
    app = ClientApp()
    app.train()(train_node)
    app.train("profile")(profile_node)
    app.evaluate()(evaluate_node)
    return LocalGrid(app, [DeviceProfile()] * num_nodes, run_config=RUN_CONFIG | run_config)


def ask(grid, kind="train", server_round=1, **config):
    arrays = initial_arrays(SETTINGS)
    record = ConfigRecord({"server-round": server_round} | config)
    content = RecordDict({"arrays": arrays, "config": record})
    node = next(iter(grid.get_node_ids()))
    [reply] = grid.send_and_receive([Message(content, node, kind)])
    assert not reply.has_error(), reply.error.reason
    return reply


def moved(reply):
    """Return how far each array is from the start."""
    return [np.abs(reply.content["arrays"][name].numpy() - w).sum() for name, w in START.items()]


def test_training_takes_the_steps_and_reports_them():
    reply = ask(grid())
    metrics = dict(reply.content["metrics"])  # 1438 digits over 4 nodes, a tenth held out
    assert metrics.pop("loss-rms") > metrics.pop("train-loss") > 0
    counts = {"num-examples": 324, "num-steps": 21, "examples-processed": 324}
    assert metrics == counts | {"examples-scored": 0}
    assert all(moved(reply))
    metrics = ask(grid(), **{keys.NUM_STEPS: 22}).content["metrics"]
    assert (metrics["num-steps"], metrics["examples-processed"]) == (22, 324 + 16)
    assert ask(grid(**{"local-epochs": 3})).content["metrics"]["num-steps"] == 63


@pytest.mark.parametrize("emulated", [True, False])
def test_profiling_counts_or_trains_for_time_only(monkeypatch, emulated):
    trained = ask(grid()).content["metrics"]
    calls = []
    real = client.train
    monkeypatch.setattr(client, "is_emulated", lambda context: emulated)
    monkeypatch.setattr(client, "train", lambda *a, **k: calls.append(1) or real(*a, **k))
    fleet = grid()
    reply = ask(fleet, keys.PROFILE_MESSAGE)
    same_keys = (keys.NUM_EXAMPLES, keys.NUM_STEPS, keys.EXAMPLES_PROCESSED)
    assert dict(reply.content["metrics"]) == {key: trained[key] for key in same_keys}
    assert calls == ([] if emulated else [1])
    assert fleet.virtual_time_s == pytest.approx(3.24)
    assert not any(moved(reply))


def node(server_round=1, partition_id=0, repeat=0, **run_config):
    config = ConfigRecord({"server-round": server_round} | ({"repeat": repeat} if repeat else {}))
    content = RecordDict({"arrays": initial_arrays(SETTINGS), "config": config})
    where = {"partition-id": partition_id, "num-partitions": 4}
    context = Context(1, 1, where, RecordDict(), RUN_CONFIG | run_config)
    return open_node(Message(content, 1, "train"), context)


def test_node_has_its_partition():
    how = {"partition": "classes", "classes_per_node": 4, "seed": 8}
    expected = hold_out(load_partition("digits", 2, 4, **how))
    here = node(partition_id=2, **{key.replace("_", "-"): value for key, value in how.items()})
    assert torch.equal(here.examples.inputs, expected[0].inputs)
    assert torch.equal(here.held_out.targets, expected[1].targets)
    content = RecordDict({"arrays": initial_arrays(SETTINGS)})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), RUN_CONFIG)
    with pytest.raises(ValueError, match=r"node_config must hold 'num-partitions'.*--node-config"):
        open_node(Message(content, 1, "train"), context)
