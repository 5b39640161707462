"""Each app's ServerApp on an emulated fleet in this process: quick, and without `flwr run`."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from recording import history

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid

APPS = Path(__file__).parents[3] / "apps"


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


@pytest.mark.parametrize("name", ["tifl", "biased-local-sgd", "cd-grab", "mercury", "fleet"])
def test_two_nodes_are_enough(name, tmp_path):
    history = run(name, tmp_path / "run")
    assert [record["round"] for record in history] == [0, 1, 2]
    assert not any(record["failures"] for record in history), history


def test_tifl_is_compared_with_random_selection(tmp_path):
    def times(rounds):
        return [(record["virtual_s"], record["global"]) for record in rounds]

    out, alone = tmp_path / "run", tmp_path / "alone"
    both = times(run("tifl", out, 4))
    assert both == times(run("tifl", alone, 4, baseline=False))
    shorter = {"num-server-rounds": 1}  # 0.4 times as many rounds, rounded up
    vanilla = run("tifl", tmp_path / "vanilla", 4, policy="vanilla", **shorter)
    assert times(history(out / "baseline")) == times(vanilla)
    assert "policy=adaptive" in (text := (out / "compare.html").read_text())
    assert "policy=vanilla" in text
    assert not (alone / "compare.html").exists()
    assert times(run("tifl", out, 4, resume=True)) == both
