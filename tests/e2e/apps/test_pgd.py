import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from app_run import AppRun, failures
from flwr.app import Array, ArrayRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "pgd"))
from pgd_app.client_app import app
from pgd_app.task import PGDSettings

ARRAYS, SCALARS = keys.PREFIX + "pgd.arrays", keys.PREFIX + "pgd.scalars"
REFERENCE = DeviceProfile(seconds_per_example=1e-3)


def start(num_nodes=3, **settings):
    settings = {"model": "softmax", "partition": "iid", "look_every": 0, **settings}
    return AppRun(app, PGDSettings(**settings), [REFERENCE] * num_nodes)


@pytest.mark.parametrize(
    "settings",
    [
        *[{"rule": rule} for rule in ("stochastic", "topk", "uniform")],
        {"layers": "all", "model": "mlp"},
        {"full_pass": True, "rule": "topk"},
        {"step_ratio": 0.02, "rule": "topk", "local_steps": 7},
        {"step_ratio": 0.02, "rule": "uniform", "local_steps": 7},
    ],
)
def test_every_setting_learns(settings):
    run = start(**settings)
    assert run.loss_ratio(4) < (0.6 if settings.keys() == {"rule"} else 0.9)
    if "step_ratio" in settings:
        train = run.history.records[-1]["train"]
        assert train["examples-processed"] == 7 * round(0.02 * 431)


def test_one_node_is_a_fleet():
    assert not failures(start(1).go_on(1))


def test_what_was_learned_outlives_the_round():
    run = start(rule="topk", local_steps=3)
    coverage = [record["sampler"]["coverage"] for record in run.go_on(3)]
    assert coverage[0] < coverage[1] < coverage[2]
    assert run.state()[SCALARS]["position"] == 9 * 16


def test_priorities_are_on_the_clock():
    times = {}
    for layers in ("last", "all"):
        run = start(layers=layers, model="mlp", rule="topk")
        times[layers] = run.go_on(2)[-1]["virtual_s"]
    uniform = start(rule="uniform", model="mlp").go_on(2)[-1]["virtual_s"]
    assert times["last"] == pytest.approx((1 + 5 / 48) * uniform, rel=0.02)
    assert times["all"] == pytest.approx(4 / 3 * uniform, rel=0.03)


@pytest.mark.parametrize(
    ("lost", "changed", "warned"),
    [
        ([SCALARS], {"priority": Array(np.ones(7))}, False),
        ([SCALARS], {}, False),
        (["gradient.1.weight"], {}, True),
        ([], {"priority": Array(np.ones(7))}, True),
    ],
)
def test_lost_or_damaged_state_is_rebuilt(lost, changed, warned, caplog):
    run = start(rule="topk")
    run.go_on(2)
    state = run.state()
    state[ARRAYS] = ArrayRecord(
        {key: array for key, array in (dict(state[ARRAYS]) | changed).items() if key not in lost}
    )
    if SCALARS in lost:
        del state[SCALARS]
    with caplog.at_level(logging.WARNING):
        assert not failures(run.go_on(2))
    assert ("pgd of earlier rounds not used" in caplog.text) == warned


def test_looks_show_priorities_and_top_shares():
    records = start(look_every=2).go_on(4)
    looks = [
        record["sampler"] for record in records if "share-of-loss-decrease" in record["sampler"]
    ]
    assert [r["round"] for r in records if "priority-over-mean-size" in r["sampler"]] == [1, 3]
    for stats in looks:
        shares = stats["share-of-loss-decrease"]
        assert list(shares) == ["top 0.5 %", "top 1 %", "top 2 %", "top 5 %"]
        assert 0 < shares["top 0.5 %"] < shares["top 5 %"]
        low, middle, high = stats["priority-over-mean-size"].values()
        assert -5 < low < middle < high < 5


def test_uniform_sampling_reports_only_the_looks():
    stats = [record.get("sampler", {}) for record in start(rule="uniform", look_every=2).go_on(2)]
    assert set(stats[0]) == {"share-of-loss-decrease", "priority-over-mean-size"}
    assert not stats[1]


def test_two_runs_with_one_seed_are_equal():
    results = [start(rule="stochastic").go_on(3) for _ in range(2)]
    assert [r["train"] for r in results[0]] == [r["train"] for r in results[1]]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rule": "best"}, "rule must be one of"),
        ({"layers": "first"}, "layers must be one of"),
        ({"renewal_share": 0.0}, "renewal_share must be a number in"),
        ({"step_ratio": 1.5}, "step-ratio must be a number in"),
        ({"local_steps": -1}, "local-steps must be a whole number of at least 0"),
        ({"look_every": -1}, "look-every must be a whole number of at least 0"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        PGDSettings(**settings)
