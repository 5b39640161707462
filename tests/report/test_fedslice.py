"""A run of FedSlice on its page: rounds as lines, and several updates of the model in each."""

import re

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from steps_toy import steps_app
from toy import toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.report import RunDirectory, read_history
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.document import data_json
from flwr_hetero.report.nodes import merged_replies, node_stats
from flwr_hetero.report.page import run_data
from flwr_hetero.report.panels import panels_of
from flwr_hetero.report.tables import rounds_table
from flwr_hetero.strategy import FedSlice, Recorded

PROFILES = [DeviceProfile(speed) for speed in (4.0, 4.0, 1.0, 1.0, 0.5)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write a run of FedSlice and one of FedAvg, of the same fleet and as many rounds."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
        for name, strategy in (
            ("FedSlice", FedSlice(FedAvg(fraction_evaluate=0.0))),
            ("FedAvg", FedAvg(fraction_evaluate=0.0)),
        ):
            recorded = Recorded(strategy, run_dir=RunDirectory(folder / name, {"strategy": name}))
            recorded.start(
                LocalGrid(steps_app(mods=[emulated_device]), PROFILES),
                toy_arrays(),
                12,
                evaluate_fn=lambda number, _: MetricRecord({"accuracy": min(0.1 * number, 0.9)}),
            )
    return folder


@pytest.fixture(scope="module")
def sliced(runs):
    return read_history(runs / "FedSlice")


def test_line_is_a_round_of_several_updates(sliced):
    assert (sliced.unit, sliced.update, sliced.last_round) == ("round", "server update", 12)
    for record in sliced.rounds[1:]:
        assert record["fedslice"]["updates"] * 2 == len(record["fedbuff"]["nodes"])
        assert record["selected"] == record["fedbuff"]["nodes"]
    assert any(record["fedslice"]["updates"] > 1 for record in sliced.rounds[1:])


def test_every_reply_of_a_round_is_on_the_page(sliced):
    replies = [name for record in sliced.rounds[1:] for name in record["fedbuff"]["nodes"]]
    counts = {name: replies.count(name) for name in set(replies)}
    assert {node.identity: node.selected for node in node_stats(sliced)} == counts
    assert {name: len(own.age_s) for name, own in merged_replies(sliced).items()} == counts
    panels = {panel["title"]: panel for panel in panels_of(sliced, "virtual_s")}
    assert panels["Staleness"]["layout"]["yaxis"]["title"] == "server updates"
    median = panels["Staleness"]["traces"][-1]["y"][1:]
    per_round = [np.median(record["fedbuff"]["staleness"]) for record in sliced.rounds[1:]]
    np.testing.assert_allclose(median, per_round, rtol=1e-5)
    assert panels["Who trained"]["layout"]["yaxis"]["title"] == "updates"


def test_page_speaks_of_rounds(runs, sliced):
    said = data_json(run_data(runs / "FedSlice"))
    assert "Time of each round" in said
    assert not re.findall(r".{0,30}merge.{0,30}", said.lower())
    table = rounds_table(sliced)
    nodes = [row[table.head.index("nodes")][1] for row in table.rows]
    assert max(nodes) <= len(PROFILES) < max(len(r["selected"]) for r in sliced.rounds)


def test_rounds_are_compared_with_those_of_fedavg(runs):
    compared = compare(read_runs([runs / "FedAvg", runs / "FedSlice"]), target=0.85)
    assert "a round takes " in compared.sentences[0]
    assert "server updates stale on average" in compared.sentences[0]
    by_round = compare(read_runs([runs / "FedAvg", runs / "FedSlice"]), clock="round", target=0.85)
    assert [group.results[0].cost for group in by_round.groups] == [9.0, 9.0]
