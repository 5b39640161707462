"""A run without rounds in history, page and comparison."""

import re

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.report import RunDirectory, read_history
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.curves import MAX_POINTS
from flwr_hetero.report.document import data_json
from flwr_hetero.report.history import History
from flwr_hetero.report.nodes import device_seconds, last_fairness, merged_replies, node_stats
from flwr_hetero.report.page import facts, run_data
from flwr_hetero.report.panels import panels_of
from flwr_hetero.strategy import FedBuff, Recorded

PROFILES = [DeviceProfile(4.0), DeviceProfile(4.0), DeviceProfile(1.0), DeviceProfile(0.5)]


def record_run(path, strategy, num_rounds, faults=()):
    strategy = Recorded(strategy, run_dir=RunDirectory(path, {}), checkpoint_every=99)
    strategy.start(
        LocalGrid(toy_app(), PROFILES, faults=faults),
        toy_arrays(),
        num_rounds,
        evaluate_fn=lambda number, _: MetricRecord({"accuracy": min(0.1 * number, 0.9)}),
    )
    return read_history(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write a run of merges and one of rounds, of the same fleet."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
        record_run(folder / "merges", FedBuff(buffer_size=2), 30)
        record_run(folder / "rounds", FedAvg(), 12)
    return folder


@pytest.fixture(scope="module")
def merges(runs):
    return read_history(runs / "merges")


def made_up(num_merges, num_nodes=20, size=10):
    """Make up a long run: fast nodes answer more often, and less stale."""
    rng = np.random.default_rng(0)
    age_s = np.geomspace(0.1, 5, num_nodes)
    rounds = [{"round": 0, "virtual_s": 0.0}]
    for number in range(1, num_merges + 1):
        who = rng.choice(num_nodes, size, p=(1 / age_s) / (1 / age_s).sum())
        names = [f"node-{i}" for i in who]
        record = {"round": number, "virtual_s": 0.5 * number, "wall_s": number / 100}
        record |= {"device_s": 0.5 * num_nodes, "bytes_up": 100, "bytes_down": 100}
        record |= {"selected": names, "latency": {f"node-{i}": age_s[i] for i in who}}
        record["global"] = {"accuracy": 0.9 - 0.8 * np.exp(-number / 500)}
        record["fedbuff"] = {"nodes": names, "age_s": age_s[who].tolist(), "step": 1.0}
        record["fedbuff"] |= {"staleness": who.tolist(), "clipped_share": 0.01}
        record["local-steps"] = {"num-steps": dict.fromkeys(names, 4), "gamma": 0.5}
        rounds.append(record)
    return rounds


def panel(history, title):
    return next(p for p in panels_of(history, "virtual_s") if p["title"] == title)


def test_page_speaks_of_merges(runs):
    said = data_json(run_data(runs / "merges"))
    for words in ("Merges", "this merge", "Time of each merge"):
        assert words in said
    said = said.replace('"key": "round"', "").replace('"round": ', "")
    assert not re.findall(r".{30}\brounds?\b", said.lower())


def test_summary_of_merges(merges):
    found = {fact.label: fact for fact in facts(merges, {"num-server-rounds": 40}, None)}
    assert found["Merges"][1:] == ("30", "of 40 planned")
    busy = sum(record["device_s"] for record in merges.rounds[1:])
    assert device_seconds(merges) == pytest.approx(busy)
    note = f"{busy / merges.rounds[-1]['virtual_s']:.3g} nodes at work on average"
    assert found["Time of all devices"].note == note
    worst = found["Accuracy on the worst tenth of the nodes"]
    assert worst.value == "50.0 %"
    assert worst.note.startswith("51.5 % on all 4, merge 30")


def test_replies_of_each_node_are_counted(merges):
    replies = merged_replies(merges)
    merged = [node for record in merges.rounds[1:] for node in record["fedbuff"]["nodes"]]
    assert {node: len(found.age_s) for node, found in replies.items()} == {
        node: merged.count(node) for node in set(merged)
    }
    for title, values in (
        ("Replies of each node", [len(found.age_s) for found in replies.values()]),
        ("Staleness of each node", [np.mean(found.staleness) for found in replies.values()]),
    ):
        [dots] = panel(merges, title)["traces"]
        np.testing.assert_allclose(dots["x"], [np.median(r.age_s) for r in replies.values()], 1e-5)
        np.testing.assert_allclose(dots["y"], values, rtol=1e-5)


def test_latency_is_of_one_reply(tmp_path):
    """Also of a node that is in most merges twice."""
    history = record_run(tmp_path / "run", FedBuff(buffer_size=8), 5)
    assert any(record["selected"].count("node-0") > 1 for record in history.rounds)
    for node in node_stats(history):
        median = np.median(merged_replies(history)[node.identity].age_s)
        assert node.typical_s == pytest.approx(median)


def test_what_came_to_nothing_was_asked(tmp_path):
    history = record_run(tmp_path / "run", FedBuff(buffer_size=2), 12, [Fault(2, "errs")])
    nodes = {node.identity: (node.selected, node.lost) for node in node_stats(history)}
    failed = [f for record in history.rounds for f in record["failures"]]
    assert nodes.pop("id-1002") == (len(failed), len(failed))
    assert failed
    replies = merged_replies(history)
    assert nodes == {name: (len(replies[name].age_s), 0) for name in nodes}


def test_staleness_and_nodes_at_work_over_time(merges):
    infos = [record["fedbuff"] for record in merges.rounds[1:]]
    for title, key in (("Staleness", "staleness"), ("Age of updates", "age_s")):
        median = panel(merges, title)["traces"][-1]["y"][1:]
        np.testing.assert_allclose(median, [np.median(info[key]) for info in infos], rtol=1e-5)
    [steps] = panel(merges, "Nodes at work")["traces"]
    *before, last = steps["y"][1:]
    np.testing.assert_allclose(before, 4.0)
    assert 0 < last <= 4.0  # at the end nodes evaluate only


def test_page_of_a_long_run_is_bounded(make_run):
    short, long = (make_run(f"run-{n}", made_up(n)) for n in (1000, 4000))
    sizes = [len(data_json(run_data(path))) for path in (short, long)]
    assert sizes[1] < 1.05 * sizes[0]
    median = panel(read_history(long), "Staleness")["traces"][-1]["y"]
    assert len(median) == MAX_POINTS


def test_fairness_of_each_node(merges):
    found = last_fairness(merges)
    expected = {f"node-{i}": pytest.approx(0.5 + 0.01 * i) for i in range(4)}
    assert (found.nodes, found.by_node) == (4, expected)
    [dots] = panel(merges, "Accuracy on each node")["traces"]
    np.testing.assert_allclose(dots["y"], [0.5, 0.51, 0.52, 0.53])  # fast to slow


def test_fairness_where_rounds_ask_some_nodes():
    def record(number, **values):
        figures = {"nodes": len(values), "mean": 0.0, "worst-tenth": 0.0, "by-node": values}
        return {"round": number, "fairness": {"metric": "acc", **figures}}

    early, *late = record(1, a=0.1, d=0.1), record(3, a=0.6, b=0.4), record(4, b=0.5, c=0.7)
    found = last_fairness(History((early, *late)))
    assert found.by_node == {"a": 0.6, "b": 0.5, "c": 0.7}
    assert (found.round, found.nodes, found.mean, found.worst) == (4, 3, pytest.approx(0.6), 0.5)
    late[-1]["fairness"]["nodes"] = 200  # the table holds the worst of them only
    assert last_fairness(History((*late,)))[2:5] == (200, 0.0, 0.0)


def test_rounds_and_merges_are_compared_by_time(runs):
    both = read_runs([runs / "rounds", runs / "merges"])
    compared = compare(both, target=0.85)
    assert compared.sentences[0].startswith("merges reaches accuracy 85.0 %")
    assert "a merge takes " in compared.sentences[0]
    assert "merges stale on average" in compared.sentences[0]
    assert [axis["key"] for axis in comparison_data(compared)["curves"]["axes"]][:2] == [
        "virtual_s",
        "wall_s",
    ]
    assert "round" not in {axis["key"] for axis in comparison_data(compared)["curves"]["axes"]}
    with pytest.raises(ValueError, match="clock must be virtual or wall where one run counts"):
        compare(both, clock="round")


def test_runs_of_merges_count_merges(runs):
    compared = compare(read_runs([runs / "merges"]), clock="round", target=0.85)
    assert compared.groups[0].results[0].cost == 9.0
    assert comparison_data(compared)["curves"]["axes"][0]["label"] == "merges"
