import random

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero.fleet.faults import CORRUPTIONS
from flwr_hetero.server.reply_checks import Expected, judge_latency, view_array, why_bad
from flwr_hetero.strategy import Wrapper

FLOWER_STRATEGIES = {
    "FedAvg": lambda: flower.FedAvg(),
    "FedAdagrad": lambda: flower.FedAdagrad(),
    "FedAdam": lambda: flower.FedAdam(),
    "FedYogi": lambda: flower.FedYogi(),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedMedian": lambda: flower.FedMedian(),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(),
    "Krum": lambda: flower.Krum(),
    "MultiKrum": lambda: flower.MultiKrum(num_nodes_to_select=3),
    "Bulyan": lambda: flower.Bulyan(),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, train_loss_key="train-loss"),
}
EVERY_FAULT = [
    *(Fault(i, "garbage", 2, 2, corrupt=corrupt) for i, corrupt in enumerate(sorted(CORRUPTIONS))),
    Fault(0, "dies", 3, 3),
    Fault(1, "errs", 3, 3),
    Fault(2, "late", 3, 3, delay_s=3_600, message_type="train"),
]


def arrays_for(name):
    return toy_arrays(buffer=name != "QFedAvg")  # QFedAvg itself cannot take integers


@pytest.mark.parametrize("name", sorted(FLOWER_STRATEGIES))
def test_every_flower_strategy_gives_what_it_gives_alone(name):
    def run(strategy):
        random.seed(0)
        grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 10)
        return strategy.start(grid, arrays_for(name), num_rounds=3)

    alone, wrapped = run(FLOWER_STRATEGIES[name]()), run(Wrapper(FLOWER_STRATEGIES[name]()))
    for key in alone.arrays:
        assert wrapped.arrays[key].numpy() == pytest.approx(alone.arrays[key].numpy(), rel=1e-6)
    assert wrapped.train_metrics_clientapp[3] == pytest.approx(alone.train_metrics_clientapp[3])


@pytest.mark.parametrize("name", sorted(FLOWER_STRATEGIES))
def test_no_fault_stops_a_run(name):
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 14), faults=EVERY_FAULT)
    history = History(FLOWER_STRATEGIES[name]())
    result = history.start(grid, arrays_for(name), num_rounds=4)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    train_failures = [len(record["failures"]) for record in history.records]
    assert train_failures[1] == 0
    assert train_failures[2] >= len(CORRUPTIONS)
    assert train_failures[3] >= 3
    assert train_failures[4] == 0


def test_bad_replies_leave_the_average_as_if_they_had_not_been_asked():
    def final(faults, profiles):
        grid = LocalGrid(toy_app(), profiles=profiles, faults=faults)
        return Wrapper().start(grid, toy_arrays(), num_rounds=1).arrays["w"].numpy()

    bad = [Fault(i + 3, "garbage", corrupt=c) for i, c in enumerate(sorted(CORRUPTIONS))]
    profiles = [DeviceProfile()] * (3 + len(bad))
    assert final(bad, profiles) == pytest.approx(final([], profiles[:3]))


def test_weights_that_are_all_zero_keep_the_model():
    def empty(message, context, call_next):
        reply = call_next(message, context)
        next(iter(reply.content.metric_records.values()))["num-examples"] = 0
        return reply

    grid = LocalGrid(toy_app(mods=[empty]), profiles=[DeviceProfile()] * 3)
    history = History()
    result = history.start(grid, toy_arrays(), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [0, 0, 0, 0]
    assert "num-examples is 0" in history.records[1]["failures"][0]["reason"]


def test_all_replies_bad_keeps_the_model():
    faults = [Fault(i, "garbage", corrupt="nan") for i in range(3)]
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3, faults=faults)
    result = Wrapper().start(grid, toy_arrays(), num_rounds=2)
    assert result.arrays["w"].numpy().tolist() == [0, 0, 0, 0]


def test_each_instruction_has_records_of_its_own():
    class PerNode(Wrapper):
        def on_instructions(self, server_round, messages, grid):
            for message in messages:
                message.content["config"]["me"] = message.metadata.dst_node_id
            self.seen = [(m.metadata.dst_node_id, m.content["config"]["me"]) for m in messages]
            return messages

    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 4)
    config = ConfigRecord({"lr": 0.1})
    wrapper = PerNode()
    wrapper.start(grid, toy_arrays(), num_rounds=1, train_config=config)
    assert all(node == me for node, me in wrapper.seen)
    assert "me" not in config


def test_replies_reach_the_hooks_sorted_by_identity():
    class Order(Wrapper):
        def on_replies(self, server_round, replies):
            self.order = [self.identity(r.metadata.src_node_id) for r in replies]
            return replies

    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 12))
    wrapper = Order()
    wrapper.start(grid, toy_arrays(), num_rounds=1)
    assert wrapper.order == [f"node-{i}" for i in range(12)]


def test_history_counts_time_bytes_and_nodes():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(2.0), DeviceProfile(0.5)])
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(
        grid, toy_arrays(), num_rounds=2, evaluate_fn=lambda r, a: MetricRecord({"acc": r / 10})
    )
    first, last = history.records[1], history.records[-1]
    assert last["virtual_s"] == pytest.approx(4.0) == grid.virtual_time_s
    assert first["latency"] == {"node-0": pytest.approx(0.5), "node-1": pytest.approx(2.0)}
    assert first["global"] == {"acc": 0.1}
    model = sum(len(a.data) for a in toy_arrays().values())
    assert first["bytes_down"] == 2 * (model + 8)
    assert first["bytes_up"] > 2 * model
    assert sorted(history.records[2]["selected"]) == ["node-0", "node-1"]


def test_a_mod_on_only_some_nodes_does_not_stop_the_run():
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


def test_wrapping_twice_or_nonsense_is_refused():
    inner = Wrapper()
    Wrapper(inner)
    with pytest.raises(ValueError, match="wrapped only once"):
        Wrapper(inner)
    with pytest.raises(ValueError, match="strategy must be a flwr"):
        Wrapper("FedAvg")


def reply_with(arrays=None, metrics=None):
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()])
    message = Message(RecordDict(), next(iter(grid.get_node_ids())), "train")
    content = RecordDict()
    if arrays is not None:
        content["arrays"] = ArrayRecord({k: Array(v) for k, v in arrays.items()})
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    return Message(content, reply_to=message)


SENT = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32))})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((2, 3), np.float64), None),
        (np.zeros((2, 3), np.int64), None),
        (np.full((2, 3), 9e14, np.float32), None),  # as much as may be
        (np.full((2, 3), -1e38, np.float32), "holds values above 1e+15"),
        (np.full((2, 3), np.inf, np.float16), "NaN or infinity"),
        (np.full((2, 3), -np.inf, np.float32), "NaN or infinity"),
        (np.zeros((3, 2), np.float32), "shape"),
        (np.array([["a"] * 3] * 2), "cannot be averaged"),
    ],
)
def test_arrays_are_checked(values, reason):
    found = why_bad(reply_with({"w": values}, {"num-examples": 1}), Expected(SENT, "num-examples"))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), [1, 2]])
def test_weights_are_checked(weight):
    reply = reply_with({"w": np.zeros((2, 3))}, {"num-examples": weight})
    assert "num-examples" in why_bad(reply, Expected(SENT, "num-examples"))


def test_nothing_is_unpickled():
    array = Array(np.zeros(2))
    evil = Array("object", (1,), array.stype, _object_payload())
    with pytest.raises(ValueError, match="Python objects"):
        view_array(evil)


def _object_payload():
    import io

    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def test_view_array_is_the_array():
    for values in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)), np.array(4)):
        assert np.array_equal(view_array(Array(values)), values)


def timed(train_s, emulated):
    reply = reply_with(metrics={"num-examples": 1})
    record = {keys.TRAIN_TIME: train_s, keys.TRANSFER_TIME: 0.5, keys.EMULATED: emulated}
    reply.content[keys.TIMING] = ConfigRecord(record)
    return reply


@pytest.mark.parametrize(
    ("train_s", "emulated", "round_trip_s", "simulated", "seconds", "source"),
    [
        (3.0, True, 0.1, True, 3.5, "emulated"),
        (3.0, False, 9.0, False, 3.5, "reported"),
        (30.0, False, 9.0, False, 9.0, "observed"),  # more than the server saw
        (3.0, True, 9.0, False, 9.0, "observed"),  # emulation claimed by a real node
        (-1.0, False, 9.0, False, 9.0, "observed"),
        (float("nan"), False, None, False, None, None),
    ],
)
def test_latency_is_judged(train_s, emulated, round_trip_s, simulated, seconds, source):
    latency, _ = judge_latency(timed(train_s, emulated), round_trip_s, simulated=simulated)
    assert (latency and latency.seconds, latency and latency.source) == (seconds, source)


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
    assert len(wrapper.session.info.failures) == 4


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
def test_at_a_tie_the_metrics_of_earlier_rounds_win(earlier):
    mods = [odd(lambda partition, number: partition == 0 and number > earlier)]
    grid = LocalGrid(toy_app(mods=mods), profiles=[DeviceProfile()] * 2)
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(grid, toy_arrays(), num_rounds=4)
    failed = [[f["node"] for f in record["failures"]] for record in history.records[1:]]
    # without earlier rounds the first one wins, and stays the usual one
    rest = ["node-0"] if earlier else ["node-1"]
    assert failed == [[]] * earlier + [rest] * (4 - earlier)


def test_whoever_was_alone_once_does_not_shut_out_the_others():
    mods = [odd(lambda partition, number: partition == 0)]
    faults = [Fault(i, "errs", 1, 5) for i in (1, 2)]
    grid = LocalGrid(toy_app(mods=mods), profiles=[DeviceProfile()] * 3, faults=faults)
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(grid, toy_arrays(), num_rounds=6)
    assert [f["node"] for f in history.records[6]["failures"]] == ["node-0"]


class InMemoryGrid(Grid):
    """Flower's simulation, as a strategy sees it: no clock to be read, all replies come."""

    def __init__(self, grid):
        self.grid = grid

    def get_node_ids(self):
        return list(self.grid.get_node_ids())

    def get_nodes(self):
        return self.grid.get_nodes()

    def push_messages(self, messages):
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids):
        return self.grid.wait_for(message_ids)

    def send_and_receive(self, messages, *, timeout=None):
        return self.grid.send_and_receive(messages, timeout=timeout)

    def create_message(self, *arguments, **named):
        return self.grid.create_message(*arguments, **named)

    def set_run(self, run):
        self.grid.set_run(run)

    @property
    def run(self):
        return self.grid.run


def test_a_round_in_which_every_emulated_node_errs_takes_the_same_time_in_a_simulation():
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


class Outcomes(Wrapper):
    def __init__(self, strategy=None, drops=()):
        super().__init__(strategy)
        self.drops, self.seen = drops, []

    def on_replies(self, server_round, replies):
        return [r for r in replies if self.identity(r.metadata.src_node_id) not in self.drops]

    def on_train_end(self, server_round, good, failed):
        self.seen.append(("train", server_round, good, failed))

    def on_evaluate_end(self, server_round, good, failed):
        self.seen.append(("evaluate", server_round, good, failed))


def test_outcome_counts_after_all_wrappers():
    class Strict(Wrapper):
        def on_replies(self, server_round, replies):
            self.session.fail(replies[-1].metadata.src_node_id, "out of principle")
            return replies[:-1]

    faults = [Fault(1, "errs", 1, 1, message_type="train"), Fault(2, "errs", 1, 1)]
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 5, faults=faults)
    outer = Outcomes(Outcomes(Strict(), drops=["node-0"]))
    outer.start(grid, toy_arrays(), num_rounds=1)
    assert outer.seen == outer.inner.seen
    train, evaluate = outer.seen
    assert train == ("train", 1, ["node-3"], ["id-1001", "id-1002", "node-4"])
    assert evaluate == ("evaluate", 1, ["node-0", "node-1", "node-3", "node-4"], ["id-1002"])


class ByNode(Wrapper):
    """Weight models by 1, 2, ..."""

    def weights(self, replies):
        return [1.0 + i for i in range(len(replies))]


@pytest.mark.parametrize("inner", [flower.FedAvg, lambda: Wrapper(flower.MultiKrum())])
@pytest.mark.parametrize("outside", [False, True])
def test_outermost_weights_are_the_ones(inner, outside):
    strategy = Wrapper(ByNode(inner())) if not outside else ByNode(Wrapper(inner()))
    history = History(strategy)
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()] * 3)
    result = history.start(grid, toy_arrays(), num_rounds=1)
    shares = {f"node-{i}": pytest.approx((1 + i) / 6) for i in range(3)}
    assert history.records[1]["weights"] == shares
    assert history.records[0]["weights"] == {}
    if inner is flower.FedAvg:
        assert result.arrays["w"].numpy() == pytest.approx((0 * 1 + 1.01 * 2 + 2.04 * 3) / 6 / 2)
        assert result.train_metrics_clientapp[1]["train-loss"] == pytest.approx(5.1817 / 3)
    assert set(result.train_metrics_clientapp[1]) == {"train-loss"}


def test_replies_left_without_examples_are_dropped():
    class Drops(Wrapper):
        def on_replies(self, server_round, replies):
            return replies[:1]

    def empty(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0:
            next(iter(reply.content.metric_records.values()))["num-examples"] = 0
        return reply

    strategy = Drops(flower.FedAvg(fraction_evaluate=0.0))
    history = History(strategy)
    grid = LocalGrid(toy_app(mods=[empty]), profiles=[DeviceProfile()] * 2)
    result = history.start(grid, toy_arrays(), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [0] * 4
    assert "num-examples is 0" in history.records[1]["failures"][0]["reason"]
