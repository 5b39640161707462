import itertools
import random

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from tifl_toy import PROFILE, Answers, make_tifl, paper_grid, records_of
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.server.context import Exchange
from flwr_hetero.strategy import TiFL, Wrapper

TRAIN_ONLY = {"fraction_evaluate": 0.0}


def training_tifl(*args, **settings):
    """TiFL with the paper's phase, so that rounds are alike from the first."""
    return TiFL(flower.FedAvg(**TRAIN_ONLY), *args, profiling="phase", **settings)


# --- static policies -------------------------------------------------------------------


def test_round_trains_one_tier_and_costs_its_latency():
    records = records_of(training_tifl(2, policy="uniform"), num_rounds=30)
    tiers = records[0]["tifl"]["tiers"]
    assert tiers == {f"node-{i}": i // 4 for i in range(20)}
    for before, record in itertools.pairwise(records):
        tier = record["tifl"]["tier"]
        assert [tiers[name] for name in record["selected"]] == [tier] * 2
        latency = 1 / (4.0, 2.0, 1.0, 0.5, 0.1)[tier]  # 100 examples at 0.01 s
        assert record["virtual_s"] - before["virtual_s"] == pytest.approx(latency)
    run_s = records[-1]["virtual_s"] - records[0]["virtual_s"]
    assert records[-1]["tifl"]["actual_s"] == pytest.approx(run_s)
    assert records[-1]["tifl"]["exact_estimate_s"] == pytest.approx(30 * 13.75 / 5)


def test_histogram_and_fewer_tiers_resample_the_policy():
    tifl = training_tifl(2, policy=[0.1, 0.2, 0.3, 0.2, 0.2], tiering="histogram", credits=3)
    records = records_of(tifl, num_rounds=0)
    assert records[0]["tifl"]["num_tiers"] == 2  # 0.25 .. 2 s in one bin, 10 s in the last
    assert records[0]["tifl"]["tier_probs"] == pytest.approx([0.45, 0.55])
    assert records[0]["tifl"]["credits"] == [8, 8]  # 5 x 3 shared, rounded up


# --- adaptive --------------------------------------------------------------------------


def reporting_app(accuracy_of):
    """Nodes that report an accuracy by tier and round."""

    def report(message, context, call_next):
        reply = call_next(message, context)
        if message.metadata.message_type == "evaluate":
            tier = context.node_config["partition-id"] // 4
            server_round = message.content["config"]["server-round"]
            reply.content["metrics"]["eval-acc"] = accuracy_of(tier, server_round)
        return reply

    return toy_app(mods=[report])


@pytest.mark.parametrize(("gain", "probs"), [(0.0, np.arange(1, 6) / 15), (0.01, [0.2] * 5)])
def test_algorithm_2_favours_low_accuracy(gain, probs):
    """After one interval, for round 1 is what round 5 is compared with."""
    grid = paper_grid(app=reporting_app(lambda tier, r: 0.9 - 0.1 * tier + gain * r))
    records = records_of(training_tifl(2, policy="algorithm-2", interval=5), grid, 5)
    assert records[1]["tifl"]["tier_accuracy"] == pytest.approx(
        [0.9 - 0.1 * tier + gain for tier in range(5)]
    )
    assert records[4]["tifl"]["tier_probs"] == [0.2] * 5
    assert records[5]["tifl"]["tier_probs"] == pytest.approx(probs)


def test_adaptive_rounds_follow_accuracy():
    def rounds(worst):
        grid = paper_grid(app=reporting_app(lambda tier, r: 0.1 if tier == worst else 0.8))
        records = records_of(training_tifl(2, interval=5), grid, 105)
        return np.bincount([r["tifl"]["tier"] for r in records[6:]], minlength=5)

    slow, fast = rounds(4), rounds(0)
    assert slow[4] >= 20 * fast[4] > 0
    assert fast[0] >= 2.5 * slow[0] > 0


def test_the_same_nodes_evaluate_each_time():
    grid, asked = Answers(60), []
    tifl = training_tifl(2, num_tiers=2, interval=4)

    def note(server_round, arrays):
        asked.append({node for node, kind in grid.asked if kind == "evaluate"})
        grid.asked.clear()

    tifl.start(grid, toy_arrays(), 8, evaluate_fn=note)
    assert [len(nodes) for nodes in asked] == [0, 0, 0, 0, 20, 0, 0, 0, 20]  # 10 of each tier
    assert asked[4] == asked[8]


# --- paced, credits --------------------------------------------------------------------


def test_paced_periods_hold_the_same_rounds():
    records = records_of(training_tifl(2, policy="paced"), num_rounds=93)
    tiers = [record["tifl"]["tier"] for record in records[1:]]
    for period in np.reshape(tiers, (3, 31)):
        assert np.bincount(period).tolist() == [16, 8, 4, 2, 1]
    assert tiers[:31] != tiers[31:62]


def test_credits_are_caps_of_the_run():
    tifl = training_tifl(2, 2, policy=[0.1, 0.9], credits=[30, 10])
    tiers = [record["tifl"]["tier"] for record in records_of(tifl, num_rounds=40)[1:]]
    assert np.bincount(tiers).tolist() == [30, 10]
    with pytest.raises(ValueError, match="credits must add up to the rounds of the run, 41,"):
        records_of(training_tifl(2, 2, credits=20), num_rounds=41)


def test_state_goes_on_after_a_new_profiling():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(4.0)] * 2 + [DeviceProfile(0.1)] * 2)
    tifl = training_tifl(1, 2, policy="paced", profile_interval=2)
    records_of(tifl, grid, 1)
    before = tifl.state
    assert before.full_credits.tolist() == [2, 1]
    for state, speed in zip(grid._nodes.values(), (4.0, 4.0, 3.9, 3.9), strict=True):
        state.profile = DeviceProfile(speed)
    tifl.select(Exchange(tifl.fleet, 2, toy_arrays()), grid, set(grid.get_node_ids()))
    assert tifl.state.full_credits.tolist() == [1, 1]
    assert sum(tifl.state.credits) == sum(before.credits) - 1


def test_credit_is_refunded_if_no_reply_counts():
    grid = paper_grid(faults=[Fault(i, "errs", 2, 2) for i in range(20)])
    records = records_of(training_tifl(2, policy="uniform", credits=10), grid, 3)
    assert [sum(record["tifl"]["credits"]) for record in records] == [50, 49, 49, 48]


# --- fleets that change ----------------------------------------------------------------


@pytest.mark.parametrize(("mode", "sizes"), [("shrink", {1, 3}), ("borrow", {3})])
def test_small_tier(mode, sizes):
    grid, tifl = paper_grid(), training_tifl(3, policy="uniform", on_small_tier=mode)
    tifl.start(grid, toy_arrays(), num_rounds=0)
    for node in (8, 9, 10):  # one node of tier 2 is left
        grid.leave(1000 + node)
    drawn = []
    for server_round in range(1, 40):
        tifl.configure_train(server_round, toy_arrays(), ConfigRecord(), grid)
        drawn.append((tifl.draw.tier, len(tifl.selected)))
    assert {size for _, size in drawn} == sizes
    assert 2 in {tier for tier, _ in drawn}


def test_all_nodes_gone_is_an_error():
    grid = paper_grid(10)

    def leave_all(server_round, arrays):
        if server_round == 2:
            for node_id in list(grid.get_node_ids()):
                grid.leave(node_id)

    with pytest.raises(RuntimeError, match="no node is online"):
        records_of(TiFL(), grid, evaluate_fn=leave_all)


def test_returning_node_keeps_its_tier():
    grid, tifl = paper_grid(), training_tifl(3, policy="fast")

    def come_and_go(server_round, arrays):
        if server_round == 1:
            grid.leave(1000)
        if server_round == 5:
            grid.come_back(1000)

    records = records_of(tifl, grid, 30, evaluate_fn=come_and_go)
    assert "node-0" not in {name for r in records[2:6] for name in r["selected"]}
    assert "node-0" in {name for r in records[6:] for name in r["selected"]}


# --- reproducible, composable, resumable -----------------------------------------------


def test_same_seed_same_run_whatever_the_node_ids():
    def selected(seed, shift):
        random.seed(shift)  # Flower's own sampling must not matter
        grid = paper_grid()
        for _ in range(shift):  # other node ids for the same partitions
            grid._nodes = {node + 7919: state for node, state in grid._nodes.items()}
            grid._online = dict.fromkeys(sorted(grid._nodes, key=lambda n: -n))
        records = records_of(training_tifl(3, policy="uniform", seed=seed), grid)
        return [sorted(record["selected"]) for record in records]

    assert selected(1, 0) == selected(1, 2)
    assert selected(1, 0) != selected(2, 0)


DP = flower.DifferentialPrivacyServerSideFixedClipping


@pytest.mark.parametrize(
    "make",
    [
        lambda: DP(flower.FedAvg(), 0.01, 1.0, 3),
        lambda: flower.DifferentialPrivacyClientSideFixedClipping(flower.FedAvg(), 0.01, 1.0, 3),
        lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAvg(), 0.1, 3),
        lambda: Wrapper(flower.FedAdam()),
    ],
)
def test_wraps_flowers_own_wrappers(make):
    grid = paper_grid(faults=[Fault(4, "errs", 3, 3), Fault(5, "garbage", 2, 2)])
    result = TiFL(make(), 3, policy="uniform", profiling="phase").start(
        grid, toy_arrays(buffer=False), 5
    )
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_profiles_inside_flowers_own_wrapper():
    tifl = training_tifl(3, policy="uniform")
    result = DP(tifl, 0.01, 1.0, 3).start(paper_grid(), toy_arrays(buffer=False), num_rounds=3)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert len(tifl.tiers.members) == 5


def saved_after(num_rounds, grid, **settings):
    tifl = make_tifl(**settings)
    tifl.start(grid, toy_arrays(), num_rounds)
    return tifl.state_dict()


@pytest.mark.parametrize("profile", [True, False])
def test_resume_finds_nodes_by_asking_once(profile):
    state = saved_after(2, Answers(4, app=toy_app(profile=profile)))
    grid, tifl = Answers(4, app=toy_app(profile=profile)), make_tifl()
    tifl.load_state_dict(state)
    result = tifl.start(grid, toy_arrays(), 5)
    asked = [kind for _, kind in grid.asked[:5]]
    assert asked.count(PROFILE) == (4 if profile else 1)
    assert asked.count("train") == (1 if profile else 4)
    assert [kind for _, kind in grid.asked].count("train") == (10 if profile else 14)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert tifl.failures.failures == {}


def test_resume_logs_that_no_node_is_found(caplog):
    state, tifl = saved_after(2, Answers(4)), make_tifl()
    tifl.load_state_dict(state)
    tifl.start(Answers(4, lambda partition, message: True), toy_arrays(), 0)
    assert "none of the 4 nodes with a tier was found again among 4 online" in caplog.text


def test_node_that_joined_before_the_resume_is_placed():
    grid, tifl = Answers(4), make_tifl()
    tifl.load_state_dict(saved_after(2, grid))
    grid.join(DeviceProfile(2.5))
    tifl.start(grid, toy_arrays(), 5)
    assert "node-4" in tifl.tiers.tier


def test_state_of_another_version_is_refused():
    state = make_tifl().state_dict()
    for entry in state:
        damaged = {key: value for key, value in state.items() if key != entry}
        with pytest.raises(ValueError, match=f"state of TiFL must hold {entry}"):
            make_tifl().load_state_dict(damaged)


# --- refusals --------------------------------------------------------------------------


def accounted():
    inner = DP(flower.FedAvg(), 0.1, 1.0, num_sampled_clients=3)
    inner.accountant = type("Accountant", (), {"config": None})()
    return inner


PHASE = {"profiling": "phase"}
BORROW = {"clients_per_round": 3, "on_small_tier": "borrow"}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"num_tiers": 0}, "num_tiers must be a whole number of at least 1"),
        ({"clients_per_round": None}, "clients_per_round must be a whole number of at least 1"),
        ({"interval": 0}, "interval must be a whole number of at least 1"),
        ({**PHASE, "sync_rounds": 0}, "sync_rounds must be a whole number of at least 1"),
        ({**PHASE, "warmup_rounds": -1}, "warmup_rounds must be a whole number of at least 0"),
        ({"sync_rounds": 1}, "sync_rounds must be left out, .*: or give profiling='phase' too"),
        ({"warmup_rounds": 0}, "warmup_rounds must be left out, for nodes are timed in training"),
        ({"profiling": "never"}, "profiling must be one of training, phase, got 'never'"),
        ({"strategy": accounted(), **BORROW}, "profiling must be 'phase' where privacy is acc"),
        ({"profile_interval": 0}, "profile_interval must be a whole number of at least 1"),
        ({"max_failures": 0}, "max_failures must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"t_max": 0}, r"t_max must be a number in \(0, inf\)"),
        ({"policy": "warp"}, "policy must be one of adaptive, algorithm-2, .* got 'warp'"),
        ({"policy": [0.5, 0.5]}, "policy must have num_tiers=5 entries"),
        ({"credits": 0}, "credits must be a whole number of at least 1"),
        ({"credits": "paced"}, "credits must be a whole number of at least 1, got 'p'"),
        ({"credits": [3, 2]}, "credits must have num_tiers=5 entries"),
        ({"credits": 3, "policy": "paced"}, "credits must be None, for policy 'paced' has its"),
        ({"tiering": "kmeans"}, "tiering must be one of quantile, histogram, got 'kmeans'"),
        ({"on_small_tier": "skip"}, "on_small_tier must be one of shrink, borrow, got 'skip'"),
        ({"strategy": accounted(), "on_small_tier": "borrow", **PHASE}, "num_sampled_clients must"),
        ({"strategy": accounted(), "clients_per_round": 3}, "num_sampled_clients must"),
    ],
)
def test_bad_settings_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        TiFL(**settings)


def test_accounting_works_with_rounds_of_one_size():
    assert TiFL(accounted(), **BORROW, **PHASE).clients_per_round == 3


def test_more_tiers_than_nodes_are_refused():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3)
    with pytest.raises(ValueError, match="num_tiers must be at most the number of nodes, 3, got 5"):
        records_of(TiFL(), grid)
