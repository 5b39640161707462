"""The virtual clock, nodes and faults; unusual messages go as with Flower's grids (tests/e2e)."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import reply_with, target, toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.client import emulation
from flwr_hetero.client.data_pass import GlobalGenerators
from flwr_hetero.exchange.nodes import GridView
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.fleet.faults import CORRUPTIONS
from flwr_hetero.older import OlderClients
from flwr_hetero.strategy import FedBuff, Wrapper

APP = Path(__file__).parents[1] / "e2e" / "deploy" / "probe_app"
PROFILES = [DeviceProfile(4.0), DeviceProfile(1.0), DeviceProfile(0.5)]


def ask(grid, server_round=1, ttl=None):
    def content():
        config = ConfigRecord({"server-round": server_round})
        return RecordDict({"arrays": toy_arrays(), "config": config})

    return [Message(content(), node, "train", ttl=ttl) for node in grid.get_node_ids()]


def partitions(grid, replies):
    nodes = (grid.context(reply.metadata.src_node_id) for reply in replies)
    return [node.node_config["partition-id"] for node in nodes]


def grid_of(train, profiles=PROFILES, **settings):
    """Make a grid whose nodes train by a function of message and context, and reply its metrics."""
    app = ClientApp()

    @app.train()
    def answer(message, context):
        metrics = MetricRecord({"num-examples": 1, **(train(message, context) or {})})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return LocalGrid(app, profiles, **settings)


PULLS = {
    "ids": lambda grid, ids: grid.pull_messages(ids),
    "name until 1.42": lambda grid, ids: grid.pull_messages(message_ids=ids),
    "name since 1.43": lambda grid, ids: grid.pull_messages(reply_to_message_ids=ids),
    "all": lambda grid, ids: grid.pull_messages(),
}


@pytest.mark.parametrize("around", [None, OlderClients, lambda grid: GridView(grid, [1000])])
@pytest.mark.parametrize("pull", PULLS)
def test_replies_are_pulled_by_id_or_all(pull, around):
    app = ClientApp()
    app.query()(lambda message, context: reply_with(message, {"num-examples": 100}))
    local = LocalGrid(app, PROFILES)
    grid = around(local) if around else local
    questions = [Message(RecordDict(), node, "query") for node in local.get_node_ids()]
    ids = sorted(grid.push_messages(questions))
    assert list(PULLS[pull](grid, ids)) == []
    local.virtual_time_s = 1.5
    replies = PULLS[pull](grid, ids if pull == "all" else ids[:1])
    expected = ids[:2] if pull == "all" else ids[:1]
    assert sorted(reply.metadata.reply_to_message_id for reply in replies) == expected
    assert sorted(local.pending) == [i for i in ids if i not in expected]
    assert list(grid.pull_messages([])) == []
    with pytest.raises(TypeError):
        grid.pull_messages(ids, message_ids=ids)


def test_round_lasts_as_long_as_the_slowest():
    grid = LocalGrid(toy_app(), profiles=PROFILES[::-1])
    replies = grid.send_and_receive(ask(grid))
    assert partitions(grid, replies) == [2, 1, 0]  # in order of arrival
    assert grid.virtual_time_s == pytest.approx(100 * 0.01 / 0.5)


@pytest.mark.parametrize(
    ("metrics", "took_s"),
    [
        ({"samples": 100, "loss": 1.5}, 1.0),  # of a strategy with weighted_by_key="samples"
        ({"samples": 100, "num-steps": 4}, 1.0),
        ({"samples": 100, "num-examples": 50}, 0.5),
        ({"samples": 100, "examples-processed": 30}, 0.3),
        ({"samples": 100, "epochs": 2}, 0.01),  # neither is known to be it
        ({"loss": 100.0}, 0.01),
    ],
)
def test_a_node_takes_the_time_of_the_examples_it_reports(metrics, took_s):
    app = ClientApp()
    app.train()(lambda message, context: reply_with(message, metrics))
    grid = LocalGrid(app, [DeviceProfile(1.0)])
    grid.send_and_receive(ask(grid))
    assert grid.virtual_time_s == pytest.approx(took_s)


def test_link_time_is_counted_both_ways():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(1.0, 0.01, 0.02)])
    message = ask(grid)[0]
    down = 8 * (sum(len(a.data) for a in message.content["arrays"].values()) + 8)
    [reply] = grid.send_and_receive([message])
    up = 8 * (sum(len(a.data) for a in reply.content["arrays"].values()) + 2 * 8)
    assert grid.virtual_time_s == pytest.approx(1.0 + down / 0.02e6 + up / 0.01e6)


@pytest.mark.parametrize("kind", ["train", "evaluate", keys.PROFILE_MESSAGE])
@pytest.mark.parametrize("faults", [[], [Fault(0, "errs")]])
def test_every_message_costs_waiting_and_a_start_by_the_devices_speed(kind, faults):
    free = DeviceProfile(0.5, jitter=0.5)
    took_s = []
    for profile in (free, replace(free, wait_s=3.0, start_s=2.0)):
        grid = LocalGrid(toy_app(), [profile], faults=faults)
        message = Message(ask(grid)[0].content, 1000, kind)
        [reply] = grid.send_and_receive([message])
        times = reply.content[keys.TIMING] if reply.has_content() else {keys.TRAIN_TIME: 0.0}
        # as of a real node, what it reports is the time of its ClientApp alone
        took_s.append((grid.virtual_time_s, times[keys.TRAIN_TIME]))
    (free_s, own_s), (costly_s, same_s) = took_s
    assert costly_s == pytest.approx(free_s + 3.0 + 2.0 / 0.5)
    assert own_s == same_s  # jitter is that of computing


def test_messages_wait_for_the_poll_of_their_node():
    """By the seed and the message: each message another time, and each run the same."""
    runs = []
    for _ in range(2):
        grid = LocalGrid(toy_app(), [DeviceProfile(1.0, poll_s=3.0)] * 8, seed=4)
        messages = ask(grid)
        grid.push_messages(messages)
        runs.append([answer.arrival_s for answer in grid.pending.values()])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 8
    assert all(1.0 < arrival_s < 4.0 for arrival_s in runs[0])


def test_a_device_draws_alike_in_flowers_simulation(monkeypatch):
    device = DeviceProfile(2.0, jitter=0.3, poll_s=3.0)
    grid = LocalGrid(toy_app(), [device], seed=4)
    [message] = ask(grid)
    grid.send_and_receive([message])
    monkeypatch.setattr(emulation, "in_simulation", lambda: True)
    monkeypatch.setattr(emulation, "_profiles", lambda fleet, num_nodes: [device])
    node = {"partition-id": 0, "num-partitions": 1}
    context = Context(1, 1000, node, RecordDict(), {"fleet": "these", "seed": 4})
    times = toy_app(mods=[emulation.emulated_device])(message, context).content[keys.TIMING]
    took_s = times[keys.TRAIN_TIME] + times[keys.TRANSFER_TIME]
    assert took_s == pytest.approx(grid.virtual_time_s)


def test_timeout_moves_the_clock():
    grid = LocalGrid(toy_app(), profiles=PROFILES)
    messages = ask(grid)
    replies = grid.send_and_receive(messages, timeout=1.5)
    assert partitions(grid, replies) == [0, 1]
    assert grid.virtual_time_s == 1.5
    late = messages[2].metadata.message_id
    assert grid.pull_messages([late]) == []  # costs a tenth of a second, not the wait
    assert grid.virtual_time_s == pytest.approx(1.6)
    grid.virtual_time_s = 2.0
    assert partitions(grid, grid.pull_messages([late])) == [2]
    assert grid.pending == {}


def test_node_does_one_job_at_a_time():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(1.0)])
    grid.push_messages(ask(grid))
    grid.push_messages(ask(grid))
    grid.send_and_receive(ask(grid))
    assert grid.virtual_time_s == pytest.approx(3.0)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_same_seed_same_run(jitter):
    def rounds(seed):
        profile = DeviceProfile(2.0, jitter=jitter, availability=0.7)
        grid = LocalGrid(toy_app(), profiles=[profile] * 8, seed=seed)
        for number in range(1, 6):
            replies = grid.send_and_receive(ask(grid, number))
            good = [reply for reply in replies if reply.has_content()]
            yield partitions(grid, good), grid.virtual_time_s

    assert list(rounds(3)) == list(rounds(3)) != list(rounds(4))


def test_local_grid_is_like_flowers(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from probe_app import client_app, server_app

    grid = LocalGrid(client_app.app, [DeviceProfile()] * 2)
    assert server_app.probe(grid) == server_app.EXPECTED
    assert grid.pending == {}


@pytest.mark.parametrize("strategy", [FedAvg, Wrapper, FedBuff])
def test_strategies_run_without_a_time_out(strategy):
    grid = LocalGrid(toy_app(), [DeviceProfile()] * 3)
    result = strategy().start(grid, toy_arrays(), 20, timeout=None)
    mean = sum(target(i) for i in range(3)) / 3
    assert result.arrays["w"].numpy() == pytest.approx(np.full(4, mean), abs=1e-4)


def test_client_app_that_fails_cannot_change_what_others_see():
    def train(message, context):
        message.content["config"]["server-round"] = 99
        message.content["arrays"]["w"] = Array(np.ones(1))
        raise RuntimeError("out of memory")

    grid = grid_of(train)
    shared = RecordDict({"arrays": toy_arrays(), "config": ConfigRecord({"server-round": 1})})
    replies = grid.send_and_receive([Message(shared, node, "train") for node in range(1000, 1003)])
    assert shared["config"]["server-round"] == 1
    assert shared["arrays"]["w"].numpy().shape == (4,)
    assert {reply.error.reason for reply in replies} == {"RuntimeError: out of memory"}


def draws():
    """Ask two nodes twice in one push; return what they drew, in order."""

    def train(message, context):
        return {"drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))]}  # noqa: NPY002

    grid = grid_of(train, [DeviceProfile(2.0**i) for i in range(2)])
    messages = ask(grid, 1) + ask(grid, 2)
    replies = {m.metadata.reply_to_message_id: m for m in grid.send_and_receive(messages)}
    return [replies[m.metadata.message_id].content["metrics"]["drawn"] for m in messages]


def test_what_a_node_draws_depends_on_its_message_alone():
    before = random.getstate(), torch.get_rng_state().tolist()
    found = draws()
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert len({number for drawn in found for number in drawn}) == 12
    random.seed(8)
    assert draws() == found


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**40])
def test_generators_are_seeded_as_their_libraries_do(seed):
    generators = GlobalGenerators()
    with generators.restored():
        generators.seed(seed)
        drawn = random.random(), np.random.rand(700).tolist(), torch.rand(700).tolist()  # noqa: NPY002
    torch_numbers = torch.rand(700, generator=torch.Generator().manual_seed(seed)).tolist()
    numpy_numbers = np.random.RandomState(np.random.MT19937(seed)).rand(700).tolist()
    assert drawn == (random.Random(seed).random(), numpy_numbers, torch_numbers)


def test_leave_join_and_come_back():
    grid = LocalGrid(toy_app(), profiles=PROFILES)
    first = next(iter(grid.get_node_ids()))
    grid.leave(first)
    newcomer = grid.join(DeviceProfile(1.0))
    assert set(grid.get_node_ids()) == {first + 1, first + 2, newcomer}
    assert grid.context(newcomer).node_config["partition-id"] == 3
    [reply] = grid.send_and_receive([Message(RecordDict(), first, "train")])
    assert reply.error.code == 5
    grid.come_back(first)
    assert first in set(grid.get_node_ids())


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: LocalGrid(toy_app(), []), "profiles must hold at least one device"),
        (lambda: Fault(0, "sleeps"), "kind must be one of"),
        (lambda: Fault(0, "garbage", corrupt="gone"), "corrupt must be one of"),
    ],
)
def test_refusals(call, rule):
    with pytest.raises(ValueError, match=rule):
        call()


def test_faults_hit_their_node_and_round():
    faults = [Fault(0, "dies", 2, 2), Fault(1, "errs", 2, 2), Fault(2, "late", 2, 2, delay_s=10)]
    grid = LocalGrid(toy_app(), profiles=PROFILES, faults=faults)
    assert partitions(grid, grid.send_and_receive(ask(grid, 1))) == [0, 1, 2]
    assert grid.virtual_time_s == 2.0
    replies = list(grid.send_and_receive(ask(grid, 2), timeout=60))
    assert [r.has_error() for r in replies] == [True, False]
    assert partitions(grid, replies) == [1, 2]
    assert grid.virtual_time_s == 2.0 + 60.0
    assert partitions(grid, grid.send_and_receive(ask(grid, 3))) == [0, 1, 2]


@pytest.mark.parametrize("corrupt", sorted(CORRUPTIONS))
def test_every_corruption_changes_the_reply(corrupt):
    def reply(*faults):
        grid = LocalGrid(toy_app(), profiles=PROFILES[:1], faults=faults)
        content = grid.send_and_receive(ask(grid))[0].content
        return {
            (name, key): (value.shape, value.data) if name in content.array_records else repr(value)
            for name, record in content.items()
            for key, value in record.items()
        }

    assert reply(Fault(0, "garbage", corrupt=corrupt)) != reply()
