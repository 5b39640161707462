import random
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from recording import History
from steps_toy import local_model, steps_app, steps_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD, FedBuff, LocalSteps, TiFL

FAST, SLOW = DeviceProfile(compute_factor=8.0), DeviceProfile(compute_factor=1.0)
FLEET = [FAST, FAST, FAST, SLOW]
STEPS = [16, 16, 16, 2]
BY_STEPS = partial(BiasedLocalSGD, fast_steps=16, weigh_by_steps=True)


def run(strategy, *, num_rounds=3, arrays=None, profiles=FLEET, **app):
    random.seed(0)
    grid = LocalGrid(steps_app(**app), profiles=profiles, seed=0)
    history = History(strategy)
    result = history.start(grid, arrays or steps_arrays(), num_rounds=num_rounds)
    return result, history.records


def mean_model(steps_by_round):
    """Eq. (4): models weighted by steps, round after round."""
    w = np.zeros(3, np.float32)
    for steps in steps_by_round:
        models = [local_model(w, partition, count) for partition, count in enumerate(steps)]
        w = np.average(models, axis=0, weights=steps).astype(np.float32)
    return w


def test_equation_4_by_hand():
    """Metrics stay weighted by examples."""
    examples = {0: 700, 1: 100, 2: 100, 3: 100}
    result, _ = run(BY_STEPS(), num_examples=examples, num_rounds=2)
    expected = mean_model([[1] * 4, STEPS])
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected, rtol=1e-6)
    assert result.arrays["n"].dtype == "int64"
    assert result.arrays["n"].numpy() == 1 + round((3 * 16 * 16 + 2 * 2) / 50)
    metrics = result.train_metrics_clientapp[2]
    assert metrics["num-steps"] == pytest.approx(0.9 * 16 + 0.1 * 2)
    assert "num-examples" not in metrics


@pytest.mark.parametrize("inner", [flower.FedMedian, flower.FedTrimmedAvg, flower.Krum])
def test_robust_strategies_keep_their_rule(inner):
    biased, _ = run(BY_STEPS(inner()))
    plain, _ = run(LocalSteps(inner(), fast_steps=16, step_correction=0.0))
    np.testing.assert_allclose(biased.arrays["w"].numpy(), plain.arrays["w"].numpy(), rtol=1e-6)


def test_differential_privacy_inside_clips_each_reply():
    inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.0, 0.5, 4)
    arrays = ArrayRecord({"w": steps_arrays()["w"], "n": Array(np.zeros(1, np.float32))})
    result, _ = run(BY_STEPS(inner), arrays=arrays, num_rounds=1)
    moved = np.concatenate([array.numpy() for array in result.arrays.values()])
    assert 0 < np.linalg.norm(moved) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    "private",
    [
        lambda: flower.DifferentialPrivacyClientSideFixedClipping(flower.FedAvg(), 1.0, 0.5, 4),
        lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(flower.FedAvg(), 0.1, 4),
    ],
)
def test_updates_that_nodes_have_clipped_are_not_scaled(private):
    for scales in (BiasedLocalSGD, lambda s: LocalSteps(s, step_correction=1.0)):
        with pytest.raises(ValueError, match="step_correction must leave updates as they are"):
            scales(private())
    with pytest.raises(ValueError, match="weighting must leave updates as they are"):
        FedBuff(private())
    assert FedBuff(LocalSteps(private(), step_correction=0.0), weighting="examples").leaf


def test_profiling_by_tifl_measures_the_speeds():
    strategy = TiFL(BiasedLocalSGD(flower.FedAdam(), 8), 2, 2, policy="uniform", profiling="phase")
    _, records = run(strategy, profiles=[FAST] * 3 + [SLOW] * 3, num_rounds=4)
    for record in records[1:]:
        fast = int(record["selected"][0][-1]) < 3
        assert list(record["biased_local_sgd"]["num_steps"].values()) == [8 if fast else 1] * 2


@pytest.mark.parametrize(("given", "share"), [(None, 48 / 50), (0.5, 0.5)])
def test_what_nodes_need_to_sample(given, share):
    seen = []
    run(BiasedLocalSGD(fast_steps=16, high_loss_fraction=0.25, share=given), seen=seen)
    configs = {partition: config for number, partition, config in seen if number == 3}
    assert [configs[p]["fast"] for p in range(4)] == [True, True, True, False]
    assert {config["fast-share"] for config in configs.values()} == {share}
    assert {config["high-loss-fraction"] for config in configs.values()} == {0.25}


def no_fedavg():
    methods = dict.fromkeys(flower.Strategy.__abstractmethods__, lambda *args: None)
    return type("OwnRule", (flower.Strategy,), methods)()


def accounted():
    inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 4)
    inner.accountant = object()
    return inner


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"fast_steps": 0}, "fast_steps"),
        ({"gamma": 1.1}, "gamma"),
        ({"gamma": 0.5, "budget": "deadline"}, "gamma must be left out with"),
        ({"budget": "best"}, "budget must be one of"),
        ({"deadline_s": 3.0}, "deadline_s must be left out with"),
        ({"budget": "deadline", "deadline_s": np.inf}, "deadline_s"),
        ({"step_correction": -0.1}, "step_correction must be a number in"),
        ({"high_loss_fraction": 0.0}, "high_loss_fraction"),
        ({"share": 0.0}, "share"),
        ({"shared_samples": 0}, "shared_samples"),
        ({"shared_samples": 9, "batch_size": 0}, "batch_size"),
        ({"unified": True}, "unified must be left out without shared data"),
        ({"seed": -1}, "seed"),
        ({"step_correction": 0.5, "weigh_by_steps": True}, "step_correction must be 0 or left"),
        ({"strategy": no_fedavg(), "weigh_by_steps": True}, "strategy must derive from FedAvg"),
        ({"strategy": accounted(), "weigh_by_steps": True}, "strategy must be without a privacy"),
    ],
)
def test_bad_settings_are_refused(settings, argument):
    with pytest.raises(ValueError, match=f"^{argument}"):
        BiasedLocalSGD(**settings)
