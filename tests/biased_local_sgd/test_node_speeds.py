import math
from functools import partial

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from steps_toy import BATCH, local_model, steps_app, steps_arrays

from flwr_hetero.biased_local_sgd import strategy as biased
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD, LocalSteps

TRAIN_ONLY = {"fraction_evaluate": 0.0}
FAST, SLOW = DeviceProfile(compute_factor=8.0), DeviceProfile(compute_factor=1.0)


def run(strategy, profiles, num_rounds=3, **app):
    grid = LocalGrid(steps_app(**app), profiles=profiles, seed=0)
    history = History(strategy)
    result = history.start(grid, steps_arrays(), num_rounds=num_rounds)
    steps = [list(r[strategy.name]["num_steps"].values()) for r in history.records[1:]]
    return result, history.records, steps


def test_first_round_measures_then_two_classes():
    seen = []
    strategy = LocalSteps(fast_steps=16)
    _, _, steps = run(strategy, [FAST, FAST, SLOW], seen=seen)
    assert steps == [[1, 1, 1], [16, 16, 2], [16, 16, 2]]
    assert strategy.speeds.classes() == ({"node-0", "node-1"}, 1 / 8)
    configs = {(r, p): config["num-steps"] for r, p, config in seen}
    assert [configs[2, p] for p in range(3)] == [16, 16, 2], "each node's own config"


@pytest.mark.parametrize(
    ("gamma", "first", "then", "slowest_s"),
    [
        (0.5, [1, 1, 1], [16, 16, 8], 8 * BATCH * 0.01),
        (1.0, [16, 16, 16], [16, 16, 16], 16 * BATCH * 0.01),
    ],
)
def test_gammas_given(gamma, first, then, slowest_s):
    strategy = LocalSteps(FedAvg(**TRAIN_ONLY), 16, gamma=gamma)
    _, records, steps = run(strategy, [FAST, FAST, SLOW])
    assert steps == [first, then, then]
    assert records[3]["virtual_s"] - records[2]["virtual_s"] == pytest.approx(slowest_s)


def test_a_deadline_counts_the_link(monkeypatch):
    monkeypatch.setattr(biased, "SMOOTHING", 0.0)
    # 0.01 s an example, 8 a step: 0.08 s a step; some 300 bytes up at 300 byte/s
    slow_link = DeviceProfile(uplink_mbps=2400e-6)
    strategy = LocalSteps(FedAvg(**TRAIN_ONLY), budget="deadline", deadline_s=2.0)
    _, records, steps = run(strategy, [DeviceProfile(), slow_link], num_rounds=2)
    link_s = strategy.speeds.link_s["node-1"]
    assert 0.5 < link_s < 1.9
    assert steps[1] == [25, math.floor((2.0 - link_s) / 0.08 + 1e-9)]
    took_s = records[2]["virtual_s"] - records[1]["virtual_s"]
    assert took_s <= 2.0 + 1e-9


def test_deadline_of_the_quickest_node():
    strategy = LocalSteps(fast_steps=24, budget="deadline")
    _, _, steps = run(strategy, [DeviceProfile(compute_factor=f) for f in (8.0, 4.0, 1.0)], 2)
    assert steps == [[1, 1, 1], [24, 12, 3]]


def test_only_shared_data_are_weighed_by_steps():
    shared = BiasedLocalSGD(shared_samples=64, batch_size=BATCH)
    assert (shared.weigh_by_steps, shared.step_correction) == (True, 0.0)
    assert (BiasedLocalSGD().weigh_by_steps, BiasedLocalSGD().step_correction) == (False, 0.5)
    assert LocalSteps().step_correction == 0.5


@pytest.mark.parametrize(
    ("make", "shares", "scales"),
    [
        (partial(BiasedLocalSGD, weigh_by_steps=True), [2, 2, 8], [1, 1, 1]),
        (partial(LocalSteps, step_correction=1.0), [1, 1, 1], [6 / 8, 6 / 2, 6 / 8]),
        (LocalSteps, [1, 1, 1], np.sqrt([6 / 8, 6 / 2, 6 / 8])),
    ],
)
def test_silent_node_counts_least(make, shares, scales, caplog):
    app = steps_app(silent={0}, claims={1: 2})
    strategy = make(gamma=1.0, fast_steps=8)
    w = strategy.start(LocalGrid(app, [FAST] * 3), steps_arrays(), num_rounds=1).arrays["w"]
    updates = np.array([local_model(np.zeros(3), p, 8) for p in range(3)])
    expected = np.average(np.array(scales)[:, None] * updates, axis=0, weights=shares)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5)
    assert "no 'num-steps' (steps that the node took) from 1 of 3 nodes" in caplog.text
    assert "node-0" in caplog.text


def test_report_of_more_steps_is_cut_down_and_of_fewer_believed():
    honest, _, _ = run(LocalSteps(fast_steps=16), [FAST, FAST, SLOW])
    result, records, _ = run(LocalSteps(fast_steps=16), [FAST, FAST, SLOW], claims={0: 17})
    np.testing.assert_array_equal(result.arrays["w"].numpy(), honest.arrays["w"].numpy())
    assert result.train_metrics_clientapp == honest.train_metrics_clientapp
    assert records[2]["failures"][0]["reason"].endswith("was assigned 16")
    strategy = LocalSteps(gamma=1.0, fast_steps=16)
    result, records, _ = run(strategy, [FAST] * 2, claims={0: 4})
    assert records[-1]["failures"] == []
    assert result.train_metrics_clientapp[1]["num-steps"] == 10.0
    assert strategy.speeds.step_s["node-0"] == 4 * strategy.speeds.step_s["node-1"]
