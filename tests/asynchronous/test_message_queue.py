"""A simulation: its order is that of the devices' clock where they are emulated, else its own."""

from math import inf

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from plain_simulation import InMemoryGrid
from quadratics import STEPS, app, fedavg, models, start
from recording import History

from flwr_hetero.exchange import queue as queues
from flwr_hetero.exchange.context import NoProgressError
from flwr_hetero.exchange.queue import Clock, Costs, MessageQueue
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedBuff, Wrapper
from flwr_hetero_studies.rivals import FedCompass

GOALS = [0.0, 1.0, 2.0, 3.0, 4.0]
SPEEDS = [0.31, 1.0, 0.7, 2.3, 0.53]


def fleet():
    devices = [DeviceProfile(speed, seconds_per_example=1.0) for speed in SPEEDS]
    return LocalGrid(app(GOALS, [100] * 5, 0.05), devices)


def history(grid, updates, **settings):
    strategy = History(FedBuff(fedavg(fraction_evaluate=1.0), **settings))
    found, result = models(strategy, grid, updates)
    lines = [(r["virtual_s"], r.get("fedbuff"), r["evaluate"]) for r in strategy.records]
    return lines, found, result


@pytest.mark.parametrize("settings", [{}, {"concurrency": 2}, {"weighting": "equal"}])
def test_a_simulation_with_emulated_devices_equals_a_local_grid(settings, monkeypatch):
    lines, found, _ = history(fleet(), 25, **settings)
    again, same, _ = history(InMemoryGrid(fleet(), 0, monkeypatch), 25, **settings)
    assert same == pytest.approx(found)
    for one, other in zip(lines, again, strict=True):
        assert other[0] == pytest.approx(one[0])
        assert (other[1] or {}).get("nodes") == (one[1] or {}).get("nodes")
        assert other[2] == pytest.approx(one[2])
    assert lines[-1][0] > STEPS


@pytest.mark.parametrize("kind", [FedBuff, FedCompass])
def test_devices_that_are_not_emulated(kind, monkeypatch):
    grid = InMemoryGrid(fleet(), 5, monkeypatch)
    strategy = History(kind(fedavg(fraction_evaluate=1.0)))
    found, _ = models(strategy, grid, 20)
    assert grid.asked_again == []
    records = strategy.records[1:]
    assert [record["round"] for record in records] == [*range(1, 21)]
    assert not any(record["failures"] for record in records)
    assert records[-1]["virtual_s"] == pytest.approx(grid.clock.now_s)
    assert abs(found[-1] - 2.0) < abs(found[0] - 2.0)


def test_a_wait_ends_in_time_where_a_node_hangs(monkeypatch):
    devices = [DeviceProfile(1.0, seconds_per_example=speed) for speed in (1.0, 1e4)]
    grid = InMemoryGrid(LocalGrid(app([0.0, 1.0], [100] * 2, 0.05), devices), 2, monkeypatch)
    queue = MessageQueue(grid, Clock(), Costs())
    content = {"arrays": start(), "config": ConfigRecord()}
    queue.send([Message(RecordDict(content), node, "train") for node in (1000, 1001)], 70.0)
    (answered,) = queue.next(5.0)  # before the first reply nobody knows whose clock counts
    assert answered[0].node_id == 1000
    assert STEPS <= queue.clock.virtual_s < STEPS + 0.2
    assert queue.next(30.0) == []
    assert 30.0 <= queue.clock.virtual_s < 30.2
    assert [(pending.node_id, reply) for pending, reply in queue.next()] == [(1001, None)]
    assert 70.0 <= queue.clock.virtual_s < 70.4


def test_first_of_several_replies_counts(monkeypatch):
    class Twice(InMemoryGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            return [*replies, *(Message(RecordDict(), metadata=r.metadata) for r in replies)]

    queue = MessageQueue(Twice(fleet(), 5, monkeypatch), Clock(), Costs())
    content = {"arrays": start(), "config": ConfigRecord()}
    queue.send([Message(RecordDict(content), 1003, "train")], inf)
    ((job, reply),) = queue.next()
    assert job.node_id == 1003
    assert "arrays" in reply.content


class LossyGrid(InMemoryGrid):
    """As Flower's grid of real nodes since 1.43, which reports no loss.

    A message to the first node is not sent, and its id is empty. The second node's replies are lost
    while they are uploaded.
    """

    def get_nodes(self):
        return []

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        lost = [m.metadata.message_id for m in messages if m.metadata.dst_node_id == 1000]
        for message_id in lost:
            del self.replies[message_id]
        return ["" if message_id in lost else message_id for message_id in ids]

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        good = [reply for reply in replies if reply.has_content()]
        return [reply for reply in good if reply.metadata.src_node_id != 1001]


@pytest.mark.parametrize("timeout", [100.0, None])
@pytest.mark.parametrize("kind", [Wrapper, FedBuff])
def test_messages_and_replies_that_are_lost_fail(kind, timeout, monkeypatch):
    monkeypatch.setattr(queues, "POLL_S", 5.0)
    strategy = History(kind(fedavg()))
    strategy.late_limit = None
    models(strategy, LossyGrid(fleet(), 5, monkeypatch), 12, timeout=timeout)
    first, *others = strategy.records[1:]
    assert len(others) == 11
    failed = [{failure["node"] for failure in record["failures"]} for record in (first, *others)]
    is_over = kind is Wrapper or timeout
    assert set().union(*failed) == ({"id-1000", "id-1001"} if is_over else set())
    # A round lasts until the time-out, a server update does not.
    limit_s = 43_200 if timeout is None else timeout
    assert (first["virtual_s"] >= limit_s) is (kind is Wrapper)
    assert others[-1]["virtual_s"] < 2 * limit_s + 400


def test_run_ends_where_all_messages_are_lost(monkeypatch):
    monkeypatch.setattr(queues, "POLL_S", 600.0)

    class Deaf(LossyGrid):
        def pull_messages(self, message_ids):
            super().pull_messages(message_ids)
            return []

    for strategy in (Wrapper(fedavg()), FedBuff(fedavg())):
        with pytest.raises(NoProgressError):
            models(strategy, Deaf(fleet(), 5, monkeypatch), 6, timeout=None)
