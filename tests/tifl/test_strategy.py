"""Policies on a fleet, evaluation, compositions, resume, refusals."""

import itertools
import random

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from tifl_toy import PROFILE, Answers, make_tifl, paper_grid, records_of
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import TiFL, Wrapper

TRAIN_ONLY = {"fraction_evaluate": 0.0}
DP = flower.DifferentialPrivacyServerSideFixedClipping


def phased(*args, **settings):
    """TiFL with the paper's phase, so that rounds are alike from the first."""
    return TiFL(flower.FedAvg(**TRAIN_ONLY), *args, profiling="phase", **settings)


def test_round_trains_one_tier_and_costs_its_latency():
    records = records_of(phased(2, policy="uniform"), num_rounds=30)
    tiers = records[0]["tifl"]["tiers"]
    assert tiers == {f"node-{i}": i // 4 for i in range(20)}
    for before, record in itertools.pairwise(records):
        tier = record["tifl"]["tier"]
        assert [tiers[name] for name in record["selected"]] == [tier] * 2
        latency = 1 / (4.0, 2.0, 1.0, 0.5, 0.1)[tier]  # 100 examples at 0.01 s
        assert record["virtual_s"] - before["virtual_s"] == pytest.approx(latency)
    run_s = records[-1]["virtual_s"] - records[0]["virtual_s"]
    assert records[-1]["tifl"]["actual_s"] == pytest.approx(run_s)


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
    records = records_of(phased(2, policy="algorithm-2", interval=5), grid, 6)
    accuracy = [0.9 - 0.1 * tier + gain for tier in range(5)]
    assert records[1]["tifl"]["tier_accuracy"] == pytest.approx(accuracy)
    assert records[5]["tifl"]["tier_probs"] == [0.2] * 5
    assert records[6]["tifl"]["tier_probs"] == pytest.approx(probs)


@pytest.mark.parametrize(
    ("worst", "tier", "low", "high"),
    [
        (0, 0, 37, 43),
        pytest.param(4, 4, 30, 43, marks=pytest.mark.nightly),
        pytest.param(None, 4, 2, 5, marks=pytest.mark.nightly),
    ],
)
def test_adaptive_shares_hold_though_tiers_are_formed_again(worst, tier, low, high):
    """Within about two rounds of the probabilities; accuracies change the slow tier's tenfold."""
    grid = paper_grid(app=reporting_app(lambda tier, r: 0.1 if tier == worst else 0.8))
    records = records_of(TiFL(flower.FedAvg(**TRAIN_ONLY), 2, interval=5), grid, 140)
    counts = np.bincount([r["tifl"]["tier"] for r in records[41:]], minlength=5)
    assert counts == pytest.approx(100 * np.array(records[-1]["tifl"]["tier_probs"]), abs=3)
    assert low <= counts[tier] <= high


def test_paced_periods_hold_the_same_rounds():
    records = records_of(phased(2, policy="paced"), num_rounds=93)
    tiers = [record["tifl"]["tier"] for record in records[1:]]
    for period in np.reshape(tiers, (3, 31)):
        assert np.bincount(period).tolist() == [16, 8, 4, 2, 1]
    assert tiers[:31] != tiers[31:62]


def test_credits_are_caps_of_the_run():
    tifl = phased(2, 2, policy=[0.1, 0.9], credits=[30, 10])
    tiers = [record["tifl"]["tier"] for record in records_of(tifl, num_rounds=40)[1:]]
    assert np.bincount(tiers).tolist() == [30, 10]
    with pytest.raises(ValueError, match="credits must add up to the rounds of the run, 41,"):
        records_of(phased(2, 2, credits=20), num_rounds=41)


def test_same_seed_same_run_whatever_the_node_ids():
    def selected(seed, shift):
        random.seed(shift)  # Flower's own sampling must not matter
        grid = paper_grid()
        # other node ids for the same partitions
        grid._nodes = {node + shift: state for node, state in grid._nodes.items()}
        grid._online = dict.fromkeys(sorted(grid._nodes, key=lambda n: -n))
        records = records_of(phased(3, policy="uniform", seed=seed), grid)
        return [sorted(record["selected"]) for record in records]

    assert selected(1, 0) == selected(1, 7919)
    assert selected(1, 0) != selected(2, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DP(flower.FedAvg(), 0.01, 1.0, 3),
        lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAvg(), 0.1, 3),
        lambda: Wrapper(flower.FedAdam()),
    ],
)
def test_wraps_flowers_own_wrappers(make):
    grid = paper_grid(faults=[Fault(4, "errs", 3, 3), Fault(5, "garbage", 2, 2)])
    tifl = TiFL(make(), 3, policy="uniform", profiling="phase")
    result = tifl.start(grid, toy_arrays(buffer=False), 5)
    assert np.isfinite(result.arrays["w"].numpy()).all()


def resumed_after_two_rounds(grid):
    before = make_tifl()
    tifl = make_tifl()
    before.start(grid, toy_arrays(), 2)
    tifl.load_state_dict(before.state_dict())
    return tifl


@pytest.mark.parametrize("profile", [True, False])
def test_resume_finds_nodes_by_asking_once(profile):
    tifl = resumed_after_two_rounds(Answers(4, app=toy_app(profile=profile)))
    grid = Answers(4, app=toy_app(profile=profile))
    result = tifl.start(grid, toy_arrays(), 5)
    asked = [kind for _, kind in grid.asked[:5]]
    assert asked.count(PROFILE) == (4 if profile else 1)
    assert asked.count("train") == (1 if profile else 4)
    assert [kind for _, kind in grid.asked].count("train") == (10 if profile else 14)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert tifl.timing.blocked == set()


ACCOUNTED = DP(flower.FedAvg(), 0.1, 1.0, num_sampled_clients=3)
ACCOUNTED.accountant = type("Accountant", (), {"config": None})()
PHASE = {"profiling": "phase"}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"num_tiers": 0}, "num_tiers must be a whole number of at least 1"),
        ({"clients_per_round": None}, "clients_per_round must be a whole number of at least 1"),
        ({"interval": 0}, "interval must be a whole number of at least 1"),
        ({**PHASE, "sync_rounds": 0}, "sync_rounds must be a whole number of at least 1"),
        ({**PHASE, "warmup_rounds": -1}, "warmup_rounds must be a whole number of at least 0"),
        ({"warmup_rounds": 2}, "sync_rounds must be left out, for nodes are timed in training"),
        ({"profiling": "never"}, "profiling must be one of training, phase, got 'never'"),
        ({"profile_interval": 0}, "profile_interval must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"policy": "warp"}, "policy must be one of adaptive, algorithm-2, .* got 'warp'"),
        ({"policy": [0.5, 0.5]}, "policy must have num_tiers=5 entries"),
        ({"policy": [[0.5, 0.5]], "num_tiers": 2}, "policy must have num_tiers=2 entries"),
        ({"policy": [0.5, 0.4], "num_tiers": 2}, "policy must hold probabilities that sum to 1"),
        ({"policy": [np.nan, 1.0], "num_tiers": 2}, "policy must hold probabilities"),
        ({"credits": 0}, "credits must be a whole number of at least 1"),
        ({"credits": "paced"}, "credits must be a whole number of at least 1, got 'p'"),
        ({"credits": [3, 2]}, "credits must have num_tiers=5 entries"),
        ({"credits": 3, "policy": "paced"}, "credits must be None, for policy 'paced' has its"),
        ({"strategy": ACCOUNTED, "clients_per_round": 3, **PHASE}, "without a privacy accountant"),
    ],
)
def test_bad_settings_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        TiFL(**settings)


def test_more_tiers_than_nodes_are_refused():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3)
    with pytest.raises(ValueError, match="num_tiers must be at most the number of nodes, 3, got 5"):
        records_of(TiFL(), grid)
