"""The endpoint is read over HTTP, as Prometheus does; warnings need no endpoint."""

import re
from urllib.request import urlopen

import pytest
from flwr.serverapp.strategy import FedAvg
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.report.prometheus import ADDRESS, REPEAT_ROUNDS, FailingNodes
from flwr_hetero.strategy import Recorded, TiFL


def record_of(number, replied=(), failed=()):
    failures = [{"node": node, "reason": f"reason {number}"} for node in failed]
    return {"round": number, "weights": dict.fromkeys(replied, 0.5), "failures": failures}


def test_endpoint_has_the_figures_of_each_round(tmp_path, monkeypatch, caplog):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
    monkeypatch.setenv(ADDRESS, "127.0.0.1:0")
    caplog.set_level("INFO", "flwr")
    pages = []

    class Reader(TiFL):
        """Read the endpoint before the last round, whose figures it does not have yet."""

        def on_round_end(self, run, record):
            super().on_round_end(run, record)
            if record["round"] == 3:
                [url] = re.findall(r"http://127.0.0.1:\d+/metrics", caplog.text)
                pages.append((url, urlopen(url, timeout=10).read().decode()))

    strategy = Reader(clients_per_round=2, num_tiers=1)
    recorded = Recorded(strategy, run_dir=tmp_path / "run", trackers=["prometheus"])
    grid = LocalGrid(
        toy_app(), [DeviceProfile()] * 2, faults=[Fault(1, "errs", 2, 2, message_type="train")]
    )
    recorded.start(grid, toy_arrays(), 3)
    [(url, page)] = pages
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    figures = {name.removeprefix("flwr_hetero_"): float(value) for name, value in lines.items()}
    assert figures["rounds_total"] == 2
    assert figures['replies_total{node="node-0"}'] == 2
    assert figures['replies_total{node="node-1"}'] == 1
    assert figures['failures_total{node="node-1"}'] == 1
    assert 'failures_total{node="node-0"}' not in figures
    assert figures['message_seconds{node="node-0"}'] > 0
    assert figures['bytes_total{direction="up"}'] > 0
    with pytest.raises(OSError, match="refused"):
        urlopen(url, timeout=10)


def test_node_that_keeps_failing_is_named(caplog):
    nodes = FailingNodes()
    for number in range(1, 6 + REPEAT_ROUNDS):
        nodes.look(record_of(number, ["a"], ["b"]))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "b has failed in 3 rounds in a row, most recently because: reason 3" in caplog.text
    assert f"b has failed in {3 + REPEAT_ROUNDS} rounds in a row" in caplog.text
    # A good reply ends the row; two failures are not yet worth a warning.
    caplog.clear()
    for number in (31, 32):
        nodes.look(record_of(number, ["b"]))
        nodes.look(record_of(number, [], ["b"]))
        nodes.look(record_of(number, [], ["b"]))
    assert not caplog.records


def test_a_run_warns_of_a_failing_node(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
    recorded = Recorded(FedAvg(), run_dir=tmp_path / "run")
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 2, faults=[Fault(1, "errs")])
    recorded.start(grid, toy_arrays(), 4)
    assert caplog.text.count("id-1001 has failed in 3 rounds in a row") == 1
