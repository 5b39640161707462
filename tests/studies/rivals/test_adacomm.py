import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import AdaComm
from flwr_hetero_studies.rivals.adacomm import adaptive_steps


def mod(change):
    """Make a mod that changes the metrics of replies to training."""

    def changed(message, context, call_next):
        reply = call_next(message, context)
        for metrics in reply.content.metric_records.values():
            if message.metadata.message_type == "train":
                change(metrics, message.content["config"], context.node_config["partition-id"])
        return reply

    return changed


STEPS_REPORTED = mod(lambda metrics, config, _: metrics.update({"num-steps": config["num-steps"]}))


class Losses(History):
    """Keep the loss that is known after every round."""

    losses = ()

    def on_round_end(self, run, record):
        super().on_round_end(run, record)
        self.losses = [*self.losses, self.inner.loss]


def run(mods=(STEPS_REPORTED,), interval_s=0.0):
    """Run six rounds of 1 s; return the steps and losses of each."""
    history = Losses(AdaComm(FedAvg(fraction_evaluate=0.0), 20, interval_s=interval_s))
    grid = LocalGrid(toy_app(mods=mods), [DeviceProfile()] * 3)
    history.start(grid, toy_arrays(), num_rounds=6)
    steps = [record["adacomm"]["num_steps"] for record in history.records[1:]]
    return steps, history.losses[1:]


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


def test_steps_follow_the_loss_after_every_round():
    steps, losses = run()
    expected = [20]
    for loss in losses[:-1]:
        expected.append(adaptive_steps(loss, losses[0], expected[-1], 20))
    assert steps == expected
    assert steps[0] == 20 > steps[-1]
