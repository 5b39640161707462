"""Runs in which nodes do not wait, without rounds and with: history, page and comparison."""

import json
import re

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from steps_toy import steps_app
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.report import History, RunDirectory, read_history
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.curves import MAX_POINTS, Line, curve_data
from flwr_hetero.report.nodes import busy_s, last_fairness, node_stats
from flwr_hetero.report.page import facts, run_data
from flwr_hetero.report.panels import panels_of
from flwr_hetero.report.tables import rounds_table
from flwr_hetero.strategy import FedBuff, FedSlice, Recorded

SPEEDS = (4.0, 4.0, 1.0, 0.5)


@pytest.fixture(scope="module")
def record_run():
    """Return a function that records a run; reports are left out."""

    def record(path, strategy, num_rounds, app=None, faults=()):
        strategy = Recorded(strategy, run_dir=RunDirectory(path, {}), checkpoint_every=99)
        grid = LocalGrid(app or toy_app(), [DeviceProfile(s) for s in SPEEDS], faults=faults)
        strategy.start(
            grid,
            toy_arrays(),
            num_rounds,
            evaluate_fn=lambda number, _: MetricRecord({"accuracy": min(0.1 * number, 0.9)}),
        )
        return read_history(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
        yield record


@pytest.fixture(scope="module")
def runs(tmp_path_factory, record_run):
    """Write a run without rounds, one of rounds and one of rounds of slices, of one fleet."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "buffered", FedBuff(buffer_size=2), 30)
    record_run(folder / "rounds", FedAvg(), 12)
    app = steps_app(mods=[emulated_device])
    record_run(folder / "slices", FedSlice(FedAvg(fraction_evaluate=0.0)), 12, app)
    return folder


@pytest.fixture(scope="module")
def buffered(runs):
    return read_history(runs / "buffered")


def merged(history):
    return [name for record in history.rounds[1:] for name in record["fedbuff"]["nodes"]]


def test_page_speaks_of_updates_or_rounds(runs):
    said = json.dumps(run_data(runs / "buffered"))
    for words in ("Server updates", "this server update", "Time of each server update"):
        assert words in said
    said = said.replace('"key": "round"', "").replace('"round": ', "")
    assert not re.findall(r".{30}\brounds?\b", said.lower())
    sliced = run_data(runs / "slices")
    assert {"Time of each round", "Age of updates", "Nodes in flight"} <= {
        p["title"] for p in sliced["panels"]
    }
    assert "Rounds" in {table["title"] for table in sliced["tables"]}


def test_summary_of_a_buffered_run(buffered):
    found = {f["label"]: f for f in facts(buffered, {"num-server-rounds": 40}, None)}
    assert found["Server updates"] == {
        **{"label": "Server updates", "value": "30", "note": "of 40 planned"}
    }
    busy = sum(record["device_s"] for record in buffered.rounds[1:])
    assert busy_s(buffered).sum() == pytest.approx(busy)
    note = f"{busy / buffered.rounds[-1]['virtual_s']:.3g} nodes in flight on average"
    assert found["Time of all devices"]["note"] == note
    worst = found["Accuracy on the worst tenth of the nodes"]
    assert worst["value"] == "50.0 %"
    assert worst["note"].startswith("51.5 % on all 4, server update 30")


@pytest.mark.parametrize("name", ["buffered", "slices"])
def test_every_reply_is_counted(runs, name):
    """Also of a node that is in a line several times."""
    history = read_history(runs / name)
    names = merged(history)
    assert {n.identity: n.selected for n in node_stats(history)} == {
        node: names.count(node) for node in set(names)
    }
    for node in node_stats(history):
        rows = [record["fedbuff"] for record in history.rounds[1:]]
        own = [
            figures
            for row in rows
            for who, *figures in zip(row["nodes"], row["age_s"], row["staleness"], strict=True)
            if who == node.identity
        ]
        assert node.staleness == pytest.approx(np.mean([stale for _, stale in own]))
        if name == "buffered":
            assert node.typical_s == pytest.approx(np.median([age_s for age_s, _ in own]))
    [bars, _] = next(p for p in panels_of(history, "wall_s") if p["title"] == "Who trained")[
        "traces"
    ]
    assert sum(bars["y"]) == len(names)


def test_what_came_to_nothing_was_asked(tmp_path, record_run):
    faults = [Fault(2, "errs")]
    history = record_run(tmp_path / "run", FedBuff(buffer_size=2), 12, faults=faults)
    nodes = {node.identity: (node.selected, node.lost) for node in node_stats(history)}
    failed = [f for record in history.rounds for f in record["failures"]]
    assert nodes.pop("id-1002") == (len(failed), len(failed))
    assert failed
    assert nodes == {name: (merged(history).count(name), 0) for name in nodes}


def test_staleness_and_nodes_in_flight_over_time(buffered):
    rows = [record["fedbuff"] for record in buffered.rounds[1:]]
    for key in ("staleness", "age_s"):
        found = buffered.range_of(f"fedbuff/{key}")[1:]
        expected = [[min(row[key]), np.median(row[key]), max(row[key])] for row in rows]
        np.testing.assert_allclose(found, expected)
    metrics = curve_data([Line("x", "", "", [buffered])], None, "virtual_s", None)["metrics"]
    assert {"fedbuff/staleness", "fedbuff/age_s"} <= {metric["key"] for metric in metrics}
    panels = {p["title"]: p for p in panels_of(buffered, "virtual_s")}
    median = panels["Staleness"]["traces"][1]["y"][1:]
    np.testing.assert_allclose(median, [np.median(row["staleness"]) for row in rows])
    [steps] = panels["Nodes in flight"]["traces"]
    *before, last = steps["y"][1:]
    np.testing.assert_allclose(before, 4.0)
    assert 0 < last <= 4.0  # at the end nodes evaluate only


def test_page_of_a_long_run_is_bounded(make_run):
    sizes = []
    for count in (1000, 4000):
        rounds = [{"round": 0, "virtual_s": 0.0}]
        for number in range(1, count + 1):
            names = [f"node-{(number + i) % 20}" for i in range(10)]
            record = {"round": number, "virtual_s": 0.5 * number, "device_s": 10.0, "bytes_up": 100}
            record |= {"selected": names, "global": {"accuracy": 0.9 - 0.8 * 0.998**number}}
            record["fedbuff"] = {"nodes": names, "staleness": [*range(10)], "age_s": [0.5] * 10}
            record["local_steps"] = {"num_steps": dict.fromkeys(names, 4), "gamma": 0.5}
            rounds.append(record)
        data = run_data(make_run(f"run-{count}", rounds))
        sizes.append(len(json.dumps(data)))
    assert sizes[1] < 1.05 * sizes[0]
    [curves] = [line["curves"] for line in data["curves"]["lines"]]
    assert len(curves["fedbuff/staleness"]["round"]["y"]) == MAX_POINTS


def test_fairness_of_each_node(buffered):
    found = last_fairness(buffered)
    expected = {f"node-{i}": pytest.approx(0.5 + 0.01 * i) for i in range(4)}
    assert (found.nodes, found.by_node) == (4, expected)
    panels = {p["title"]: p for p in panels_of(buffered, "virtual_s")}
    [dots] = panels["Accuracy on each node"]["traces"]
    np.testing.assert_allclose(dots["y"], [0.5, 0.51, 0.52, 0.53])  # fast to slow


def test_fairness_where_rounds_ask_some_nodes():
    def record(number, **values):
        figures = {"nodes": len(values), "mean": 0.0, "worst_tenth": 0.0, "by_node": values}
        return {"round": number, "fairness": {"metric": "acc", **figures}}

    early, *late = record(1, a=0.1, d=0.1), record(3, a=0.6, b=0.4), record(4, b=0.5, c=0.7)
    found = last_fairness(History((early, *late)))
    assert found.by_node == {"a": 0.6, "b": 0.5, "c": 0.7}
    assert (found.round, found.nodes, found.mean, found.worst) == (4, 3, pytest.approx(0.6), 0.5)
    late[-1]["fairness"]["nodes"] = 200  # the table holds the worst of them only
    assert last_fairness(History((*late,)))[2:5] == (200, 0.0, 0.0)


def test_rounds_of_several_updates(runs):
    history = read_history(runs / "slices")
    assert (history.unit, history.last_round) == ("round", 12)
    for record in history.rounds[1:]:
        assert record["fedslice"]["updates"] * 2 == len(record["fedbuff"]["nodes"])
        assert record["selected"] == record["fedbuff"]["nodes"]
    assert any(record["fedslice"]["updates"] > 1 for record in history.rounds[1:])
    table = rounds_table(history)
    nodes = [row[table.head.index("nodes")][1] for row in table.rows]
    assert max(nodes) <= len(SPEEDS) < max(len(r["selected"]) for r in history.rounds)


@pytest.mark.parametrize(("name", "unit"), [("buffered", "server update"), ("slices", "round")])
def test_runs_are_compared_with_rounds_by_time(runs, name, unit):
    both = read_runs([runs / "rounds", runs / name])
    compared = compare(both, target=0.85)
    assert compared.sentences[0].startswith(f"{name} reaches accuracy 85.0 %")
    assert f"a {unit} takes " in compared.sentences[0]
    assert "server updates stale on average" in compared.sentences[0]
    axes = {axis["key"]: axis["label"] for axis in comparison_data(compared)["curves"]["axes"]}
    assert [*axes][:2] == ["virtual_s", "wall_s"]
    if unit == "round":
        assert axes["round"] == "rounds"
        by_round = compare(both, clock="round", target=0.85).groups
        assert [group.results[0].to_target for group in by_round] == [9.0, 9.0]
    else:
        assert "round" not in axes
        with pytest.raises(ValueError, match="clock must be virtual or wall where one run counts"):
            compare(both, clock="round")
        alone = compare(both[1:], clock="round", target=0.85)
        assert alone.groups[0].results[0].to_target == 9.0
        assert comparison_data(alone)["curves"]["axes"][0]["label"] == "server updates"
