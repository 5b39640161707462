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


def run(name, out, num_nodes=2, **changes):
    """Run an app with its own defaults but few rounds; return its history, without failures."""
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
    records = history(out)
    assert [record["round"] for record in records] == [*range(config["num-server-rounds"] + 1)]
    assert not any(record["failures"] for record in records), records
    return records


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_two_nodes_are_enough(tmp_path):
    """Most of the other apps have two nodes below."""
    run("fleet", tmp_path)


def test_tifl_is_compared_with_random_selection(tmp_path):
    def times(records):
        return [(round(record["virtual_s"], 6), record["global"]) for record in records]

    out = tmp_path / "run"
    alone = tmp_path / "alone"
    both = times(run("tifl", out))
    assert both == times(run("tifl", alone, baseline=False))
    # 0.4 times as many rounds, rounded up
    vanilla = run("tifl", tmp_path / "vanilla", policy="vanilla", num_server_rounds=1)
    assert times(history(out / "baseline")) == times(vanilla)
    text = (out / "compare.html").read_text()
    assert "adaptive against vanilla" in text
    assert not (alone / "compare.html").exists()
    assert times(run("tifl", out, resume=True)) == both


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
    wait_for_next = LocalGrid.wait_for_next

    def listen(*args, **kwargs):
        replies = wait_for_next(*args, **kwargs)
        sent.extend(replies)
        return replies

    monkeypatch.setattr(LocalGrid, "wait_for_next", listen)
    run("biased-local-sgd", tmp_path / "run")
    assert sent
    for reply in sent:
        names = {"arrays", "metrics", "flwr-hetero.timing", "flwr-hetero.work"}
        assert set(reply.content) == names
        records = (reply.content[name] for name in sorted(names - {"arrays"}))
        values = [value for record in records for value in record.values()]
        assert all(isinstance(value, int | float | str) for value in values), "no lists, no bytes"


def test_mercury_scores_all_images_while_the_network_is_busy(tmp_path):
    sampler = run("mercury", tmp_path, num_server_rounds=8)[-1]["sampler"]
    assert sampler["coverage"] == 1.0


@pytest.mark.parametrize("rule", ["stochastic", pytest.param("uniform", marks=pytest.mark.nightly)])
def test_rules_of_pgd(rule, tmp_path):
    last = run("pgd", tmp_path, rule=rule)[-1]
    assert last["global"]["accuracy"] > 0.5
    assert ("coverage" in last.get("sampler", {})) == (rule != "uniform")


def test_fedslice_does_not_wait_for_the_slowest_node(tmp_path):
    def seconds(**settings):
        folder = tmp_path / "-".join(map(str, settings.values()))
        return run("fedslice", folder, 5, **settings)[-1]["virtual_s"]

    sliced_s = seconds(strategy="fedslice")
    assert sliced_s < seconds(strategy="fedavg") / 4


@pytest.mark.parametrize("method", ["cd-grab", pytest.param("d-rr", marks=pytest.mark.nightly)])
def test_orders_of_images_from_a_folder_of_parquet(method, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(str(APPS / "tifl"))
    splits = importlib.import_module("tifl_app.task").load_splits("digits")
    folder = tmp_path / "digits"
    folder.mkdir()
    for split, rows in splits.items():
        rows.rename_column("image", "img").to_parquet(folder / f"{split}.parquet")
    last = run("cd-grab", tmp_path / "run", method=method, dataset=str(folder))[-1]
    assert last["global"]["accuracy"] > 0.8
    steps = round(1437 / 2 / 4)
    pairs = last.get("cd_grab", {}).get("pairs_together")
    assert pairs == (2 * (steps // 2) if method == "cd-grab" else None)
