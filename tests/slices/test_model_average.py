import random

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.strategy import FedBuff, ModelAverage

FLEET = [DeviceProfile(speed) for speed in (1, 2, 4)]


class Seen(History):
    """Note the newest global model after each round."""

    def on_round_end(self, run, record):
        self.models = [*getattr(self, "models", []), value(run.arrays)]
        super().on_round_end(run, record)


def value(arrays):
    return float(arrays["w"].numpy()[0])


def central(server_round, arrays):
    return MetricRecord({"w": value(arrays)})


def run(strategy, num_rounds=5, app=None, **settings):
    random.seed(0)
    seen = Seen(strategy)
    grid = LocalGrid(app or toy_app(), FLEET)
    result = seen.start(grid, toy_arrays(), num_rounds, evaluate_fn=central, **settings)
    return seen, result


def average(models, window):
    """By the definition: the mean of the first R models, then an exponential one."""
    mean = 0.0
    means = []
    for t, model in enumerate(models, 1):
        mean += max(1 / t, 1 / window) * (model - mean)
        means.append(mean)
    return means


@pytest.mark.parametrize("window", [1, 3, 8])
def test_server_evaluates_the_average(window):
    seen, result = run(ModelAverage(flower.FedAvg(), window=window))
    found = [record["global"]["w"] for record in seen.records]
    assert found[0] == 0.0  # the initial model is not in it
    assert found[1:] == pytest.approx(average(seen.models[1:], window))
    assert value(result.arrays) == pytest.approx(found[-1])


def test_training_is_unchanged():
    plain, _ = run(flower.FedAvgM(server_momentum=0.9))
    averaged, _ = run(ModelAverage(flower.FedAvgM(server_momentum=0.9)))
    assert averaged.models == plain.models
    last = [s.records[-1]["global"]["w"] for s in (plain, averaged)]
    assert last[0] != pytest.approx(last[1])


def test_nodes_evaluate_the_average():
    seen_by_nodes = []

    def note(message, context, call_next):
        if message.metadata.message_type == "evaluate":
            seen_by_nodes.append(value(message.content["arrays"]))
        return call_next(message, context)

    seen, _ = run(ModelAverage(flower.FedAvg(), window=4), app=toy_app(mods=(timing, note)))
    wanted = np.repeat(average(seen.models[1:], 4), len(FLEET))
    assert seen_by_nodes == pytest.approx(wanted)


@pytest.mark.parametrize(
    "nest", [lambda s: ModelAverage(FedBuff(s)), lambda s: FedBuff(ModelAverage(s))]
)
def test_without_rounds_inside_and_outside(nest):
    seen, result = run(nest(flower.FedAvg(fraction_evaluate=0.0)), num_rounds=6)
    assert value(result.arrays) == pytest.approx(average(seen.models[1:], 8)[-1], rel=1e-5)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="window"):
        ModelAverage(window=0)
    with pytest.raises(ValueError, match="trees"):
        ModelAverage(flower.FedXgbBagging())


def test_models_far_apart_have_a_finite_average():
    """Their difference is above what float16 holds, 65,504."""
    average = ModelAverage(window=4)
    for number in (60_000, -60_000, 60_000):
        newest = {"w": np.array([number], np.float16), "n": np.array([number])}
        newest = ArrayRecord({name: Array(new) for name, new in newest.items()})
        average.add(newest)
    found = average.evaluated_model(newest)
    assert found["w"].dtype == "float16"
    assert found["w"].numpy()[0] == pytest.approx(20_000, rel=2e-3)
    assert found["n"].numpy()[0] == 60_000
