import random

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from quadratics import fedavg
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import RandomSelection, TiFL
from flwr_hetero_studies.rivals import OverSelect


def fleet(speeds, **settings):
    """Make a LocalGrid whose node i needs 1 / speeds[i] seconds for its 100 examples."""
    return LocalGrid(toy_app(), [DeviceProfile(speed) for speed in speeds], **settings)


def run(strategy, grid, num_rounds=1, **settings):
    random.seed(0)
    history = History(strategy)
    history.start(grid, toy_arrays(), num_rounds, **settings)
    return history.records


def lengths(records):
    times = [record["virtual_s"] for record in records]
    return np.diff(times).tolist()


def test_round_lasts_until_the_nth_reply():
    records = run(OverSelect(fedavg(), take=3), fleet([1, 2, 4, 5, 8]))
    assert lengths(records) == pytest.approx([1 / 4])  # the third of 1/8, 1/5, 1/4, 1/2, 1
    assert records[1]["failures"] == []
    assert records[1]["over_select"] == {
        "not_waited_for": ["id-1000", "id-1001"],  # no reply yet: no partition, no name
        "in_flight": 2,
    }
    assert sorted(records[1]["latency"]) == ["node-2", "node-3", "node-4"]


def test_nodes_at_work_are_not_asked_again():
    grid = fleet([0.4, 4, 4, 4])
    records = run(OverSelect(fedavg(), take=3), grid, 16)
    asked = [len(record["selected"]) for record in records[1:]]
    # node-0 needs 2.5 s: it misses rounds of 0.25 s and an unsuccessful poll of 0.1 s until then
    assert asked[0] == 4
    assert asked[1:7] == [3] * 6
    assert 4 in asked[7:]
    assert not any(record["failures"] for record in records)
    assert grid.num_sent == sum(asked)


def test_silent_nodes_cost_nothing_if_enough_answer():
    faults = [Fault(0, "dies"), Fault(1, "errs")]
    strategy = OverSelect(fedavg(), take=2)
    records = run(strategy, fleet([1, 1, 2, 1], faults=faults), timeout=600)
    assert lengths(records) == pytest.approx([1.0])
    assert [failure["node"] for failure in records[1]["failures"]] == ["id-1001"]


def test_silent_node_is_asked_again_after_time_out():
    faults = [Fault(0, "dies", first_round=1, last_round=1)]
    records = run(OverSelect(fedavg(), take=2), fleet([1, 1, 1], faults=faults), 5, timeout=3.0)
    asked = [len(record["selected"]) for record in records[1:]]
    # rounds take 1 s; an unsuccessful poll takes 0.1 s more of the grid's time, not of the run's
    assert asked == [3, 2, 2, 3, 3]
    assert not any(record["failures"] for record in records)


@pytest.mark.parametrize("outside", [lambda s: s, lambda s: RandomSelection(s, 3)])
def test_evaluation_does_not_wait_for_nodes_at_work(outside):
    inner = outside(flower.FedAvg(fraction_evaluate=1.0))
    records = run(OverSelect(inner, take=2), fleet([0.01, 1, 1]), 4)
    # training takes 1 s, evaluating ten examples a thirtieth; node-0 needs 100 s
    assert lengths(records) == pytest.approx([1 + 1 / 30] * 4)
    assert not any(record["failures"] for record in records)
    assert all(record["evaluate"]["eval-acc"] == pytest.approx(0.515) for record in records[1:])


def test_left_out_nodes_have_not_failed_in_tifl():
    tifl = TiFL(fedavg(), 4, 1, policy="vanilla", profiling="phase", seed=1)
    records = run(OverSelect(tifl, take=2), fleet([1, 2, 3, 4, 5, 6]), 10)
    assert not any(record["failures"] for record in records)
    assert {node for record in records[6:] for node in record["selected"]} == {
        f"node-{i}" for i in range(6)
    }
    assert sum(len(r["over_select"]["not_waited_for"]) for r in records[1:]) > 5
    assert all(record["train"] for record in records[1:])


@pytest.mark.parametrize(
    ("minima", "take"), [({}, 1), ({"min_available_nodes": 7}, 5), ({"min_train_nodes": 6}, 2)]
)
def test_minima_do_not_wait_for_nodes_at_work(minima, take, monkeypatch):
    def sleep(seconds):
        raise AssertionError("waits for nodes that it is not shown")

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", sleep)
    inner = flower.FedAvg(fraction_evaluate=0.0, **minima)
    before = {**vars(inner)}
    records = run(OverSelect(inner, take=take), fleet([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), 4)
    assert records[2]["over_select"]["in_flight"] > 0
    assert all(record["selected"] for record in records[1:])
    assert {**vars(inner)} == before


def test_round_without_a_free_node_waits_for_one():
    grid = fleet([1, 1.1, 8])

    def leave(server_round, arrays):
        if server_round == 1:
            grid.leave(1002)  # the only one that is not at work

    inner = fedavg()
    records = run(OverSelect(inner, take=1), grid, 3, evaluate_fn=leave)
    assert [len(record["selected"]) for record in records] == [0, 3, 1, 2]
    # Node-1 answers, and trains again.
    assert lengths(records)[1] == pytest.approx(1 / 1.1 - 1 / 8 + 1 / 1.1)
