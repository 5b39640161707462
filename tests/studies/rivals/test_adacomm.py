import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.server.client_support import MissingClientSupportError
from flwr_hetero_studies.rivals import AdaComm
from flwr_hetero_studies.rivals.adacomm import adaptive_steps


def steps_reported(message, context, call_next):
    """Say that the node took the steps that it was asked for."""
    reply = call_next(message, context)
    if reply.has_content() and message.metadata.message_type == "train":
        steps = message.content["config"]["num-steps"]
        next(iter(reply.content.metric_records.values()))["num-steps"] = steps
    return reply


def renamed(name):
    """Make a mod that gives the training loss another name; None takes it out."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        for metrics in reply.content.metric_records.values():
            loss = metrics.pop("train-loss", None)
            if name and loss is not None:
                metrics[name] = loss
        return reply

    return mod


class Losses(History):
    """Keep the median training loss of every round."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.losses = []

    def on_replies(self, context, replies):
        losses = [r.content["metrics"].get("train-loss", np.nan) for r in replies]
        self.losses.append(float(np.median(losses)))
        return replies


def run(mods=(steps_reported,), **settings):
    history = Losses(AdaComm(FedAvg(fraction_evaluate=0.0), **settings))
    app = toy_app(mods=[*mods, timing])
    history.start(LocalGrid(app, [DeviceProfile()] * 3), toy_arrays(), num_rounds=6)
    return [record["adacomm"]["num_steps"] for record in history.records[1:]], history.losses


@pytest.mark.parametrize(
    ("loss", "previous", "expected"),
    [
        (1.0, 20, 10),  # by the loss 20, which is not less than before: half
        (0.49, 20, 14),
        (0.25, 14, 10),
        (4.0, 5, 3),  # half, rounded up
        (0.0, 1, 1),
        (0.0, 3, 1),
        (1e-9, 1, 1),
    ],
)
def test_adaptive_steps_by_hand(loss, previous, expected):
    assert adaptive_steps(loss, 1.0, previous, first_steps=20) == expected


def test_steps_follow_the_loss_after_every_round():
    steps, losses = run(first_steps=20, interval_s=0.0)
    expected = [20]
    for loss in losses[:-1]:
        expected.append(adaptive_steps(loss, losses[0], expected[-1], 20))
    assert steps == expected
    assert steps[0] == 20 > steps[-1]


def test_steps_hold_for_an_interval():
    # a round of the toy takes 100 examples x 0.01 s
    steps, _ = run(first_steps=20, interval_s=2.0)
    assert steps[:2] == [20, 20]
    assert steps[2] == steps[3] < 20
    assert steps[4] == steps[5] < steps[2]


def test_one_nodes_report_does_not_steer():
    def liar(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 2:
            reply.content["metrics"]["train-loss"] = 1e30
        return reply

    strategy = AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0)
    app = toy_app(mods=[steps_reported, liar])
    strategy.start(LocalGrid(app, [DeviceProfile()] * 3), toy_arrays(), 3)
    assert strategy.loss < 100


@pytest.mark.parametrize("name", ["train_loss", "train-loss", "local_loss"])
def test_the_loss_is_found(name):
    mods = steps_reported, renamed(name)
    usual = run(first_steps=20, interval_s=0.0)[0]
    assert run(mods, first_steps=20, interval_s=0.0)[0] == usual


def test_a_training_loss_comes_before_others():
    def two(message, context, call_next):
        reply = call_next(message, context)
        for metrics in reply.content.metric_records.values():
            metrics["a-loss"] = 1.0
        return reply

    usual = run(first_steps=20, interval_s=0.0)[0]
    assert run((steps_reported, two), first_steps=20, interval_s=0.0)[0] == usual


@pytest.mark.parametrize(
    ("mods", "missing"),
    [
        ([], "'num-steps' .*\n.*hetero"),
        ([steps_reported, renamed(None)], "'train-loss' .*\n.*\"train-loss\": loss"),
    ],
)
def test_without_support_the_run_stops(mods, missing):
    with pytest.raises(MissingClientSupportError, match=f"AdaComm: no node reports {missing}"):
        run(mods)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"first_steps": 0}, "first_steps"),
        ({"interval_s": -1.0}, "interval_s"),
    ],
)
def test_adacomm_refuses(settings, argument):
    with pytest.raises(ValueError, match=f"^{argument} must"):
        AdaComm(**settings)


def test_damaged_state_is_refused():
    with pytest.raises(ValueError, match="state of AdaComm must hold num_steps"):
        AdaComm().load_state_dict({"num_steps": "many"})
