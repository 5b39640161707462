import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.serverapp import strategy as flower
from recording import killed_and_resumed
from steps_toy import steps_app, steps_arrays

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD, FedNova, LocalSteps, Recorded, TiFL

FLEET = [DeviceProfile(jitter=0.1)] * 2 + [DeviceProfile(compute_factor=8.0, jitter=0.1)] * 3
QUIET = {"fraction_evaluate": 0.0}
STRATEGIES = {
    "LocalSteps": lambda: LocalSteps(flower.FedAvg(**QUIET), 8),
    "deadline": lambda: LocalSteps(flower.FedAvg(**QUIET), 8, budget="deadline"),
    "FedNova": lambda: FedNova(flower.FedAdam(**QUIET), 8),
    "BiasedLocalSGD": lambda: BiasedLocalSGD(flower.FedAdam(**QUIET), 8),
    "shared samples": lambda: BiasedLocalSGD(
        flower.FedAvg(**QUIET), 8, shared_samples=300, batch_size=4, seed=3
    ),
    "inside TiFL": lambda: TiFL(BiasedLocalSGD(flower.FedAvg(**QUIET), 8), 2, 2, interval=2),
    "unified": lambda: BiasedLocalSGD(
        flower.FedAvg(**QUIET), 8, shared_samples=150, batch_size=4, unified=True
    ),
}


def keep_samples(given):
    """Keep which samples a node is given, and report a loss for each, as in shared-data mode."""

    def mod(message: Message, context: Context, call_next) -> Message:
        reply = call_next(message, context)
        if keys.SAMPLES in message.content:
            indices, _ = read_samples(message.content[keys.SAMPLES])
            number = message.content["config"][keys.SERVER_ROUND]
            given[number, context.node_config["partition-id"]] = indices.tolist()
            reply.content[keys.SAMPLES] = samples_record(indices, np.cos(indices))
        return reply

    return mod


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_killed_and_resumed_equals_unbroken(tmp_path, name):
    given = {"whole": {}, "broken": {}}

    def go(folder, evaluate_fn, resume):
        app = steps_app(mods=[keep_samples(given[folder.checkpoint_dir.name])])
        grid = LocalGrid(app, profiles=FLEET, seed=7)
        strategy = Recorded(STRATEGIES[name](), run_dir=folder, resume=resume)
        return strategy.start(grid, steps_arrays(), num_rounds=6, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)
    assert given["broken"] == given["whole"]
    assert bool(given["whole"]) == (name in ("shared samples", "unified"))
