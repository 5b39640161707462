"""FedSlice where nodes share the workers of Flower's simulation."""

import numpy as np
import pytest
from flwr.app import ArrayRecord
from plain_simulation import InMemoryGrid
from quadratics import app, fedavg, models
from recording import History
from toy import rewriting

from flwr_hetero import keys
from flwr_hetero.client import timing as timing_module
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.slices import rule
from flwr_hetero.slices.algorithm import buffer_size
from flwr_hetero.strategy import FedSlice

NODES = 12
JOB = 40
"""Steps of a node's job: one for each example."""


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(rule, "FIRST_PLACES", 3)


def fleet(speeds=None, mods=()):
    client_app = app(1 + np.arange(NODES) / NODES, [JOB] * NODES, 0.05, mods=mods)
    speeds = [1.0] * NODES if speeds is None else speeds
    return LocalGrid(client_app, [DeviceProfile(s, seconds_per_example=0.05) for s in speeds])


def train(strategy, grid, num_rounds=4):
    seen = History(strategy)
    found, _ = models(seen, grid, num_rounds)
    return found, seen.records[1:]


@pytest.mark.parametrize(("workers", "places"), [(1, 2), (4, 6)])
def test_no_more_messages_wait_than_keep_the_workers_busy(workers, places, monkeypatch):
    grid = InMemoryGrid(fleet(), workers, monkeypatch)
    _, records = train(FedSlice(fedavg()), grid)
    # two of the first three may be on their way when there is but one worker
    assert max(grid.at_once) <= max(3, places)
    stale = [each for record in records[1:] for each in record["fedbuff"]["staleness"]]
    assert np.mean(stale) <= places / buffer_size(places)
    # a round is of all nodes' jobs all the same
    facts = [record["fedslice"] for record in records]
    assert {each["examples_wanted"] for each in facts} == {NODES * JOB}
    # and no worker is idle for more than a twentieth of the time, the start left out
    assert sum(took_s for *_, took_s in grid.answered) > 0.95 * workers * (grid.clock.now_s - 2)


def test_a_node_asked_for_the_first_time_takes_a_whole_slice(monkeypatch):
    grid = InMemoryGrid(fleet(), 2, monkeypatch)
    train(FedSlice(fedavg()), grid, 1)
    nodes = [message.metadata.dst_node_id for message, *_ in grid.answered]
    steps = [message.content["config"][keys.NUM_STEPS] for message, *_ in grid.answered]
    first = [nodes.index(node) for node in dict.fromkeys(nodes)]
    assert [steps[i] for i in first[:3]] == [2, 2, 2]
    assert min(steps[i] for i in first[6:]) >= 9
    # in turn: nobody is asked again before all were
    assert len({*nodes[:NODES]}) == NODES


def test_slices_grow_with_what_a_worker_spends_between_messages(monkeypatch):
    steps = []
    for handover_s in (0.0, 0.1, 10.0):
        grid = InMemoryGrid(fleet(), 2, monkeypatch, handover_s)
        train(FedSlice(fedavg()), grid, 2)
        steps.append(grid.answered[-1][0].content["config"][keys.NUM_STEPS])
    # a step takes 0.05 s; eight times the cost of a message, and no more than the job
    assert steps == [10, 16, JOB]


def test_the_start_of_the_workers_does_not_change_what_replies_count(monkeypatch):
    """Ray takes ten seconds to start; who answers first does not reply less often for that."""
    models_of = []
    steps = []
    for start_s in (0.0, 20.0):
        grid = InMemoryGrid(fleet(), 2, monkeypatch)
        grid.free_at_s = [start_s] * 2
        found, records = train(FedSlice(fedavg()), grid, 2)
        models_of.append(found)
        steps += [record["fedbuff"]["step"] for record in records]
    # All nodes have as many examples, so that all updates weigh the same.
    assert steps == [pytest.approx(1.0)] * len(steps)
    assert models_of[0] == pytest.approx(models_of[1], abs=0.05)


def test_a_run_goes_on_where_the_first_nodes_have_no_good_reply(monkeypatch):
    def spoil(partition, message, reply):
        if partition < 5:
            reply.content["arrays"] = ArrayRecord([np.array([np.nan])])

    # the first three answer at the same time
    grid = InMemoryGrid(fleet(mods=[rewriting(spoil)]), 4, monkeypatch)
    _, records = train(FedSlice(fedavg()), grid, 2)
    assert {f"node-{i}" for i in range(5, NODES)} == {*records[0]["fedbuff"]["nodes"]}


@pytest.mark.parametrize("simulated", [False, True])
def test_a_reply_names_its_worker_in_a_simulation_only(simulated, monkeypatch):
    monkeypatch.setattr(timing_module, "in_simulation", lambda: simulated)
    grid = fleet(mods=[timing_module.timing])
    strategy = FedSlice(fedavg())
    seen = []
    monkeypatch.setattr(strategy.rule, "arrived", lambda update: seen.append(update.reply))
    del grid._node_config[keys.EMULATED]
    monkeypatch.setattr("flwr_hetero.fleet.local_grid.stamp", lambda *args: None)
    for node in grid.get_node_ids():
        del grid.context(node).node_config[keys.EMULATED]
    train(strategy, grid, 1)
    records = [reply.content[keys.TIMING] for reply in seen]
    assert all((keys.WORKER in record) == simulated for record in records)
    if simulated:
        # hardly longer than from one reply to the next message
        assert all(0 <= record[keys.HANDOVER_TIME] < 60 for record in records)
        assert any(record[keys.HANDOVER_TIME] > 0 for record in records)
    assert seen
