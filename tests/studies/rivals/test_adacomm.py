import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import AdaComm
from flwr_hetero_studies.rivals.adacomm import adaptive_steps


@pytest.mark.parametrize(
    ("loss", "previous", "expected"),
    [
        (1.0, 20, 10),  # by the loss 20, which is not less than before: half
        (0.49, 20, 14),
        (0.25, 14, 10),
        (4.0, 5, 3),  # half, rounded up
        (0.0, 1, 1),
        (0.0, 3, 1),
    ],
)
def test_adaptive_steps_by_hand(loss, previous, expected):
    assert adaptive_steps(loss, 1.0, previous, first_steps=20) == expected


class Losses(History):
    """Keep the loss that is known after every round."""

    def __init__(self, strategy):
        super().__init__(strategy)
        self.losses = []

    def on_round_end(self, run, record):
        super().on_round_end(run, record)
        self.losses.append(self.inner.loss)


def test_steps_follow_the_loss_after_every_round():
    def obedient(message, context, call_next):
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            reply.content["metrics"]["num-steps"] = message.content["config"]["num-steps"]
        return reply

    history = Losses(AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=0.0))
    grid = LocalGrid(toy_app(mods=[obedient]), [DeviceProfile()] * 3)
    history.start(grid, toy_arrays(), num_rounds=6)
    steps = [record["adacomm"]["num_steps"] for record in history.records[1:]]
    losses = history.losses[1:]
    expected = [20]
    for loss in losses[:-1]:
        expected.append(adaptive_steps(loss, losses[0], expected[-1], 20))
    assert steps == expected
    assert steps[0] > steps[-1]
