"""Each app on emulated nodes in this process: what every setting does, and what is survived."""

import numpy as np
import pytest
from app_run import AppRun

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid

REFERENCE = [DeviceProfile(seconds_per_example=1e-3)] * 3
SLOW_LINK = [DeviceProfile(uplink_mbps=10, downlink_mbps=10, seconds_per_example=1e-4)] * 3
COMMON = {
    "biased-local-sgd": (5, {"model": "softmax", "fast_steps": 8}),
    "cd-grab": (4, {"batch_size": 16}),
    "mercury": (SLOW_LINK, {"model": "softmax", "local_steps": 3, "partition": "iid"}),
    "pgd": (REFERENCE, {"model": "softmax", "partition": "iid", "look_every": 0}),
}
"""Nodes and settings of an app, where a test says nothing else."""


def start(name, profiles=None, **settings):
    usual, common = COMMON[name]
    return AppRun(name, profiles or usual, **common | settings)


# --- every setting --------------------------------------------------------------------------


BY_SPEED = ("biased", "weights-bias", "sampling-bias", "unbalanced", "fednova")
STEPS = {name: [8, 8, 8, 8, 1] for name in BY_SPEED} | {"balanced": [8] * 5, "sync-sgd": [1] * 5}
"""Steps of each node by the algorithm of biased local SGD."""


@pytest.mark.parametrize(
    ("algorithm", "shared_data"),
    [*((name, False) for name in STEPS), *((name, True) for name in STEPS if name != "fednova")],
)
def test_algorithms_of_biased_local_sgd(algorithm, shared_data):
    run = start("biased-local-sgd", algorithm=algorithm, shared_data=shared_data)
    record = run.go_on(3)[-1]
    assert run.evaluate()["accuracy"] > 0.1 + (0.02 if algorithm == "sync-sgd" else 0.3)
    own = next(info for info in record.values() if isinstance(info, dict) and "num_steps" in info)
    assert list(own["num_steps"].values()) == STEPS[algorithm]
    most_s = 3 * (8 if algorithm == "balanced" else 1) * 16 * 0.01  # the last batch is smaller
    assert 0.95 * most_s < run.grid.virtual_time_s < 1.0001 * most_s


@pytest.mark.parametrize("method", ["cd-grab", "id-grab", "d-rr", "shuffle-once"])
def test_methods_of_cd_grab(method):
    run = start("cd-grab", method=method)
    records = run.go_on(4)
    assert run.evaluate()["accuracy"] > 0.8
    assert all(record["herding"]["herding_bound"] > 0 for record in records)
    steps = round(0.9 * 1438 / 4 / 16)
    assert records[-1]["train"]["num-steps"] == steps
    pairs = {"cd-grab": 4 * (steps // 2)}.get(method)
    assert records[-1].get("cd_grab", {}).get("pairs_together") == pairs


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        ({"unit": "example", "sketch_size": 64, "local_epochs": 2}, 2 * 162 + 2 * 161),
        ({"mode": "exact"}, 4),
        ({"num_units": 6, "partition": "quantity"}, 4 * 3),
        ({"fraction_train": 0.5, "measure": False}, 2 * 10),
        ({"inner": "fedadam", "model": "cnn", "sketch_size": 256}, 4 * 10),
    ],
)
def test_settings_of_cd_grab(settings, pairs):
    run = start("cd-grab", **settings)
    assert run.go_on(2)[-1]["cd_grab"]["pairs"] == pairs
    assert np.isfinite(run.evaluate()["loss"])


@pytest.mark.parametrize(
    ("name", "settings", "rounds", "left", "coverage"),
    [
        ("mercury", {"sampling": "bacc"}, 5, 0.7, 1.0),
        ("mercury", {"sampling": "free"}, 5, 0.7, 0.1),
        ("mercury", {"sampling": "uniform"}, 5, 0.7, None),
        ("mercury", {"estimator": "paper"}, 5, 0.7, 1.0),
        *[("pgd", {"rule": rule}, 4, 0.6, None) for rule in ("stochastic", "topk", "uniform")],
        ("pgd", {"layers": "all", "model": "mlp"}, 4, 0.9, None),
        ("pgd", {"full_pass": True, "rule": "topk"}, 4, 0.9, None),
        ("pgd", {"step_ratio": 0.02, "rule": "topk", "local_steps": 7}, 4, 0.9, None),
        ("pgd", {"step_ratio": 0.02, "rule": "uniform", "local_steps": 7}, 4, 0.9, None),
    ],
)
def test_samplers_learn(name, settings, rounds, left, coverage):
    run = start(name, **settings)
    assert run.loss_ratio(rounds) < left
    last = run.history.records[-1]
    assert coverage is None or last["sampler"]["coverage"] >= coverage
    if "estimator" in settings:
        assert run.state()[keys.PREFIX + "mercury.scalars"]["estimator"] == "paper"
    if "step_ratio" in settings:
        assert last["train"]["examples-processed"] == 7 * round(0.02 * 431)


def test_private_mode_sends_no_single_loss(monkeypatch):
    sent, wait_for = [], LocalGrid.wait_for

    def listen(*args, **kwargs):
        replies = wait_for(*args, **kwargs)
        sent.extend(replies)
        return replies

    monkeypatch.setattr(LocalGrid, "wait_for", listen)
    start("biased-local-sgd").go_on(3)
    assert sent
    for reply in sent:
        assert set(reply.content) == {"arrays", "metrics", "flwr-hetero.timing"}


# --- the clock ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "after", "times", "rel"),
    [
        ("cd-grab", {"method": "d-rr"}, {}, 1 + 5 / 48, 0.01),
        ("cd-grab", {"method": "d-rr", "unit": "example"}, {"unit": "example"}, 2.0, 0.01),
        ("pgd", {"rule": "uniform"}, {"rule": "topk", "layers": "last"}, 1 + 5 / 48, 0.02),
        ("pgd", {"rule": "uniform"}, {"rule": "topk", "layers": "all"}, 4 / 3, 0.03),
        ("mercury", {"sampling": "uniform"}, {"sampling": "free"}, 1.0, 0.02),
        ("mercury", {"sampling": "uniform"}, {"sampling": "bacc"}, 1.0, 0.02),
    ],
)
def test_reading_gradients_costs_time_and_scoring_none(name, before, after, times, rel):
    model = {"model": "mlp"} if name == "pgd" else {}
    took = []
    for settings in (before, after):
        ends = [record["virtual_s"] for record in start(name, **settings, **model).go_on(4)]
        took.append(ends[3] - ends[2])
    assert took[1] / took[0] == pytest.approx(times, rel=rel)


def test_without_a_link_to_wait_for_nothing_is_scored():
    profiles = [DeviceProfile(seconds_per_example=1e-4)] * 3
    assert start("mercury", profiles).go_on(3)[-1]["sampler"]["coverage"] < 0.6


# --- what the history says ------------------------------------------------------------------


def test_history_has_the_hidden_share_of_scoring():
    assert start("mercury", sampling="bacc").go_on(3)[-1]["sampler"]["hidden-share"] == 1.0
    sampler = start("mercury", sampling="free").go_on(3)[-1]["sampler"]
    assert "hidden-share" not in sampler


def test_looks_show_priorities_and_top_shares():
    records = start("pgd", rule="uniform", look_every=2).go_on(4)
    infos = [record.get("sampler", {}) for record in records]
    assert [bool(info) for info in infos] == [True, False, True, False]
    for stats in infos[::2]:
        shares = stats["share-of-loss-decrease"]
        assert list(shares) == ["top 0.5 %", "top 1 %", "top 2 %", "top 5 %"]
        assert 0 < shares["top 0.5 %"] < shares["top 5 %"]
        low, middle, high = stats["priority-over-mean-size"].values()
        assert -5 < low < middle < high < 5


TEXTS = {"dataset": "stdlib", "model": "bag", "learning_rate": 0.5}


@pytest.mark.parametrize(("kind", "data"), [("importance", {}), ("random", {}), ("random", TEXTS)])
def test_resharding_moves_samples_and_keeps_sizes(kind, data):
    run = start("mercury", resharding=kind, reshard_share=0.2, reshard_budget=5000, **data)
    sizes = [record["resharding"] for record in run.go_on(7)]
    assert sum(size["swaps"] for size in sizes) > 10
    assert all(size["offered_bytes"] <= 3 * 5000 for size in sizes)
    assert len(run.state()[keys.PREFIX + "shard.arrays"]["slots"].numpy()) > 5
