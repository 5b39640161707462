"""Real processes, real faults: each costs the round in which it happens, never the run."""

import sys
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord

from benchmarks.faults import scenarios
from flwr_hetero.fleet import DeviceProfile, LocalGrid

pytestmark = [pytest.mark.deploy, pytest.mark.slow_deploy]


def reasons(facts, number):
    """Return node to reason of the failures of a round."""
    return {f["node"]: f["reason"] for f in facts["history"][number]["failures"]}


def test_bad_replies_cost_themselves(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "BAD_REPLIES", f"{scenarios.BAD_REPLIES} 3:4:steps")
    facts = scenarios.bad_replies(fleet, tmp_path / "run")
    assert facts["survived"], facts["log"]
    assert facts["rounds_lost"] == 0
    first, second, third = (reasons(facts, number) for number in (1, 2, 3))
    assert "NaN" in first["node-0"]
    assert "told to raise" in first["node-1"]
    assert "MemoryError" in first["node-2"]
    assert "has shape (2, 2) instead of (1000,)" in second["node-1"]
    assert "['w'] missing" in second["node-2"]
    assert "['v'] missing or unknown" in second["node-3"]
    assert "cannot be read" in third["node-0"]
    assert "'num-examples' is inf" in third["node-3"]
    assert "other names" in third["node-1"]  # than node-2 has, and others had in earlier rounds
    assert len(third) == 3
    ((liar, claim),) = reasons(facts, 4).items()
    assert liar == "node-3"
    assert claim.startswith("claims 4.61169e+18 steps, was given ")
    assert 1 <= facts["history"][4]["train"]["num-steps"] <= 4  # it counts with its own share
    assert "node-2: latency not believed: claims 1e+06 s" in facts["log"]
    assert facts["history"][4]["latency"]["node-2"] < 1e4
    assert reasons(facts, 5) == {}


def test_frozen_and_stopped_nodes_cost_their_round(fleet, tmp_path):
    facts = scenarios.frozen_and_stopped(fleet, tmp_path / "run")
    assert facts["survived"]
    assert set(reasons(facts, 2)) == {"node-1", "node-2"}
    assert reasons(facts, 2)["node-1"] == "no reply within 30 s"
    assert "error 5" in reasons(facts, 2)["node-2"]
    assert facts["rounds_lost"] == 0
    last = facts["history"][-1]
    assert sorted(last["selected"]) == ["node-0", "node-1", "node-2", "node-3"]
    assert not last["failures"]


def test_killed_nodes_come_back_as_themselves_and_newcomers_join(fleet, tmp_path):
    facts = scenarios.killed_and_joined(fleet, tmp_path / "run")
    assert facts["survived"]
    assert sorted(facts["history"][0]["tifl"]["tiers"]) == ["node-0", "node-1", "node-2"]
    assert set(reasons(facts, 2)) == {"node-1", "node-2"}
    assert "error 5" in reasons(facts, 2)["node-1"]  # no heartbeat
    assert "error 8" in reasons(facts, 2)["node-2"]  # no sign of life of its ClientApp
    assert facts["rounds_lost"] == 0
    last = facts["history"][-1]
    assert sorted(last["selected"]) == ["node-0", "node-1", "node-2", "node-3"]
    assert not last["failures"]


def expected_selection(num_rounds, tmp_path, monkeypatch):
    """Run the same strategy on a LocalGrid, whose nodes have the same names.

    Flower's strategies shuffle the nodes that they are shown, so only who is chosen counts.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "toy_app"))
    from toy_app import client_app, server_app

    settings = {"clients-per-round": 2, "num-tiers": 1, "max-failures": 3, "seed": 0, "faults": ""}
    config = settings | {"work": 0.0}
    grid = LocalGrid(client_app.app, [DeviceProfile()] * 4, run_config=config)
    strategy, selected = server_app.strategy_for(settings), []
    strategy.on_round_end = lambda run, record: selected.append(sorted(record["selected"]))
    arrays = ArrayRecord({"w": Array(server_app.np.zeros(server_app.SIZE, "float32"))})
    strategy.start(grid, arrays, num_rounds)
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_app"]:
        del sys.modules[name]
    return selected


def test_a_killed_server_app_resumes_with_the_same_selection(fleet, tmp_path, monkeypatch):
    facts = scenarios.server_app_killed(fleet, tmp_path / "run")
    assert facts["survived"]
    assert 2 <= facts["killed_after"] < 6
    selected = [sorted(record["selected"]) for record in facts["history"]]
    assert selected == expected_selection(6, tmp_path, monkeypatch)


def test_a_restarted_superlink_finds_its_nodes_and_the_run_resumes(fleet, tmp_path, monkeypatch):
    facts = scenarios.superlink_restarted(fleet, tmp_path / "run")
    assert facts["survived"]
    selected = [sorted(record["selected"]) for record in facts["history"]]
    assert selected == expected_selection(6, tmp_path, monkeypatch)
