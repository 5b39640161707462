import math

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from recording import History
from steps_toy import BATCH, local_model, steps_app, steps_arrays

from flwr_hetero.biased_local_sgd.step_budget import Speeds, StepPlan, compute_and_link_s
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.exchange import Latency
from flwr_hetero.strategy import LocalSteps

TRAIN_ONLY = {"fraction_evaluate": 0.0}
FAST, SLOW = DeviceProfile(compute_factor=8.0), DeviceProfile(compute_factor=1.0)


def run(strategy, profiles, num_rounds=3, **app):
    grid = LocalGrid(steps_app(**app), profiles=profiles, seed=0)
    history = History(strategy)
    result = history.start(grid, steps_arrays(), num_rounds=num_rounds)
    return result, history.records, grid


def steps_by_round(records):
    return [list(r["local-steps"]["num-steps"].values()) for r in records[1:]]


def test_first_round_measures_then_the_classes_get_tau_f_and_tau_s():
    seen = []
    _, records, _ = run(LocalSteps(fast_steps=16), [FAST, FAST, SLOW], seen=seen)
    assert steps_by_round(records) == [[1, 1, 1], [16, 16, 2], [16, 16, 2]]
    assert records[-1]["local-steps"]["gamma"] == 1 / 8
    told = {(r, p): config["num-steps"] for r, p, config in seen}
    assert [told[2, p] for p in range(3)] == [16, 16, 2], "each node's own config"


def test_the_round_lasts_as_long_as_the_fast_nodes_need():
    _, records, _ = run(LocalSteps(FedAvg(**TRAIN_ONLY), fast_steps=16), [FAST, FAST, SLOW])
    fast_s = 16 * BATCH * FAST.seconds_per_example / FAST.compute_factor
    assert records[3]["virtual_s"] - records[2]["virtual_s"] == pytest.approx(fast_s)


def test_balanced_local_sgd_waits_for_the_slow_node():
    _, records, _ = run(LocalSteps(FedAvg(**TRAIN_ONLY), 16, gamma=1.0), [FAST, FAST, SLOW])
    assert steps_by_round(records) == [[16] * 3] * 3
    slow_s = 16 * BATCH * SLOW.seconds_per_example
    assert records[3]["virtual_s"] == pytest.approx(3 * slow_s)


def test_one_gamma_for_the_class_that_is_measured_slow():
    _, records, _ = run(LocalSteps(fast_steps=32, gamma=0.5), [FAST, SLOW])
    assert steps_by_round(records)[1:] == [[32, 16]] * 2


def test_gammas_by_identity_need_no_times():
    strategy = LocalSteps(fast_steps=32, gamma={"node-0": 1.0, "node-1": 1 / 32})
    assert strategy.plan.steps_for(["node-0", "node-1", "new"], strategy.speeds).tolist() == [
        32,
        1,
        1,
    ]


def test_deadline_counts_the_link():
    # 0.01 s an example, 8 a step: 0.08 s a step, 25 in 2 s; some 300 bytes up at 300 byte/s
    slow_link = DeviceProfile(uplink_mbps=2400e-6)
    strategy = LocalSteps(FedAvg(**TRAIN_ONLY), budget="deadline", deadline_s=2.0, smoothing=0.0)
    _, records, _ = run(strategy, [DeviceProfile(), slow_link], num_rounds=2)
    link_s = strategy.speeds.link_s["node-1"]
    assert 0.5 < link_s < 1.9
    assert steps_by_round(records)[1] == [25, math.floor((2.0 - link_s) / 0.08 + 1e-9)]
    assert records[2]["virtual_s"] - records[1]["virtual_s"] <= 2.0 + 1e-9


def test_deadline_left_out_is_the_quickest_nodes_time():
    strategy = LocalSteps(fast_steps=24, budget="deadline")
    profiles = [DeviceProfile(compute_factor=f) for f in (8.0, 4.0, 1.0)]
    _, records, _ = run(strategy, profiles, num_rounds=2)
    assert steps_by_round(records)[1] == [24, 12, 3]


def test_times_are_smoothed_over_rounds():
    strategy = LocalSteps(fast_steps=32, smoothing=0.5)
    grid = LocalGrid(steps_app(), profiles=[FAST, DeviceProfile(compute_factor=2.0)])
    history = History(strategy)
    history.start(grid, steps_arrays(), num_rounds=1)
    before_s = strategy.speeds.step_s["node-1"]
    slow_id = list(grid.get_node_ids())[1]
    grid.set_profile(slow_id, DeviceProfile(compute_factor=1.0))
    history.start(grid, steps_arrays(), num_rounds=1)
    assert strategy.speeds.step_s["node-1"] == pytest.approx(1.5 * before_s)


def test_metrics_keep_num_steps_and_their_weighting_by_examples():
    result, _, _ = run(LocalSteps(fast_steps=8), [FAST, SLOW], num_examples={0: 300})
    assert result.train_metrics_clientapp[3]["num-steps"] == pytest.approx(0.75 * 8 + 0.25 * 1)


def test_without_a_report_the_assigned_steps_count():
    result, records, _ = run(LocalSteps(fast_steps=8), [FAST, SLOW], reports=False)
    assert records[-1]["failures"] == []
    assert result.train_metrics_clientapp[3]["num-steps"] == pytest.approx(4.5)


@pytest.mark.parametrize("claim", [10**9, 1e300, 17])
def test_a_claim_of_more_steps_is_cut_down(claim):
    honest, _, _ = run(LocalSteps(fast_steps=16), [FAST, FAST, SLOW])
    result, records, _ = run(LocalSteps(fast_steps=16), [FAST, FAST, SLOW], claims={0: claim})
    np.testing.assert_array_equal(result.arrays["w"].numpy(), honest.arrays["w"].numpy())
    assert result.train_metrics_clientapp == honest.train_metrics_clientapp
    assert [len(r["failures"]) for r in records[1:]] == [1, 1, 1]
    assert records[2]["failures"][0]["reason"].endswith("was given 16")


@pytest.mark.parametrize("claim", [0, -3, math.nan, math.inf, [1, 2]])
def test_a_nonsense_claim_costs_the_reply(claim):
    result, records, _ = run(LocalSteps(gamma=1.0, fast_steps=4), [FAST] * 3, claims={1: claim})
    w = np.zeros(3, np.float32)
    for _ in range(3):
        w = (local_model(w, 0, 4) + local_model(w, 2, 4)) / 2
    np.testing.assert_allclose(result.arrays["w"].numpy(), w, rtol=1e-6)
    assert [len(r["failures"]) for r in records[1:]] == [1, 1, 1]


def test_fewer_steps_than_given_are_believed():
    strategy = LocalSteps(gamma=1.0, fast_steps=16)
    result, records, _ = run(strategy, [FAST] * 2, claims={0: 4})
    assert records[-1]["failures"] == []
    assert result.train_metrics_clientapp[1]["num-steps"] == 10.0
    assert strategy.speeds.step_s["node-0"] == 4 * strategy.speeds.step_s["node-1"]


def test_compute_and_link_of_real_and_silent_nodes():
    assert compute_and_link_s(None, Latency(3.0, False, "reported"), 5.0) == (3.0, 2.0)
    assert compute_and_link_s(None, Latency(3.0, False, "reported"), None) == (3.0, 0.0)
    assert compute_and_link_s(None, Latency(3.0, False, "observed"), 3.0) == (3.0, 0.0)


def test_a_lie_about_speed_earns_no_more_than_a_fast_nodes_steps():
    speeds = Speeds(smoothing=0.0)
    for node, compute_s in (("honest", 2.0), ("liar", 1e-12)):
        speeds.observe(node, steps=1, compute_s=compute_s, link_s=0.0)
    plan = StepPlan(32, budget="deadline", deadline_s=16.0)
    assert plan.steps_for(["honest", "liar"], speeds).tolist() == [8, 32]


def test_a_report_of_no_time_at_all_is_survived():
    speeds = Speeds(smoothing=0.0)
    speeds.observe("a", steps=4, compute_s=0.0, link_s=0.0)
    speeds.observe("b", steps=4, compute_s=1.0, link_s=0.0)
    assert StepPlan(32).steps_for(["a", "b"], speeds).tolist() == [32, 1]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LocalSteps(fast_steps=0), "fast_steps must be a whole number of at least 1"),
        (lambda: LocalSteps(gamma=1.1), "gamma must lie in"),
        (lambda: LocalSteps(gamma={"a": -1.0}), "gamma must lie in"),
        (lambda: LocalSteps(gamma=math.nan), "gamma must lie in"),
        (lambda: LocalSteps(gamma=0.5, budget="deadline"), "gamma must be left out"),
        (lambda: LocalSteps(budget="best"), "budget must be one of"),
        (lambda: LocalSteps(deadline_s=3.0), "deadline_s must be positive, finite and with"),
        (lambda: LocalSteps(budget="deadline", deadline_s=-1.0), "deadline_s must be positive"),
        (lambda: LocalSteps(budget="deadline", deadline_s=math.inf), "deadline_s must be positive"),
        (lambda: LocalSteps(min_steps=0), "min_steps must be a whole number of at least 1"),
        (lambda: LocalSteps(gamma="a"), r"gamma must lie in \(0, 1\], got 'a'"),
        (lambda: LocalSteps(gamma={"gpu": None}), r"gamma must lie in \(0, 1\], got None"),
        (lambda: LocalSteps(min_steps=64), "max_steps must be at least min_steps"),
        (lambda: LocalSteps(smoothing=1.0), "smoothing must lie in"),
        (lambda: LocalSteps(LocalSteps(FedAvg())), "strategy must leave steps to"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
