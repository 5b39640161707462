"""Each app's ServerApp on an emulated fleet in this process: quick, and without `flwr run`."""

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid

APPS = Path(__file__).parents[3] / "apps"
NAMES = ("tifl", "biased-local-sgd", "cd-grab", "mercury", "fleet")


def run(name, out, num_nodes=2, **changes):
    """Run an app with its own defaults but few rounds, and give its history."""
    app = tomllib.loads((APPS / name / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = app["config"] | {"model": "softmax", "num-server-rounds": 2, "output-dir": str(out)}
    config |= changes
    sys.path.insert(0, str(APPS / name))
    server, client = (
        importlib.import_module(app["components"][side].partition(":")[0])
        for side in ("serverapp", "clientapp")
    )
    grid = LocalGrid(client.app, named_fleet(config["fleet"], num_nodes), run_config=config)
    server.main(grid, Context(1, 1, {}, RecordDict(), config))
    return history(out)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", NAMES)
def test_two_nodes_are_enough(name, tmp_path):
    history = run(name, tmp_path / "run")
    assert [record["round"] for record in history] == [0, 1, 2]
    assert not any(record["failures"] for record in history), history


def test_tifl_is_compared_with_random_selection(tmp_path):
    out, alone = tmp_path / "run", tmp_path / "alone"
    both = run("tifl", out, 4)
    assert times(both) == times(run("tifl", alone, 4, baseline=False))
    shorter = {"num-server-rounds": 1}  # 0.4 times as many rounds, rounded up
    vanilla = run("tifl", tmp_path / "vanilla", 4, policy="vanilla", **shorter)
    assert times(history(out / "baseline")) == times(vanilla)
    assert "policy=adaptive" in (text := (out / "compare.html").read_text())
    assert "policy=vanilla" in text
    assert not (alone / "compare.html").exists()
    resumed = run("tifl", out, 4, resume=True)
    assert times(resumed) == times(both)


def times(rounds):
    return [(record["virtual_s"], record["global"]) for record in rounds]


def history(out):
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_random_nodes_are_as_many_as_there_are(tmp_path):
    history = run("fleet", tmp_path / "run", engine="rounds", selection="random")
    assert [len(record["selected"]) for record in history[1:]] == [2, 2]


def test_fedslice_is_the_default_of_the_fleet(tmp_path):
    history = run("fleet", tmp_path / "run", 4, **{"fraction-evaluate": 1.0})
    assert all(record["fedslice"]["updates"] > 1 for record in history[1:])
    assert history[-1]["fairness"]["nodes"] == 4


def test_buffered_engine(tmp_path):
    parts = {"engine": "buffered", "selection": "all", "steps": "slice", "order": "id-grab"}
    history = run("fleet", tmp_path / "run", 4, **parts, **{"fraction-evaluate": 1.0})
    assert [len(record["fedbuff"]["nodes"]) for record in history[1:]] == [3, 3]
    assert history[-1]["fairness"]["nodes"] == 4


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("tifl", "clients-per-round"), ("tifl", "num-tiers")),
        *(("biased-local-sgd", "fast-steps"), ("cd-grab", "sketch-size"), ("fleet", "fast-steps")),
    ],
)
def test_refusals_name_the_run_config_key(name, key, tmp_path):
    with pytest.raises(ValueError, match=f"^{key} must be "):
        run(name, tmp_path / "run", **{key: 0})
    assert not (tmp_path / "run").exists()
