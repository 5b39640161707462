import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.baselines.adacomm import adaptive_steps
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import AdaComm


class Losses(History):
    def __init__(self, strategy):
        super().__init__(strategy)
        self.losses = []

    def on_replies(self, server_round, replies):
        losses = [r.content["metrics"].get("train-loss", np.nan) for r in replies]
        self.losses.append(float(np.median(losses)))
        return replies


def run(strategy, num_rounds=6):
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3)
    history = Losses(strategy)
    history.start(grid, toy_arrays(), num_rounds)
    return [record["adacomm"]["num_steps"] for record in history.records[1:]], history.losses


def test_steps_follow_the_loss_after_every_round():
    steps, losses = run(AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0))
    expected = [20]
    for loss in losses[:-1]:
        expected.append(adaptive_steps(loss, losses[0], expected[-1], 20))
    assert steps == expected
    assert steps[0] == 20 > steps[-1]


def test_steps_hold_for_an_interval():
    # a round of the toy takes 100 examples x 0.01 s
    steps, _ = run(AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=2.0))
    assert steps[:2] == [20, 20]
    assert steps[2] == steps[3] < 20
    assert steps[4] == steps[5] < steps[2]


def test_one_nodes_claim_does_not_steer():
    def liar(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 2:
            reply.content["metrics"]["train-loss"] = 1e30
        return reply

    grid = LocalGrid(toy_app(mods=[liar]), profiles=[DeviceProfile()] * 3)
    strategy = AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0)
    strategy.start(grid, toy_arrays(), 3)
    assert strategy.loss < 100


def test_without_losses_steps_stay():
    steps, _ = run(AdaComm(FedAvg(fraction_evaluate=0.0), 7, interval_s=0.0, loss_key="none"))
    assert steps == [7] * 6


def test_stop_and_resume_equals_uninterrupted():
    whole, _ = run(AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0))
    grid, arrays = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3), toy_arrays()
    strategy, parts = AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0), []
    for _ in range(6):
        fresh = AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0)
        fresh.load_state_dict(strategy.state_dict())
        strategy = fresh
        arrays = strategy.start(grid, arrays, 1).arrays
        parts.append(strategy.num_steps)
    assert parts == whole


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"first_steps": 0}, "first_steps must be a whole number of at least 1"),
        ({"first_steps": 2.5}, "first_steps must be a whole number of at least 1"),
        ({"first_steps": "a"}, "first_steps must be .* got 'a': 20 is a start"),
        ({"interval_s": -1.0}, "interval_s must be at least 0"),
        ({"interval_s": float("inf")}, "interval_s must be at least 0"),
        ({"shrink": 1.0}, "shrink must lie in"),
    ],
)
def test_refuses_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        AdaComm(**settings)
