"""Runs in which nodes do not wait, without rounds and with: history, page and comparison."""

import json
import re

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from steps_toy import steps_app
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.report import RunDirectory, read_history
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.nodes import node_stats
from flwr_hetero.report.page import run_data
from flwr_hetero.strategy import FedBuff, FedSlice, Recorded


def record_run(path, strategy, num_rounds, app=None, faults=()):
    strategy = Recorded(strategy, run_dir=RunDirectory(path, {}))
    speeds = [DeviceProfile(speed) for speed in (4.0, 4.0, 1.0, 0.5)]
    grid = LocalGrid(app or toy_app(), speeds, faults=faults)
    metrics = [MetricRecord({"accuracy": min(0.1 * i, 0.9)}) for i in range(num_rounds + 1)]
    strategy.start(grid, toy_arrays(), num_rounds, evaluate_fn=lambda i, _: metrics[i])
    return read_history(path)


@pytest.fixture(autouse=True, scope="module")
def no_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory, no_report):
    """Write a run without rounds, one of rounds and one of rounds of slices, of one fleet."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "buffered", FedBuff(buffer_size=2), 30)
    record_run(folder / "rounds", FedAvg(), 12)
    app = steps_app(mods=[emulated_device])
    record_run(folder / "slices", FedSlice(FedAvg(fraction_evaluate=0.0)), 12, app)
    return folder


def in_updates(history):
    return [name for record in history.rounds[1:] for name in record["fedbuff"]["nodes"]]


def test_page_speaks_of_updates_or_rounds(runs):
    data = run_data(runs / "buffered")
    assert "Time of each server update" in {panel["title"] for panel in data["panels"]}
    texts = json.dumps(data).replace('"key": "round"', "").replace('"round": ', "")
    assert not re.findall(r".{30}\brounds?\b", texts.lower())
    sliced = run_data(runs / "slices")
    assert "Time of each round" in {panel["title"] for panel in sliced["panels"]}


@pytest.mark.parametrize("name", ["buffered", "slices"])
def test_every_reply_is_counted(runs, name):
    """Also of a node that is in a line several times."""
    history = read_history(runs / name)
    names = in_updates(history)
    counts = {node: names.count(node) for node in set(names)}
    assert {node.identity: node.selected for node in node_stats(history)} == counts
    for key in ("staleness", "age_s"):
        rows = [record["fedbuff"][key] for record in history.rounds[1:]]
        expected = [[min(row), np.median(row), max(row)] for row in rows]
        np.testing.assert_allclose(history.range_of(f"fedbuff/{key}")[1:], expected)


def axes_of(compared):
    return {axis["key"]: axis["label"] for axis in comparison_data(compared)["curves"]["axes"]}


def test_rounds_and_updates_are_compared_by_time(runs):
    both = read_runs([runs / "rounds", runs / "buffered"])
    compared = compare(both, target=0.85)
    assert compared.sentences[0].startswith("buffered is 8.1x faster than rounds: ")
    assert "A server update takes " in compared.sentences[0]
    assert "round" not in axes_of(compared)
    with pytest.raises(ValueError, match="rounds and server updates are not compared"):
        compare(both, clock="round")
    alone = compare(both[1:], clock="round", target=0.85)
    assert alone.groups[0].results[0].to_target == 9.0
    assert axes_of(alone)["round"] == "server updates"


def test_rounds_of_slices_are_rounds(runs):
    both = read_runs([runs / "rounds", runs / "slices"])
    by_round = compare(both, clock="round", target=0.85)
    assert [group.results[0].to_target for group in by_round.groups] == [9.0, 9.0]
    assert axes_of(by_round)["round"] == "rounds"
