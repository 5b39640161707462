"""An update far longer than those of most nodes counts little, at equal steps."""

import logging

import numpy as np
import pytest
from attacker import LyingGrid, trained
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import strategy as flower
from quadratics import app, fedavg, start
from recording import History

from flwr_hetero import strategy as ours
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange.aggregate import model_norms, with_update
from flwr_hetero.exchange.checks import Expected, Verdicts, accept
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.records import steps_that_count
from flwr_hetero_studies.core.quiet import only_errors

GOALS = [-1.0, -0.6, -0.3, 0.0, 0.0, 0.1, 0.4, 0.6, 0.8]
"""Of honest nodes; the tenth one lies."""
DEVICES = [DeviceProfile(1.0 + i % 2, seconds_per_example=1.0) for i in range(10)]


def scaled(factor):
    """Scale an update."""

    def lie(message, reply):
        before, after = (m.content["arrays"]["x"].numpy() for m in (message, reply))
        reply.content["arrays"] = ArrayRecord({"x": Array(before + factor * (after - before))})

    return trained(lie)


def run(strategy, factor=1.0, rounds=2, goals=(*GOALS, 1.0), x=1.0):
    """Return the history, and the model after each round; the last node scales its updates."""
    history = strategy if hasattr(strategy, "records") else History(strategy)
    found = []
    clients = app(goals, [100] * len(goals), 0.1)
    grid = LyingGrid(clients, DEVICES[: len(goals)], {len(goals) - 1: scaled(factor)})
    with only_errors():
        history.start(grid, start(x), rounds, evaluate_fn=lambda _, a: found.append(a["x"].numpy()))
    return history.records[1:], np.array(found).ravel()


STRATEGIES = {"FedAvg": lambda: ours.Wrapper(fedavg()), "FedSlice": lambda: ours.FedSlice(fedavg())}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_update_times_minus_20_moves_the_model_little(kind):
    # a round of FedSlice has many server updates
    rounds = {"FedAvg": 4, "FedSlice": 1}[kind]
    _, honest = run(STRATEGIES[kind](), rounds=rounds)
    records, among = run(STRATEGIES[kind](), -20.0, rounds=rounds)
    unlimited = STRATEGIES[kind]()
    unlimited.update_limit = None
    with np.errstate(all="ignore"):
        _, free = run(unlimited, -20.0, rounds=rounds)
    assert abs(among[-1] - honest[-1]) < 0.8
    assert np.abs(among).max() <= 1.0
    # FedSlice has a bound of its own, which holds without the limit, too.
    assert (np.abs(free[-1] - honest[-1]) < 3) == (kind == "FedSlice")
    cut = [share for record in records for node, share in record.get("shortened", {}).items()]
    assert min(cut) < 0.2
    assert all(record["failures"] == [] for record in records)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_equal_nodes_are_left_alone(kind):
    goals = [1.0, -1.0] * 3
    limited = STRATEGIES[kind]()
    unlimited = STRATEGIES[kind]()
    # None would not measure lengths, which FedSlice weighs by
    unlimited.update_limit = 1e9
    records, found = run(limited, goals=goals, x=0.1)
    _, free = run(unlimited, goals=goals, x=0.1)
    assert found.tolist() == free.tolist()
    assert not any("shortened" in record for record in records)


def exchange(norms, fleet=None, steps=None, sent=0.0, nodes=None, quorum=3, examples=()):
    """Let nodes send updates of these norms; return what is left of them, and the context."""
    be_server_task(1, 1, 1)
    context = Exchange(fleet or Fleet(), quorum=quorum, timeout_s=9.0)
    replies = []
    for i, norm in enumerate(norms):
        node = i if nodes is None else nodes[i]
        config = ConfigRecord({} if steps is None else {"num-steps": steps[i]})
        model = ArrayRecord({"w": Array(np.full(4, sent))})
        message = Message(RecordDict({"arrays": model, "config": config}), node, "train")
        set_message_id(message, f"{i}")
        context.messages.append(message)
        count = examples[i] if examples else 1
        metrics = MetricRecord({"num-examples": count, "num-steps": steps[i] if steps else 1})
        arrays = ArrayRecord({"w": Array(np.full(4, sent + norm / 2))})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    wanted = Expected(model, "num-examples" if examples else None, update_limit=2.0)
    good = accept(context, replies, Verdicts(context, wanted))
    ends = {r.metadata.src_node_id: r.content["arrays"]["w"].numpy() - sent for r in good}
    return {node: float(np.linalg.norm(end)) for node, end in ends.items()}, context


def test_the_longer_an_update_the_less_it_counts():
    found, context = exchange([1.0, 2.0, 3.0, 5.0, 12.0, -30.0])
    assert found == pytest.approx({0: 1, 1: 2, 2: 3, 3: 5, 4: 3, 5: 1.2})
    assert context.shortened == pytest.approx({"id-4": 0.25, "id-5": 0.04})
    found, context = exchange([1.0, 2.0, 3.0, 601.0])
    assert sorted(found) == [0, 1, 2]
    assert context.failed == {3: "its update is 150 times as long as it may be"}


def test_an_update_may_be_as_long_as_most_once_were():
    """Once most nodes have converged, the few with other data keep their vote."""
    fleet = Fleet()
    exchange([10.0, 10.0, 10.0, 10.0], fleet)
    for last, shortened in ((9.0, {}), (20.0, {"id-3": 0.25})):
        assert exchange([0.1, 0.1, 0.1, last], fleet)[1].shortened == pytest.approx(shortened)


def test_lies_do_not_make_the_next_ones_longer():
    fleet = Fleet()
    for _ in range(9):
        # liars of two in five
        found, _ = exchange([1.0, 1.0, 1.2, 50.0, 50.0], fleet)
        assert max(found.values()) == pytest.approx(1.2)


def test_of_the_first_few_most_may_lie():
    """Three quick liars of twenty are most of the first five: one median would be theirs."""
    fleet = Fleet()
    examples = [10, 10, 2**53, 2**53, 2**53]
    fleet.asked[MessageType.TRAIN] = {*range(20)}
    _, context = exchange([1.0, 1.0, 50.0, 50.0, 50.0], fleet, examples=examples)
    # twice the lower quartile stands for the median: ten times 20 examples, norms of 2 times 2
    assert context.shortened == pytest.approx(
        dict.fromkeys(["id-2", "id-3", "id-4"], (4 * 80 / 200 / 50) ** 2)
    )
    assert [claim for _, claim in fleet.examples["train"].values()] == [10, 10, 200, 200, 200]


def test_where_all_updates_become_longer_they_count():
    """As where a learning rate is warmed up."""
    fleet = Fleet()
    exchange([1.0] * 5, fleet)
    assert exchange([900.0] * 5, fleet)[0] == pytest.approx(dict.fromkeys(range(5), 900.0))
    found = [exchange([9e5] * 2, fleet, nodes=nodes)[0] for nodes in ((0, 1), (2, 3), (0, 1))]
    assert found[0] == {}
    assert found[2] == pytest.approx({0: 9e5, 1: 9e5})


def test_a_quick_node_does_not_set_what_is_usual():
    fleet = Fleet()
    exchange([1.0, 1.0, 1.0, 1.0], fleet)
    for _ in range(30):
        found, _ = exchange([40.0], fleet, nodes=[9])
        assert found == pytest.approx({9: 0.1})
    assert exchange([1.5], fleet, nodes=[2])[0] == pytest.approx({2: 1.5})


@pytest.mark.parametrize(
    ("norms", "steps", "left"),
    [
        # Of honest nodes they grow by the root of the steps; a claim of more steps buys nothing.
        ([1.0, 1.0, 1.0, 32.0], [1, 1, 1, 16], 2.0),
        ([1.0, 1.0, 1.0, 32.0], None, 0.125),
        # The slowest node may hold what no other does, and is far from its goal.
        ([4.0, 4.0, 4.0, 8.0], [16, 16, 16, 1], 8.0),
    ],
)
def test_only_more_assigned_steps_change_the_limit(norms, steps, left):
    assert exchange(norms, steps=steps)[0][3] == pytest.approx(left)


@pytest.mark.parametrize(
    ("assigned", "claim", "steps"),
    [
        (8, 8, 8),
        (8, 99, 8),
        (8, 2, 2),
        (8, None, 8),
        (None, 99, 1),
        (8, float("nan"), 8),
        (8, 0, 1),
    ],
)
def test_steps_that_count_are_no_more_than_were_assigned(assigned, claim, steps):
    be_server_task(1, 1, 1)
    config = ConfigRecord({} if assigned is None else {"num-steps": assigned})
    message = Message(RecordDict({"config": config}), 1, "train")
    metrics = MetricRecord({} if claim is None else {"num-steps": claim})
    reply = Message(RecordDict({"metrics": metrics}), reply_to=message)
    assert steps_that_count(message, reply) == steps


def test_the_first_updates_are_compared_with_the_model():
    assert exchange([20.0])[0] == pytest.approx({0: 0.2})
    assert exchange([80.0], sent=10.0)[0] == pytest.approx({0: 20.0})
    assert exchange([20.0, 0.5], sent=0.0)[0] == pytest.approx({0: 0.2, 1: 0.5})


@pytest.mark.parametrize("sent", [0.0, 500.0])
@pytest.mark.parametrize("long", [1, 5])
def test_updates_near_zero_are_no_yardstick(sent, long):
    """As where a learning rate is tiny in most slices: the others are of a usual length."""
    # the model's norm is 2 * sent
    size = max(1.0, 2 * sent)
    norms = [0.9e-6 * size] * 9 + [1.2 * size] * long
    fleet = Fleet()
    for _ in range(3):
        found, context = exchange(norms, fleet, sent=sent)
        assert (context.shortened, context.failed) == ({}, {})
        assert found == pytest.approx(dict(enumerate(norms)), rel=1e-3)


@pytest.mark.parametrize("norm", [1e-2, 1e-4, 1e-9, 0.0])
def test_one_liar_among_nodes_that_have_converged_is_held(norm):
    """Near zero by the model's norm, else by theirs."""
    fleet = Fleet()
    for _ in range(3):
        found, context = exchange([norm] * 9 + [90.0], fleet)
        assert found.get(9, 0.0) == pytest.approx(0.0 if norm > 1e-6 else 2.0**2 / 90)
        assert context.failed.keys() | {int(node[3:]) for node in context.shortened} == {9}


def test_privacy_clips_by_itself():
    private = flower.DifferentialPrivacyServerSideFixedClipping(fedavg(), 0.1, 1.0, 10)
    records, _ = run(ours.Wrapper(private), -20.0, rounds=2, x=3.0)
    assert not any("shortened" in record for record in records)


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_types_statistics_and_integers_are_kept(dtype):
    def model(w, mean, count):
        values = {"w": np.full(4, w, dtype), "bn.running_mean": np.full(4, mean, dtype)}
        counts = {"bn.num_batches_tracked": np.array(count)}
        return ArrayRecord({name: Array(value) for name, value in (values | counts).items()})

    be_server_task(1, 1, 1)
    before = model(-60000.0, 1.0, 3)
    after = model(60000.0, 3.0, 7)
    reply = Message(RecordDict({"arrays": after}), reply_to=Message(RecordDict(), 1, "train"))
    assert model_norms(after, before) == pytest.approx((240000.0, 4.0))
    cut = with_update(reply, before, before, 0.25, scale_of_buffers=0.5).content["arrays"]
    assert cut["w"].numpy() == pytest.approx(-30000.0)
    assert cut["bn.running_mean"].numpy() == pytest.approx(2.0)
    assert cut["bn.num_batches_tracked"].numpy() == 7
    assert [array.dtype for array in cut.values()] == [array.dtype for array in after.values()]


def test_what_was_cut_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "flwr")
    fleet = Fleet()
    for _ in range(3):
        context = exchange([1.0, 1.0, 1.0, 20.0], fleet)[1]
        assert context.shortened == pytest.approx({"id-3": 0.01})
    (line,) = (line for line in caplog.messages if "longer than most" in line)
    assert line.startswith("id-3: its update is longer than most and counts with 0.01 of its")


def test_a_resumed_run_compares_with_the_same_nodes(tmp_path):
    def recorded(name, rounds, resume=False):
        history = History(fedavg())
        own = ours.Recorded(history, run_dir=tmp_path / name, resume=resume)
        return run(own, -20.0, rounds=rounds)[1][-1]

    whole = recorded("whole", 4)
    recorded("parts", 2)
    assert recorded("parts", 4, resume=True) == whole
