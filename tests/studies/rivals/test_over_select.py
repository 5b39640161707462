"""Rounds that end with the n-th reply; node i needs 1 / speeds[i] seconds for its examples."""

import random

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import TiFL
from flwr_hetero_studies.rivals import OverSelect


def run(strategy, speeds, num_rounds=1, faults=(), **settings):
    """Run on a fleet; return the records, without failures but those of nodes that err."""
    random.seed(0)
    history = History(strategy)
    grid = LocalGrid(toy_app(), [DeviceProfile(speed) for speed in speeds], faults=faults)
    history.start(grid, toy_arrays(), num_rounds, **settings)
    if not faults:
        assert not any(record["failures"] for record in history.records)
    return history.records


def lengths(records):
    return np.diff([record["virtual_s"] for record in records]).tolist()


def asked(records):
    return [len(record["selected"]) for record in records[1:]]


def test_round_lasts_until_the_nth_reply():
    records = run(OverSelect(fedavg(), take=3), [1, 2, 4, 5, 8])
    assert lengths(records) == pytest.approx([1 / 4])
    assert records[1]["over_select"] == {
        "not_waited_for": ["id-1000", "id-1001"],  # no reply yet: no partition, no name
        "in_flight": 2,
    }
    assert sorted(records[1]["latency"]) == ["node-2", "node-3", "node-4"]


def test_nodes_at_work_are_not_asked_again():
    counts = asked(run(OverSelect(fedavg(), take=3), [0.4, 4, 4, 4], 16))
    # node-0 needs 2.5 s: it misses rounds of 0.25 s and an unsuccessful poll of 0.1 s until then
    assert counts[0] == 4
    assert counts[1:7] == [3] * 6
    assert 4 in counts[7:]


def test_errors_and_silence_cost_nothing_if_enough_answer():
    faults = [Fault(0, "dies"), Fault(1, "errs")]
    records = run(OverSelect(fedavg(), take=2), [1, 1, 2, 1], faults=faults, timeout=600)
    assert lengths(records) == pytest.approx([1.0])
    assert [failure["node"] for failure in records[1]["failures"]] == ["id-1001"]


def test_silent_node_is_asked_again_after_time_out():
    faults = [Fault(0, "dies", first_round=1, last_round=1)]
    records = run(OverSelect(fedavg(), take=2), [1, 1, 1], 5, faults, timeout=3.0)
    # rounds take 1 s; an unsuccessful poll takes 0.1 s more of the grid's time, not of the run's
    assert asked(records) == [3, 2, 2, 3, 3]
    assert not any(record["failures"] for record in records)


def test_evaluation_does_not_wait_for_nodes_at_work():
    inner = flower.FedAvg(fraction_evaluate=1.0)
    records = run(OverSelect(inner, take=2), [0.01, 1, 1], 4)
    # training takes 1 s, evaluating ten examples a thirtieth; node-0 needs 100 s
    assert lengths(records) == pytest.approx([1 + 1 / 30] * 4)
    assert all(record["evaluate"]["eval-acc"] == pytest.approx(0.515) for record in records[1:])


def test_left_out_nodes_have_not_failed_in_tifl():
    tifl = TiFL(fedavg(), 4, 1, policy="vanilla", profiling="phase", seed=1)
    records = run(OverSelect(tifl, take=2), [1, 2, 3, 4, 5, 6], 10)
    trained = {node for record in records[6:] for node in record["selected"]}
    assert trained == {f"node-{i}" for i in range(6)}
    assert sum(len(r["over_select"]["not_waited_for"]) for r in records[1:]) > 5


@pytest.mark.parametrize("minima", [{"min_available_nodes": 7}, {"min_train_nodes": 6}])
def test_minima_do_not_wait_for_nodes_at_work(minima, monkeypatch):
    def sleep(seconds):
        raise AssertionError("waits for nodes that it is not shown")

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", sleep)
    inner = flower.FedAvg(fraction_evaluate=0.0, **minima)
    before = {**vars(inner)}
    records = run(OverSelect(inner, take=5), [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], 4)
    assert records[2]["over_select"]["in_flight"] > 0
    assert all(asked(records))
    assert {**vars(inner)} == before


def test_round_without_a_free_node_waits_for_one():
    grid = LocalGrid(toy_app(), [DeviceProfile(speed) for speed in (1, 1.1, 8)])

    def leave(server_round, arrays):
        if server_round == 1:
            grid.leave(1002)  # the only one that is not at work

    random.seed(0)
    history = History(OverSelect(fedavg(), take=1))
    history.start(grid, toy_arrays(), 3, evaluate_fn=leave)
    assert asked(history.records) == [3, 1, 2]
    # Node-1 answers, and trains again.
    assert lengths(history.records)[1] == pytest.approx(1 / 1.1 - 1 / 8 + 1 / 1.1)
