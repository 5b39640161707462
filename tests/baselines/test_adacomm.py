import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.baselines.adacomm import adaptive_steps
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import AdaComm


class Losses(History):
    """Keep the median training loss of every round."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.losses = []

    def on_replies(self, server_round, replies):
        losses = [r.content["metrics"].get("train-loss", np.nan) for r in replies]
        self.losses.append(float(np.median(losses)))
        return replies


def run(**settings):
    history = Losses(AdaComm(FedAvg(fraction_evaluate=0.0), **settings))
    history.start(LocalGrid(toy_app(), [DeviceProfile()] * 3), toy_arrays(), num_rounds=6)
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
    strategy.start(LocalGrid(toy_app(mods=[liar]), [DeviceProfile()] * 3), toy_arrays(), 3)
    assert strategy.loss < 100


def test_without_losses_steps_stay():
    assert run(first_steps=7, interval_s=0.0, loss_key="none")[0] == [7] * 6


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
