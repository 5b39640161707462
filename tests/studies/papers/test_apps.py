"""The apps of the studies on emulated nodes: what every setting does, and what is survived."""

import pytest
from app_run import AppRun, settings_of

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid

SLOW_LINK = [DeviceProfile(uplink_mbps=10, downlink_mbps=10, seconds_per_example=1e-4)] * 3
COMMON = {
    "biased-local-sgd": (5, {"model": "softmax", "fast_steps": 8}),
    "mercury": (SLOW_LINK, {"model": "softmax", "local_steps": 3, "partition": "iid"}),
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


@pytest.mark.parametrize(
    ("settings", "coverage"),
    [
        ({"sampling": "bacc"}, 1.0),
        ({"sampling": "free"}, 0.1),
        ({"sampling": "uniform"}, None),
        ({"estimator": "paper"}, 1.0),
    ],
)
def test_sampling_of_mercury_learns(settings, coverage):
    run = start("mercury", **settings)
    assert run.loss_ratio(5) < 0.7
    assert coverage is None or run.history.records[-1]["sampler"]["coverage"] >= coverage
    if "estimator" in settings:
        assert run.state()[keys.PREFIX + "mercury.scalars"]["estimator"] == "paper"


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


@pytest.mark.parametrize("sampling", ["free", "bacc"])
def test_scoring_costs_no_time(sampling):
    seconds = []
    for each in ("uniform", sampling):
        ends = [record["virtual_s"] for record in start("mercury", sampling=each).go_on(4)]
        seconds.append(ends[3] - ends[2])
    assert seconds[1] / seconds[0] == pytest.approx(1.0, rel=0.02)


def test_without_a_link_to_wait_for_nothing_is_scored():
    profiles = [DeviceProfile(seconds_per_example=1e-4)] * 3
    assert start("mercury", profiles).go_on(3)[-1]["sampler"]["coverage"] < 0.6


# --- what the history says ------------------------------------------------------------------


def test_history_has_the_hidden_share_of_scoring():
    assert start("mercury", sampling="bacc").go_on(3)[-1]["sampler"]["hidden-share"] == 1.0
    sampler = start("mercury", sampling="free").go_on(3)[-1]["sampler"]
    assert "hidden-share" not in sampler


TEXTS = {"dataset": "stdlib", "model": "bag", "learning_rate": 0.5}


@pytest.mark.parametrize(("kind", "data"), [("importance", {}), ("random", {}), ("random", TEXTS)])
def test_resharding_moves_samples_and_keeps_sizes(kind, data):
    run = start("mercury", resharding=kind, reshard_share=0.2, reshard_budget=5000, **data)
    sizes = [record["resharding"] for record in run.go_on(7)]
    assert sum(size["swaps"] for size in sizes) > 10
    assert all(size["offered_bytes"] <= 3 * 5000 for size in sizes)
    assert len(run.state()[keys.PREFIX + "shard.arrays"]["slots"].numpy()) > 5


REFUSALS = {
    "biased-local-sgd": [
        ({"algorithm": "fednova", "shared-data": True}, "shared-data must be false with fednova"),
        ({"high-loss-fraction": 1.5}, "high-loss-fraction must be a number in"),
    ],
    "mercury": [
        ({"resharding": "importance", "sampling": "uniform"}, "resharding must go with a sampling"),
    ],
}


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_refusals(name):
    for config, words in REFUSALS[name]:
        with pytest.raises(ValueError, match=words):
            settings_of(name).from_run_config(config)
