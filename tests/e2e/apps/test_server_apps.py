"""Each app's ServerApp on an emulated fleet in this process: quick, and without `flwr run`."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from recording import history

from flwr_hetero.fleet import LocalGrid, named_fleet

APPS = Path(__file__).parents[3] / "apps"
COPIED = ["tifl", "biased-local-sgd", "cd-grab", "mercury", "pgd", "fedslice"]


def run(name, out, num_nodes=2, **changes):
    """Run an app with its own defaults but few rounds, and give its history."""
    app = tomllib.loads((APPS / name / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = app["config"] | {"num-server-rounds": 2, "output-dir": str(out)}
    config |= {key.replace("_", "-"): value for key, value in changes.items()}
    assert config.keys() == app["config"].keys()
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


@pytest.mark.parametrize("name", [*COPIED, "fleet"])
def test_two_nodes_are_enough(name, tmp_path):
    history = run(name, tmp_path / "run")
    assert [record["round"] for record in history] == [0, 1, 2]
    assert not any(record["failures"] for record in history), history


def test_tifl_is_compared_with_random_selection(tmp_path):
    def times(rounds):
        return [(round(record["virtual_s"], 6), record["global"]) for record in rounds]

    out = tmp_path / "run"
    alone = tmp_path / "alone"
    both = times(run("tifl", out, 4, num_server_rounds=6))
    assert both == times(run("tifl", alone, 4, num_server_rounds=6, baseline=False))
    # 0.4 times as many rounds, rounded up
    vanilla = run("tifl", tmp_path / "vanilla", 4, policy="vanilla", num_server_rounds=3)
    assert times(history(out / "baseline")) == times(vanilla)
    text = (out / "compare.html").read_text()
    assert "policy=adaptive" in text
    assert "policy=vanilla" in text
    assert not (alone / "compare.html").exists()
    assert times(run("tifl", out, 4, num_server_rounds=6, resume=True)) == both


def test_settings_are_refused_before_the_baseline_trains(tmp_path):
    with pytest.raises(ValueError, match="policy must be one of"):
        run("tifl", tmp_path / "run", policy="fastest")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="output-dir must be an absolute path"):
        run("tifl", "run")


def test_fast_nodes_take_more_steps_in_biased_local_sgd(tmp_path):
    last = run("biased-local-sgd", tmp_path, 5, num_server_rounds=3)[-1]
    assert list(last["biased_local_sgd"]["num_steps"].values()) == [32, 32, 32, 32, 1]
    assert last["global"]["accuracy"] > 0.6


def test_private_data_leave_no_loss_of_a_single_sample(tmp_path, monkeypatch):
    sent = []
    wait_for = LocalGrid.wait_for

    def listen(*args, **kwargs):
        replies = wait_for(*args, **kwargs)
        sent.extend(replies)
        return replies

    monkeypatch.setattr(LocalGrid, "wait_for", listen)
    run("biased-local-sgd", tmp_path / "run", num_server_rounds=3)
    assert sent
    for reply in sent:
        names = {"arrays", "metrics", "flwr-hetero.timing", "flwr-hetero.work"}
        assert set(reply.content) == names
        records = (reply.content[name] for name in sorted(names - {"arrays"}))
        values = [value for record in records for value in record.values()]
        assert all(isinstance(value, int | float | str) for value in values), "no lists, no bytes"


@pytest.mark.parametrize("method", ["cd-grab", "id-grab", "d-rr", "shuffle-once"])
def test_orders_of_cd_grab(method, tmp_path):
    last = run("cd-grab", tmp_path, 4, method=method)[-1]
    assert last["global"]["accuracy"] > 0.8
    steps = round(1437 / 4 / 4)
    pairs = last.get("cd_grab", {}).get("pairs_together")
    assert pairs == (4 * (steps // 2) if method == "cd-grab" else None)


def test_mercury_scores_all_images_while_the_network_is_busy(tmp_path):
    sampler = run("mercury", tmp_path, 4, num_server_rounds=8)[-1]["sampler"]
    assert sampler["coverage"] == 1.0


@pytest.mark.parametrize("rule", ["stochastic", "topk", "uniform"])
def test_rules_of_pgd(rule, tmp_path):
    last = run("pgd", tmp_path, 4, rule=rule, num_server_rounds=4)[-1]
    assert last["global"]["accuracy"] > 0.5
    assert ("coverage" in last.get("sampler", {})) == (rule != "uniform")


def test_fedslice_does_not_wait_for_the_slowest_node(tmp_path):
    seconds = {
        name: run("fedslice", tmp_path / name, 5, strategy=name)[-1]["virtual_s"]
        for name in ("fedavg", "fedslice")
    }
    assert seconds["fedslice"] < seconds["fedavg"] / 4
    few = run("fedslice", tmp_path / "few", 5, concurrency=2)[-1]
    assert few["virtual_s"] > seconds["fedslice"]


def test_images_come_from_a_folder_of_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(str(APPS / "tifl"))
    splits = importlib.import_module("tifl_app.task").load_splits("digits")
    for split, rows in splits.items():
        (tmp_path / "digits").mkdir(exist_ok=True)
        rows.rename_column("image", "img").to_parquet(tmp_path / "digits" / f"{split}.parquet")
    dataset = str(tmp_path / "digits")
    last = run("cd-grab", tmp_path / "run", 4, dataset=dataset)[-1]
    assert last["global"]["accuracy"] > 0.8
