import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from recording import History, history

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mercury.resharding import offer
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "mercury"))
from mercury_app.client_app import app
from mercury_app.task import MercurySettings

SLOW = DeviceProfile(uplink_mbps=10, downlink_mbps=10, seconds_per_example=1e-4)
ARRAYS, SCALARS = keys.PREFIX + "mercury.arrays", keys.PREFIX + "mercury.scalars"


class Run:
    """The app on three emulated nodes; may go on after it was interfered with."""

    def __init__(self, profile=SLOW, **settings):
        settings = {"model": "softmax", "local_steps": 3, "partition": "iid", **settings}
        self.settings = MercurySettings(**settings)
        config = {k.replace("_", "-"): v for k, v in vars(self.settings).items()}
        self.grid = LocalGrid(app, [profile] * 3, run_config=config)
        self.history = History(self.settings.strategy())
        self.arrays = initial_arrays(self.settings)

    def go_on(self, num_rounds=4):
        self.history.records.clear()
        steps = ConfigRecord({keys.NUM_STEPS: self.settings.local_steps})
        result = self.history.start(self.grid, self.arrays, num_rounds, train_config=steps)
        self.arrays = result.arrays
        return self.history.records[1:]

    def round_s(self, num_rounds=4):
        times = [0.0] + [record["virtual_s"] for record in self.go_on(num_rounds)]
        return np.diff(times)[-1]


@pytest.mark.parametrize("sampling", ["bacc", "sequential", "all-inclusive", "free", "uniform"])
def test_every_kind_of_sampling_learns(sampling):
    run = Run(sampling=sampling)
    before = central_evaluate(run.settings)(0, run.arrays)["loss"]
    records = run.go_on(5)
    assert not any(record["failures"] for record in records)
    assert central_evaluate(run.settings)(0, run.arrays)["loss"] < 0.7 * before
    if sampling != "uniform":
        expected = {"free": 0.1}.get(sampling, 1.0)
        assert records[-1]["sampler"]["coverage"] >= expected


@pytest.mark.parametrize("estimator", ["flat", "paper"])
def test_every_estimator_learns(estimator):
    run = Run(estimator=estimator)
    before = central_evaluate(run.settings)(0, run.arrays)["loss"]
    assert not any(record["failures"] for record in run.go_on(3))
    assert central_evaluate(run.settings)(0, run.arrays)["loss"] < 0.9 * before
    assert run.grid.context(1000).state[SCALARS]["estimator"] == estimator


def test_scoring_costs_time_only_before_training():
    uniform_s = Run(sampling="uniform").round_s()
    assert Run(sampling="free").round_s() == pytest.approx(uniform_s, rel=0.02)
    assert Run(sampling="bacc").round_s() == pytest.approx(uniform_s, rel=0.02)
    assert Run(sampling="sequential").round_s() > 1.2 * uniform_s
    assert Run(sampling="all-inclusive").round_s() > 1.2 * uniform_s


def test_history_has_the_hidden_share_of_scoring():
    assert Run(sampling="bacc").go_on(3)[-1]["sampler"]["hidden-share"] == 1.0
    assert Run(sampling="sequential").go_on(3)[-1]["sampler"]["hidden-share"] == 0.0
    sampler = Run(sampling="free").go_on(3)[-1]["sampler"]
    assert "hidden-share" not in sampler
    deciles = sampler["importance-with-mean-1"]
    assert list(deciles) == ["10 % are below", "50 % are below", "90 % are below"]
    assert deciles["10 % are below"] < deciles["90 % are below"]


def test_group_follows_the_link_within_a_few_rounds():
    run = Run(DeviceProfile(uplink_mbps=4, downlink_mbps=4, seconds_per_example=2e-3))
    run.go_on(4)
    before = groups(run)
    for node in run.grid.get_node_ids():
        run.grid.set_profile(
            node, DeviceProfile(uplink_mbps=16, downlink_mbps=16, seconds_per_example=2e-3)
        )
    run.go_on(4)
    assert before > 2.5 * groups(run) > 0


def groups(run):
    return int(run.grid.context(1000).state[SCALARS]["group_size"])


def test_without_a_link_to_wait_for_nothing_is_scored():
    records = Run(DeviceProfile(seconds_per_example=1e-4)).go_on(3)
    assert records[-1]["sampler"]["coverage"] < 0.6


@pytest.mark.parametrize("damage", ["lost", "scalars lost", "importance lost", "other data"])
def test_a_lost_or_damaged_state_is_rebuilt(damage, caplog):
    run = Run(sampling="free")
    run.go_on(3)
    state = run.grid.context(1000).state
    if damage in ("lost", "scalars lost"):
        del state[SCALARS]
    if damage in ("lost", "importance lost"):
        arrays = dict(state[ARRAYS])
        del arrays["importance"]
        state[ARRAYS] = ArrayRecord(arrays)
    if damage == "other data":
        state[ARRAYS] = ArrayRecord(
            dict(state[ARRAYS]) | {"importance": Array(np.ones(7, np.float32))}
        )
    with caplog.at_level(logging.WARNING):
        records = run.go_on(2)
    assert not any(record["failures"] for record in records)
    assert ("mercury of earlier rounds not used" in caplog.text) == (damage[-4:] != "lost" or
        damage == "importance lost")  # fmt: skip


@pytest.mark.parametrize("kind", ["importance", "random"])
def test_resharding_moves_samples_and_keeps_sizes(kind):
    run = Run(resharding=kind, reshard_share=0.2, reshard_budget=5000)
    sizes = [dict(r["resharding"]) for r in run.go_on(7)]
    assert sum(r["swaps"] for r in sizes) > 10
    assert all(r["offered_bytes"] <= 3 * 5000 for r in sizes)
    assert not any(record["failures"] for record in run.history.records)
    shard = run.grid.context(1000).state[keys.PREFIX + "shard.arrays"]
    assert len(shard["slots"].numpy()) > 5


@pytest.mark.parametrize("kind", ["importance", "random"])
def test_samples_are_offered_by_known_importance(kind, monkeypatch):
    given = []

    def choose(importance, groups, count, rng):
        given.append(importance.copy())
        return offer(importance, groups, count, rng)

    monkeypatch.setattr("mercury_app.client_app.offer", choose)
    Run(resharding=kind).go_on(6)
    assert len(given) == 3
    for importance in given:
        assert (len(np.unique(importance)) > len(importance) / 3) == (kind == "importance")


def test_adacomm_takes_fewer_steps_as_the_loss_falls():
    records = Run(communication="adacomm", adapt_every_s=0.0, local_steps=8).go_on(4)
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
        ({"mixing": 0.0}, "mixing must be a number in"),
        ({"gate": -1.0}, "gate must be a number in"),
        ({"local_steps": -1}, "local-steps must be a whole number"),
        ({"resume": True}, "output-dir must be given"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        MercurySettings(**settings)


# --- a real flwr run ------------------------------------------------------------------------


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_leaves_its_results(flower, tmp_path):
    out = tmp_path / "run"
    log = flower("mercury", 4, num_server_rounds=8, output_dir=out, resharding="importance")
    assert f"{out}/report.html" in log, log[-3000:]
    rounds = history(out)
    assert [record["round"] for record in rounds] == list(range(9))
    assert rounds[-1]["global"]["accuracy"] > rounds[0]["global"]["accuracy"]
    assert rounds[-1]["sampler"]["coverage"] == 1.0
    assert not any(record["failures"] for record in rounds)


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_with_two_nodes(flower, tmp_path):
    out = tmp_path / "run"
    flower("mercury", num_server_rounds=2, output_dir=out, sampling="uniform")
    assert len(history(out)) == 3
