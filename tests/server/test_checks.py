"""Which replies count, what their claims are worth, and the time of a round."""

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from recording import History
from toy import InMemoryGrid, altered, toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange.checks import Expected, check_form, judge_latency
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.server.loop import MAX_NODES, by_node
from flwr_hetero.strategy import Wrapper


def reply_with(metrics, node=7):
    be_server_task(1, 1, 1)
    message = Message(RecordDict(), node, "train")
    set_message_id(message, str(node))
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2]])
def test_weights_are_checked(weight):
    reply = reply_with({"num-examples": weight})
    with pytest.raises(ValueError, match="metric 'num-examples' is"):
        check_form(reply, Expected(weight_key="num-examples"))


JUNK = [-1.0, float("nan"), float("inf"), 1e308, "3", b"3", [3.0], True, 2**64 - 1]


@pytest.mark.parametrize(
    ("train_s", "emulated", "round_trip_s", "simulated", "seconds", "source"),
    [
        (3.0, True, 0.1, True, 3.5, "emulated"),
        (3.0, False, 9.0, False, 3.5, "reported"),
        (30.0, False, 9.0, False, 9.0, "observed"),  # more than the server saw
        (3.0, True, 9.0, False, 9.0, "observed"),  # emulation claimed by a real node
        *((bad, False, 9.0, False, 9.0, "observed") for bad in JUNK),
        (float("nan"), False, None, False, None, None),
        (3.0, 1, 9.0, False, 3.5, "reported"),  # not True
    ],
)
def test_latency_is_judged(train_s, emulated, round_trip_s, simulated, seconds, source):
    reply = reply_with({"num-examples": 1})
    record = {keys.TRAIN_TIME: train_s, keys.TRANSFER_TIME: 0.5, keys.EMULATED: emulated}
    reply.content[keys.TIMING] = ConfigRecord(record)
    context = Exchange(Fleet(), simulated=simulated)
    if round_trip_s is not None:
        context.round_trip_s[reply.metadata.reply_to_message_id] = round_trip_s
    latency = judge_latency(context, reply)
    assert (latency and latency.seconds, latency and latency.source) == (seconds, source)


@pytest.mark.parametrize(
    ("metric", "tenth", "first"),
    [("eval-acc", range(12), "id-1"), ("eval-loss", range(108, 120), "id-120")],
)
def test_by_node_has_mean_and_worst_tenth(metric, tenth, first):
    def found_in(metric, values):
        replies = [reply_with({metric: value}, i + 1) for i, value in enumerate(values)]
        return by_node(Exchange(Fleet()), replies)

    found = found_in(metric, [i / 100 for i in range(120)])
    figures = (found["metric"], found["nodes"], found["mean"], found["worst_tenth"])
    mean = pytest.approx(sum(tenth) / len(tenth) / 100)
    assert figures == (metric, 120, pytest.approx(0.595), mean)
    assert len(found["by_node"]) == MAX_NODES
    assert next(iter(found["by_node"])) == first
    assert found_in("acc", [0.5, float("nan"), 0.7])["by_node"] == {"id-1": 0.5, "id-3": 0.7}
    assert found_in("f1", [0.5]) == found_in("f1", []) == {}


def run(mods, strategy=None, rounds=1, faults=(), nodes=3, **settings):
    """Run on equal nodes; return the records of the rounds, and the result."""
    history = History(strategy or flower.FedAvg(fraction_evaluate=0.0))
    grid = LocalGrid(toy_app(mods=mods), [DeviceProfile()] * nodes, faults=faults)
    return history.start(grid, toy_arrays(), rounds, **settings), history.records[1:]


class Seen(Wrapper):
    """Keep the order of the replies, and some of them."""

    kept = None

    def on_replies(self, context, replies):
        self.order = [context.identity(r.metadata.src_node_id) for r in replies]
        return replies[: self.kept]


def test_replies_reach_the_hooks_sorted_by_identity():
    wrapper = Seen()
    wrapper.start(LocalGrid(toy_app(), named_fleet("paper-5", 12)), toy_arrays(), 1)
    assert wrapper.order == [f"node-{i}" for i in range(12)]


ODD = {"odd": 1.0}


def test_duplicate_and_stale_replies_are_dropped():
    wrapper = Wrapper()
    seen = []
    rounds = []
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 2)
    for number in (1, 2):
        context = Exchange(wrapper.fleet, number, toy_arrays())
        how = number, toy_arrays(), ConfigRecord(), grid, context
        rounds.append(list(grid.send_and_receive(wrapper.configure_train(*how))))
    old, new = rounds
    wrapper.on_replies = lambda context, replies: seen.extend(replies) or replies
    wrapper.aggregate_train(2, [*old, *new, *new], context)
    assert sorted(map(id, seen)) == sorted(map(id, new))
    assert len(wrapper.fleet.failures) == 4


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_earlier_metrics_win_at_a_tie(earlier):
    mod = altered(ODD, lambda partition, number: partition < 2 and number > earlier)
    _, records = run([mod], rounds=4, nodes=4)
    # without earlier rounds the first one wins, and stays the usual one
    rest = ["node-0", "node-1"] if earlier else ["node-2", "node-3"]
    failed = [[f["node"] for f in record["failures"]] for record in records]
    assert failed == [[]] * earlier + [rest] * (4 - earlier)


def test_node_once_alone_does_not_set_the_metrics():
    _, records = run([altered(ODD)], rounds=6, faults=[Fault(i, "errs", 1, 5) for i in (1, 2)])
    assert [f["node"] for f in records[5]["failures"]] == ["node-0"]


def test_replies_left_without_examples_are_dropped():
    wrapper = Seen(flower.FedAvg(fraction_evaluate=0.0))
    wrapper.kept = 1
    result, (record,) = run([altered({"num-examples": 0})], wrapper, nodes=2)
    assert result.arrays["w"].numpy().tolist() == [0] * 4
    assert "num-examples is 0" in record["failures"][0]["reason"]
    assert sorted(record["latency"]) == ["node-1"]  # failed nodes have none


def test_simulation_takes_the_time_of_local_grid():
    def times(wrap):
        faults = [Fault(i, "errs", 2, 2) for i in range(3)]
        history = History()
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 3), faults=faults)
        history.start(wrap(grid), toy_arrays(), num_rounds=3)
        assert len(history.records[2]["failures"]) >= 3
        return [record["virtual_s"] for record in history.records]

    expected = times(lambda grid: grid)
    assert expected[2] == expected[1] < expected[3]
    assert times(InMemoryGrid) == pytest.approx(expected, abs=1e-9)
