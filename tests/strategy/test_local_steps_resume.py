import random

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord
from flwr.serverapp import strategy as flower
from steps_toy import steps_app, steps_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.sample_lists import read_samples, samples_record
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


class Folder:
    def __init__(self, path):
        self.checkpoint_dir = path
        self.records = []

    def append_round(self, record):
        self.records.append(record)

    def cut_after(self, last_round):
        self.records = [r for r in self.records if r["round"] <= last_round]

    def save_model(self, arrays):
        pass

    def finish(self):
        return self.checkpoint_dir


class KilledError(Exception):
    pass


SAMPLES_GIVEN: list = []


def losses_of_samples(message: Message, context: Context, call_next) -> Message:
    """Report a loss for each sample of a list, as a node in shared-data mode does."""
    reply = call_next(message, context)
    if keys.SAMPLES in message.content:
        indices, _ = read_samples(message.content[keys.SAMPLES])
        SAMPLES_GIVEN.append((context.node_config["partition-id"], indices.tolist()))
        reply.content[keys.SAMPLES] = samples_record(indices, np.cos(indices))
    return reply


def go(make, folder, killed_in=None, resume=False):
    def evaluate(server_round, arrays):
        if server_round == killed_in:
            raise KilledError
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    app = steps_app(mods=[losses_of_samples])
    grid = LocalGrid(app, profiles=FLEET, seed=7)
    strategy = Recorded(make(), run_dir=folder, resume=resume)
    return strategy.start(grid, steps_arrays(), num_rounds=6, evaluate_fn=evaluate)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_killed_and_resumed_equals_unbroken(tmp_path, name):
    folders = [Folder(tmp_path / kind) for kind in ("whole", "broken")]
    for folder in folders:
        folder.checkpoint_dir.mkdir()
    SAMPLES_GIVEN.clear()
    random.seed(1)
    whole = go(STRATEGIES[name], folders[0])
    given = sorted(SAMPLES_GIVEN)
    SAMPLES_GIVEN.clear()
    random.seed(1)
    with pytest.raises(KilledError):
        go(STRATEGIES[name], folders[1], killed_in=4)
    del SAMPLES_GIVEN[3 * len(FLEET) - len(FLEET) :]  # round 4 was not checkpointed; 1 has none
    resumed = go(STRATEGIES[name], folders[1], resume=True)
    assert sorted(SAMPLES_GIVEN) == given
    assert folders[1].records[-1]["round"] == 6
    np.testing.assert_array_equal(resumed.arrays["w"].numpy(), whole.arrays["w"].numpy())
    assert resumed.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp
    for mine, theirs in zip(folders[1].records, folders[0].records, strict=True):
        assert mine | {"wall_s": 0} == theirs | {"wall_s": 0}
