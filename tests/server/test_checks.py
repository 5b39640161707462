import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.strategy import Wrapper


def test_replies_reach_the_hooks_sorted_by_identity():
    class Order(Wrapper):
        def on_replies(self, context, replies):
            self.order = [self.identity(r.metadata.src_node_id) for r in replies]
            return replies

    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 12))
    wrapper = Order()
    wrapper.start(grid, toy_arrays(), num_rounds=1)
    assert wrapper.order == [f"node-{i}" for i in range(12)]


def test_private_metrics_of_some_nodes_are_dropped():
    def sometimes(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0:
            metrics = next(iter(reply.content.metric_records.values()))
            metrics[keys.TRAIN_TIME] = 0.5
        return reply

    grid = LocalGrid(toy_app(mods=[sometimes]), profiles=[DeviceProfile()] * 3)
    history = History()
    result = history.start(grid, toy_arrays(), num_rounds=1)
    assert history.records[1]["failures"] == []
    assert keys.TRAIN_TIME not in result.train_metrics_clientapp[1]


def test_duplicate_and_stale_replies_are_dropped():
    wrapper = Wrapper()
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 2)
    messages = wrapper.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    old = list(grid.send_and_receive(messages))
    messages = wrapper.configure_train(2, toy_arrays(), ConfigRecord(), grid)
    new = list(grid.send_and_receive(messages))
    seen = []
    wrapper.on_replies = lambda r, replies: seen.extend(replies) or replies
    wrapper.aggregate_train(2, [*old, *new, *new])
    assert sorted(map(id, seen)) == sorted(map(id, new))
    assert len(wrapper.fleet.info.failures) == 4


def odd(when):
    """Make a mod that adds a metric when ``when(partition, round)``."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        number = message.content["config"].get(keys.SERVER_ROUND, 0)
        if when(context.node_config["partition-id"], number):
            next(iter(reply.content.metric_records.values()))["odd"] = 1.0
        return reply

    return mod


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_earlier_metrics_win_at_a_tie(earlier):
    mods = [odd(lambda partition, number: partition == 0 and number > earlier)]
    grid = LocalGrid(toy_app(mods=mods), profiles=[DeviceProfile()] * 2)
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(grid, toy_arrays(), num_rounds=4)
    failed = [[f["node"] for f in record["failures"]] for record in history.records[1:]]
    # without earlier rounds the first one wins, and stays the usual one
    rest = ["node-0"] if earlier else ["node-1"]
    assert failed == [[]] * earlier + [rest] * (4 - earlier)


def test_node_once_alone_does_not_set_the_metrics():
    mods = [odd(lambda partition, number: partition == 0)]
    faults = [Fault(i, "errs", 1, 5) for i in (1, 2)]
    grid = LocalGrid(toy_app(mods=mods), profiles=[DeviceProfile()] * 3, faults=faults)
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(grid, toy_arrays(), num_rounds=6)
    assert [f["node"] for f in history.records[6]["failures"]] == ["node-0"]


def test_replies_left_without_examples_are_dropped():
    class Drops(Wrapper):
        def on_replies(self, context, replies):
            return replies[:1]

    def empty(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0:
            next(iter(reply.content.metric_records.values()))["num-examples"] = 0
        return reply

    history = History(Drops(flower.FedAvg(fraction_evaluate=0.0)))
    grid = LocalGrid(toy_app(mods=[empty]), profiles=[DeviceProfile()] * 2)
    result = history.start(grid, toy_arrays(), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [0] * 4
    assert "num-examples is 0" in history.records[1]["failures"][0]["reason"]


class InMemoryGrid:
    """Flower's simulation, as a strategy sees it: no clock to be read, all replies come."""

    def __init__(self, grid):
        self.grid = grid

    def __getattr__(self, name):
        if name == "virtual_time_s":
            raise AttributeError(name)
        return getattr(self.grid, name)

    def pull_messages(self, message_ids):
        return self.grid.wait_for(message_ids)


def test_simulation_takes_the_time_of_local_grid():
    def times(wrap):
        faults = [Fault(i, "errs", 2, 2) for i in range(3)]
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 3), faults=faults)
        history = History()
        history.start(wrap(grid), toy_arrays(), num_rounds=3)
        assert len(history.records[2]["failures"]) >= 3
        return [record["virtual_s"] for record in history.records]

    expected = times(lambda grid: grid)
    assert expected[2] == expected[1] < expected[3]
    assert times(InMemoryGrid) == pytest.approx(expected, abs=1e-9)


def test_late_emulated_replies_are_dropped():
    grid = InMemoryGrid(LocalGrid(toy_app(), profiles=[DeviceProfile(1 / s) for s in (1, 4, 6)]))
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(grid, toy_arrays(), 1, timeout=4.5)
    record = history.records[1]
    assert record["failures"] == [{"node": "node-2", "reason": "late: 6 s, the time-out is 4.5 s"}]
    assert sorted(record["latency"]) == ["node-0", "node-1"]
    assert record["virtual_s"] == pytest.approx(4.5)


def test_failed_nodes_have_no_latency():
    class Drops(Wrapper):
        def on_replies(self, context, replies):
            context.drop(replies[0], "for the test")
            return replies[1:]

    history = History(Drops(flower.FedAvg(fraction_evaluate=0.0)))
    history.start(LocalGrid(toy_app(), [DeviceProfile()] * 3), toy_arrays(), 1)
    assert sorted(history.records[1]["latency"]) == ["node-1", "node-2"]
