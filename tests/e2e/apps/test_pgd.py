import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from recording import History

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "pgd"))
from pgd_app.client_app import app
from pgd_app.task import PGDSettings

ARRAYS, SCALARS = keys.PREFIX + "pgd.arrays", keys.PREFIX + "pgd.scalars"
REFERENCE = DeviceProfile(seconds_per_example=1e-3)


class Run:
    """The app on three emulated nodes; may go on after it was interfered with."""

    def __init__(self, **settings):
        settings = {"model": "softmax", "partition": "iid", "look_every": 0, **settings}
        self.settings = PGDSettings(**settings)
        config = {k.replace("_", "-"): v for k, v in vars(self.settings).items()}
        self.grid = LocalGrid(app, [REFERENCE] * 3, run_config=config)
        self.history = History(self.settings.strategy())
        self.arrays = initial_arrays(self.settings)

    def go_on(self, num_rounds=3):
        self.history.records.clear()
        steps = ConfigRecord(
            {keys.NUM_STEPS: self.settings.local_steps} if self.settings.local_steps else {}
        )
        result = self.history.start(self.grid, self.arrays, num_rounds, train_config=steps)
        self.arrays = result.arrays
        return self.history.records[1:]

    def state(self, node=1000):
        return self.grid.context(node).state


def failures(records):
    return [failure for record in records for failure in record["failures"]]


@pytest.mark.parametrize("rule", ["stochastic", "topk", "uniform"])
def test_every_rule_learns(rule):
    run = Run(rule=rule)
    before = central_evaluate(run.settings)(0, run.arrays)["loss"]
    assert not failures(run.go_on(4))
    assert central_evaluate(run.settings)(0, run.arrays)["loss"] < 0.6 * before


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": "all", "model": "mlp"},
        {"direction": "global"},
        {"full_pass": True, "rule": "topk"},
        {"step_ratio": 0.02, "rule": "topk", "local_steps": 7},
        {"step_ratio": 0.02, "rule": "uniform", "local_steps": 7},
        {"gate": 0.0},
    ],
)
def test_every_option_learns(settings):
    run = Run(**settings)
    before = central_evaluate(run.settings)(0, run.arrays)["loss"]
    records = run.go_on(3)
    assert not failures(records)
    assert central_evaluate(run.settings)(0, run.arrays)["loss"] < 0.9 * before
    if "step_ratio" in settings:
        assert records[-1]["train"]["examples-processed"] == 7 * round(0.02 * 431)


def test_one_node_is_a_fleet():
    run = Run()
    run.grid = LocalGrid(app, [REFERENCE], run_config=run.grid.context(1000).run_config)
    assert not failures(run.go_on(1))


def test_what_was_learned_outlives_the_round():
    run = Run(rule="topk", local_steps=3)
    coverage = [record["sampler"]["coverage"] for record in run.go_on(3)]
    assert coverage[0] < coverage[1] < coverage[2]
    turns = run.state()[SCALARS]["turns"]
    assert turns == 9 * 16


def test_all_layers_cost_a_forward_pass():
    times = {}
    for layers in ("last", "all"):
        run = Run(layers=layers, model="mlp", rule="topk")
        times[layers] = run.go_on(2)[-1]["virtual_s"]
    uniform = Run(rule="uniform", model="mlp").go_on(2)[-1]["virtual_s"]
    assert times["last"] == pytest.approx(uniform, rel=0.02)
    assert times["all"] == pytest.approx(4 / 3 * uniform, rel=0.03)


def test_global_direction_is_the_last_server_update():
    run = Run(direction="global", local_steps=1)
    run.go_on(1)
    first = run.state()[keys.PREFIX + "pgd-received.arrays"]["1.weight"].numpy()
    run.go_on(1)
    second = run.state()[keys.PREFIX + "pgd-received.arrays"]["1.weight"].numpy()
    assert not np.array_equal(first, second)
    arrays = run.arrays.to_torch_state_dict()
    run.grid.context(1000).run_config["learning-rate"] = 1e-9
    sampler_before = run.state()[ARRAYS]["gradient.1.weight"].numpy()
    run.go_on(1)
    after = run.state()[ARRAYS]["gradient.1.weight"].numpy()
    moved = second - arrays["1.weight"].numpy()
    assert cosine(after, moved) > 0.9 > cosine(sampler_before, moved)


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("damage", ["lost", "scalars lost", "gradient lost", "other data"])
def test_a_lost_or_damaged_state_is_rebuilt(damage, caplog):
    run = Run(rule="topk")
    run.go_on(2)
    state = run.state()
    if damage in ("lost", "scalars lost"):
        del state[SCALARS]
    if damage != "scalars lost":
        arrays = dict(state[ARRAYS])
        if damage == "gradient lost":
            del arrays["gradient.1.weight"]
        else:
            arrays["priority"] = Array(np.ones(7))
        state[ARRAYS] = ArrayRecord(arrays)
    with caplog.at_level(logging.WARNING):
        records = run.go_on(2)
    assert not failures(records)
    warned = damage in ("gradient lost", "other data")
    assert ("pgd of earlier rounds not used" in caplog.text) == warned


def test_looks_show_priorities_and_top_shares():
    records = Run(look_every=2).go_on(4)
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
    stats = [record.get("sampler", {}) for record in Run(rule="uniform", look_every=2).go_on(2)]
    assert set(stats[0]) == {"share-of-loss-decrease", "priority-over-mean-size"}
    assert not stats[1]


def test_two_runs_with_one_seed_are_equal():
    results = [Run(rule="stochastic", gate=0.0).go_on(3) for _ in range(2)]
    assert [r["train"] for r in results[0]] == [r["train"] for r in results[1]]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"rule": "best"}, "rule must be one of"),
        ({"layers": "first"}, "layers must be one of"),
        ({"direction": "up"}, "direction must be one of"),
        ({"renewal_share": 0.0}, "renewal_share must be a number in"),
        ({"step_ratio": 1.5}, "step-ratio must be a number in"),
        ({"gate": -1.0}, "gate must be a number in"),
        ({"local_steps": -1}, "local-steps must be a whole number of at least 0"),
        ({"look_every": -1}, "look-every must be a whole number of at least 0"),
        ({"resume": True}, "output-dir must be given"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        PGDSettings(**settings)


# --- a real flwr run ------------------------------------------------------------------------


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_leaves_its_results(flower, tmp_path):
    out = tmp_path / "run"
    log = flower("pgd", 4, num_server_rounds=6, output_dir=out, look_every=3)
    assert f"{out}/report.html" in log, log[-3000:]
    rounds = history(out)
    assert [record["round"] for record in rounds] == list(range(7))
    assert rounds[-1]["global"]["accuracy"] > rounds[0]["global"]["accuracy"]
    assert rounds[-1]["sampler"]["coverage"] > rounds[1]["sampler"]["coverage"]
    assert "share-of-loss-decrease" in rounds[4]["sampler"]
    assert not failures(rounds)


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_with_two_nodes(flower, tmp_path):
    out = tmp_path / "run"
    flower("pgd", num_server_rounds=2, output_dir=out, rule="topk")
    assert len(history(out)) == 3
