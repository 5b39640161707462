"""Which replies count, what their claims are worth, and the time of a round."""

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from recording import History
from steps_toy import steps_app, steps_arrays
from toy import InMemoryGrid, altered, toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange.checks import judge_latency
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.mod import timing
from flwr_hetero.records import Latency
from flwr_hetero.server import loop
from flwr_hetero.server.loop import MAX_NODES, by_node
from flwr_hetero.strategy import FedBuff, FedSlice, TiFL, Wrapper


def reply_with(metrics, node=7):
    be_server_task(1, 1, 1)
    message = Message(RecordDict(), node, "train")
    set_message_id(message, str(node))
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


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


# --- where the seconds of a message went ------------------------------------------------------
CLAIM = {keys.START_TIME: 2.0, keys.RECEIVE_TIME: 0.5, keys.TRAIN_TIME: 1.25, keys.SEND_TIME: 0.25}
PARTS = {"wait": 6.0, "start": 2.0, "receive": 0.5, "train": 1.25, "send": 0.25}


def judged(claim, *, simulated=False, emulated=False, work=None):
    reply = reply_with({"num-examples": 1})
    if work is not None:
        reply.content[keys.WORK] = work
    times = {keys.TRANSFER_TIME: 0.0, keys.EMULATED: emulated, **claim}
    reply.content[keys.TIMING] = ConfigRecord(times)
    context = Exchange(Fleet(), simulated=simulated, same_clock=True)
    context.round_trip_s[reply.metadata.reply_to_message_id] = 10.0
    return judge_latency(context, reply)


def test_parts_sum_to_the_round_trip():
    latency = judged(CLAIM)
    assert (latency.seconds, latency.parts) == (1.25, PARTS)
    alone = judged({keys.TRAIN_TIME: 1.25}).parts
    assert alone == {"wait": 8.75, "train": 1.25}
    assert judged({keys.TRAIN_TIME: 10.0}).parts == {"wait": 0.0, "train": 10.0}


@pytest.mark.parametrize("key", CLAIM)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), "3", 2**64 - 1, 9.75])
def test_claims_that_cannot_be_are_not_kept(key, bad):
    """Those that are no numbers, or that together are more than the round trip."""
    # a reply may be sent more quickly than the one before
    rest = {"wait": 6.25, "start": 2.0, "receive": 0.5, "train": 1.25}
    slower = key == keys.SEND_TIME and bad in (9.75, 2**64 - 1)
    assert judged(CLAIM | {key: bad}).parts == (rest if slower else None)


@pytest.mark.parametrize("where", [{"simulated": True}, {"emulated": True}])
def test_only_real_nodes_are_divided(where):
    assert judged(CLAIM, **where).parts is None


def test_line_of_a_round_has_means_by_node():
    be_server_task(1, 1, 1)
    context = Exchange(Fleet())
    context.messages = [Message(RecordDict(), node, "train") for node in (7, 7, 8, 9)]
    for i, message in enumerate(context.messages):
        set_message_id(message, str(i))
    times = [{"wait": 1.0, "train": 2.0}, {"wait": 2.0, "train": 1.0, "start": 0.5004}, None]
    context.latency = {str(i): Latency(2.0, False, "reported", t) for i, t in enumerate(times)}
    node = context.identity(7)
    other = context.identity(8)
    found = loop._times_by_node(context)
    assert found["latency"] == {node: 2.0, other: 2.0}
    expected = {"wait": {node: 1.5}, "train": {node: 1.5}, "start": {node: 0.25}}
    assert found["seconds"] == expected


class RealGrid(InMemoryGrid):
    """A grid of real nodes, as a strategy sees it: they do nothing, in no time."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        for reply in replies:
            reply.content[keys.TIMING].update(dict.fromkeys(CLAIM, 0.0) | {keys.EMULATED: False})
        return replies


STRATEGIES = {
    "FedAvg": Wrapper,
    "FedSlice": FedSlice,
    "FedBuff": FedBuff,
    "TiFL": lambda: TiFL(clients_per_round=2, num_tiers=2),
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("is_real", [True, False])
def test_every_strategy_keeps_them(make, is_real):
    grid = LocalGrid(steps_app(mods=[timing]), profiles=[DeviceProfile()] * 4)
    history = History(make())
    history.start(RealGrid(grid) if is_real else grid, steps_arrays(), 2)
    lines = [record for record in history.records if record["latency"]]
    assert lines
    for line in lines:
        assert ("seconds" in line) == is_real
        assert not is_real or line["seconds"].keys() == PARTS.keys()
        for seconds in line.get("seconds", {}).values():
            assert seconds.keys() == line["latency"].keys()
