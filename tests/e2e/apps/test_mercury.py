import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from app_run import AppRun, failures
from flwr.app import Array, ArrayRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.mercury.resharding import offer

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "mercury"))
from mercury_app.client_app import app
from mercury_app.task import MercurySettings

SLOW = DeviceProfile(uplink_mbps=10, downlink_mbps=10, seconds_per_example=1e-4)
ARRAYS, SCALARS = keys.PREFIX + "mercury.arrays", keys.PREFIX + "mercury.scalars"


def start(profile=SLOW, **settings):
    settings = {"model": "softmax", "local_steps": 3, "partition": "iid", **settings}
    return AppRun(app, MercurySettings(**settings), [profile] * 3)


def round_s(sampling):
    """Return how long the fourth round lasts."""
    return np.diff([record["virtual_s"] for record in start(sampling=sampling).go_on(4)])[-1]


@pytest.mark.parametrize(
    ("settings", "coverage"),
    [
        ({"sampling": "bacc"}, 1.0),
        ({"sampling": "free"}, 0.1),
        ({"sampling": "uniform"}, None),
        *[({"estimator": estimator}, 1.0) for estimator in ("flat", "paper")],
    ],
)
def test_every_setting_learns(settings, coverage):
    run = start(**settings)
    assert run.loss_ratio(5) < 0.7
    if coverage is not None:
        assert run.history.records[-1]["sampler"]["coverage"] >= coverage
    if "estimator" in settings:
        assert run.state()[SCALARS]["estimator"] == settings["estimator"]


def test_scoring_costs_no_time():
    uniform_s = round_s("uniform")
    for sampling in ("free", "bacc"):
        assert round_s(sampling) == pytest.approx(uniform_s, rel=0.02)


def test_history_has_the_hidden_share_of_scoring():
    assert start(sampling="bacc").go_on(3)[-1]["sampler"]["hidden-share"] == 1.0
    sampler = start(sampling="free").go_on(3)[-1]["sampler"]
    assert "hidden-share" not in sampler
    deciles = sampler["importance-with-mean-1"]
    assert list(deciles) == ["10 % are below", "50 % are below", "90 % are below"]
    assert deciles["10 % are below"] < deciles["90 % are below"]


def test_group_follows_the_link_within_a_few_rounds():
    run = start(DeviceProfile(uplink_mbps=4, downlink_mbps=4, seconds_per_example=2e-3))
    run.go_on(4)
    before = groups(run)
    for node in run.grid.get_node_ids():
        run.grid.set_profile(
            node, DeviceProfile(uplink_mbps=16, downlink_mbps=16, seconds_per_example=2e-3)
        )
    run.go_on(4)
    assert before > 2.5 * groups(run) > 0


def groups(run):
    return int(run.state()[SCALARS]["group_size"])


def test_without_a_link_to_wait_for_nothing_is_scored():
    records = start(DeviceProfile(seconds_per_example=1e-4)).go_on(3)
    assert records[-1]["sampler"]["coverage"] < 0.6


@pytest.mark.parametrize(
    ("lost", "changed", "warned"),
    [
        ([SCALARS, "importance"], {}, False),
        ([SCALARS], {}, False),
        (["importance"], {}, True),
        ([], {"importance": Array(np.ones(7, np.float32))}, True),
    ],
)
def test_lost_or_damaged_state_is_rebuilt(lost, changed, warned, caplog):
    run = start(sampling="free")
    run.go_on(3)
    state = run.state()
    state[ARRAYS] = ArrayRecord(
        {key: array for key, array in (dict(state[ARRAYS]) | changed).items() if key not in lost}
    )
    if SCALARS in lost:
        del state[SCALARS]
    with caplog.at_level(logging.WARNING):
        assert not failures(run.go_on(2))
    assert ("mercury of earlier rounds not used" in caplog.text) == warned


TEXTS = {"dataset": "stdlib", "model": "bag", "learning_rate": 0.5}


@pytest.mark.parametrize(("kind", "data"), [("importance", {}), ("random", {}), ("random", TEXTS)])
def test_resharding_moves_samples_and_keeps_sizes(kind, data):
    run = start(resharding=kind, reshard_share=0.2, reshard_budget=5000, **data)
    sizes = [dict(r["resharding"]) for r in run.go_on(7)]
    assert sum(r["swaps"] for r in sizes) > 10
    assert all(r["offered_bytes"] <= 3 * 5000 for r in sizes)
    assert not failures(run.history.records)
    shard = run.state()[keys.PREFIX + "shard.arrays"]
    assert len(shard["slots"].numpy()) > 5


@pytest.mark.parametrize("kind", ["importance", "random"])
def test_samples_are_offered_by_known_importance(kind, monkeypatch):
    given = []

    def choose(importance, groups, count, rng):
        given.append(importance.copy())
        return offer(importance, groups, count, rng)

    monkeypatch.setattr("mercury_app.client_app.offer", choose)
    start(resharding=kind).go_on(6)
    assert len(given) == 3
    for importance in given:
        assert (len(np.unique(importance)) > len(importance) / 3) == (kind == "importance")


def test_adacomm_takes_fewer_steps_as_the_loss_falls():
    records = start(communication="adacomm", adapt_every_s=0.0, local_steps=8).go_on(4)
    steps = [record["adacomm"]["num_steps"] for record in records]
    assert steps[0] == 8 > steps[-1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sampling": "best"}, "sampling must be one of"),
        ({"estimator": "best"}, "estimator must be one of"),
        ({"communication": "none"}, "communication must be one of"),
        ({"resharding": "yes"}, "resharding must be one of"),
        ({"resharding": "importance", "sampling": "uniform"}, "resharding must go with a sampling"),
        ({"local_steps": -1}, "local-steps must be a whole number"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        MercurySettings(**settings)
