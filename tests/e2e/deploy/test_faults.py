"""Real processes, real faults: each costs the round in which it happens, never the run."""

import signal

import pytest

from flwr_hetero_studies.faults import scenarios
from flwr_hetero_studies.faults.fleet_run import TOY_APP, FleetRun
from flwr_hetero_studies.real.throttle import descendants, send

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]


def reasons(result, number):
    """Return node to reason of the failures of a round."""
    return {f["node"]: f["reason"] for f in result["history"][number]["failures"]}


def assert_all_are_back(result):
    assert result["rounds_lost"] == 0
    last = result["history"][-1]
    assert sorted(last["selected"]) == ["node-0", "node-1", "node-2", "node-3"]
    assert not last["failures"]


def test_bad_replies_cost_themselves(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "BAD_REPLIES", f"{scenarios.BAD_REPLIES} 3:4:steps")
    result = scenarios.bad_replies(fleet, tmp_path / "run")
    assert result["survived"], result["log"]
    assert result["rounds_lost"] == 0
    first, second, third = (reasons(result, number) for number in (1, 2, 3))
    assert "NaN" in first["node-0"]
    assert "injected error" in first["node-1"]
    assert "MemoryError" in first["node-2"]
    assert "has shape (2, 2) instead of (1000,)" in second["node-1"]
    assert "['w'] missing" in second["node-2"]
    assert "['v'] missing or unknown" in second["node-3"]
    assert "cannot be read" in third["node-0"]
    assert "'num-examples' is inf" in third["node-3"]
    assert set(third) == {"node-0", "node-3"}  # of node-1's reply only the other metric is dropped
    assert set(result["history"][3]["weights"]) == {"node-1", "node-2"}
    ((liar, claim),) = reasons(result, 4).items()
    assert liar == "node-3"
    assert claim.startswith("claims 1e+18 steps")
    assert 1 <= result["history"][4]["train"]["num-steps"] <= 4  # it counts with its own share
    assert result["history"][4]["latency"]["node-2"] < 1e4
    assert reasons(result, 5) == {}


def test_frozen_and_stopped_nodes_cost_their_round(fleet, tmp_path):
    result = scenarios.frozen_and_stopped(fleet, tmp_path / "run")
    assert result["survived"]
    assert set(reasons(result, 2)) == {"node-1", "node-2"}
    assert reasons(result, 2)["node-1"] == "no reply within 30 s"
    assert "error 5" in reasons(result, 2)["node-2"]
    assert_all_are_back(result)


def test_killed_nodes_come_back_and_newcomers_join(fleet, tmp_path):
    result = scenarios.killed_and_joined(fleet, tmp_path / "run")
    assert result["survived"]
    assert sorted(result["history"][0]["tifl"]["tiers"]) == ["node-0", "node-1", "node-2"]
    assert set(reasons(result, 2)) == {"node-1", "node-2"}
    assert "error 5" in reasons(result, 2)["node-1"]  # no heartbeat
    assert "error 8" in reasons(result, 2)["node-2"]  # no sign of life of its ClientApp
    assert_all_are_back(result)


def test_without_rounds_a_node_is_killed_and_one_freezes(fleet, tmp_path):
    config = {"engine": "buffered", "clients_per_round": 4, "num_server_rounds": 8}
    run = FleetRun(fleet, tmp_path / "run", TOY_APP, work=1.0, timeout=40.0, **config)
    run.start().wait_round(2)
    fleet.end_process(fleet.file.node("node-1").pid)
    frozen = fleet.file.node("node-0").pid
    pids = [frozen, *descendants(frozen)]
    send(pids, signal.SIGSTOP)
    try:
        history = run.finish(timeout_s=600)
    finally:
        send(pids, signal.SIGCONT)
    assert [record["round"] for record in history] == list(range(9))
    failed = {failure["node"] for record in history for failure in record["failures"]}
    assert failed <= {"node-0", "node-1"}
    assert set(history[-1]["fedbuff"]["nodes"]) <= {"node-2", "node-3"}
