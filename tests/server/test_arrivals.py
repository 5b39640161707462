"""Waiting for replies: for good ones, and for no node that is far behind the others."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from attacker import NESTS, leaf, start
from composition_toy import composition_app
from flwr.app import Error, Message, RecordDict
from recording import History, killed_and_resumed
from toy import InMemoryGrid, toy_app, toy_arrays

from flwr_hetero import strategy as ours
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange import queue
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid, named_fleet
from flwr_hetero_studies.core.quiet import only_errors

TIMEOUT_S = 30.0
LATE_S = 0.99 * TIMEOUT_S


def run(strategy, profiles, faults=(), rounds=3, *, grid=lambda grid: grid, app=None, **settings):
    """Return the records after the first, and the seconds that the run took."""
    random.seed(1)
    history = History(strategy)
    local = LocalGrid(app or toy_app(), profiles, faults=faults)
    with only_errors():
        history.start(grid(local), settings.pop("arrays", toy_arrays()), rounds, TIMEOUT_S)
    return history.records[1:], history.records[-1]["virtual_s"]


def failures(records):
    return [failure for record in records for failure in record["failures"]]


def quick_and_bad(num_nodes, num_bad):
    """Make a fleet whose first nodes answer NaN before all others, which take 1 s and more."""
    profiles = [DeviceProfile(1 / (0.01 if i < num_bad else 1 + i / 100)) for i in range(num_nodes)]
    return profiles, [Fault(i, "garbage", corrupt="nan") for i in range(num_bad)]


@pytest.mark.parametrize(
    ("num_nodes", "num_bad", "per_round", "rounds"), [(100, 3, 3, 2), (200, 10, 5, 10)]
)
def test_tifl_goes_on_with_the_first_good_replies(num_nodes, num_bad, per_round, rounds):
    strategy = ours.TiFL(leaf(), per_round)
    records, _ = run(strategy, *quick_and_bad(num_nodes, num_bad), rounds)
    for record in records:
        # a tier may be smaller while nodes are timed
        assert per_round - 1 <= len(record["weights"]) <= per_round
        assert {*record["selected"]} - {*record["weights"]} <= {
            f"id-{1000 + i}" for i in range(num_bad)
        }


class FirstFour(ours.Wrapper):
    """Four good replies are enough for a round."""

    def on_instructions(self, context, messages, grid):
        context.enough = 4
        return messages


@pytest.mark.parametrize("grid", [lambda grid: grid, InMemoryGrid])
def test_a_round_ends_with_enough_good_replies(grid):
    records, _ = run(FirstFour(leaf()), *quick_and_bad(20, 3), 6, grid=grid)
    assert [len(record["weights"]) for record in records] == [4] * 6
    assert records[0]["virtual_s"] == pytest.approx(1.06)  # the fourth good one


def test_what_a_wrapper_refuses_takes_no_place():
    class Own(ours.Wrapper):
        def why_bad(self, context, reply):
            judged.append(reply.metadata.src_node_id)
            return "out of principle" if reply.metadata.src_node_id < 1003 else None

    judged = []
    profiles, _ = quick_and_bad(8, 3)
    records, _ = run(FirstFour(Own(leaf())), profiles, rounds=1)
    assert sorted(records[0]["weights"]) == [f"node-{i}" for i in range(3, 7)]
    assert judged[3:] == [*range(1003, 1007)], "in the order of arrival"
    assert sorted(judged) == [*range(1000, 1007)], "each once"


@pytest.mark.parametrize("nest", ["none", "TiFL", "FedBuff"])
def test_a_late_node_costs_two_honest_runs_at_most(nest):
    """It answers at 0.99 of the time-out to all, and so, without a limit, makes each round last."""
    seconds = []
    for faults in [], [Fault(0, "late", delay_s=LATE_S)]:
        strategy = NESTS[nest](leaf(fraction_evaluate=1.0))
        app = composition_app()
        profiles = [DeviceProfile(4.0, jitter=0.1)] * 6
        records, took_s = run(strategy, profiles, faults, 25, app=app, arrays=start())
        seconds.append(took_s)
        assert len(records) == 25
        assert all(record["train"] for record in records)
    assert seconds[1] <= 3 * seconds[0]


def spread(num_nodes, seed):
    """Draw log-normal speeds of which the largest is 100 times the smallest."""
    logs = np.random.default_rng(seed).normal(size=num_nodes)
    return [DeviceProfile(speed) for speed in 100 ** ((logs - logs.min()) / np.ptp(logs))]


@pytest.mark.parametrize("select", [lambda s: s, lambda s: ours.RandomSelection(s, 5)])
def test_honest_fleets_keep_all_their_nodes(select):
    fleets = [named_fleet("paper-5", n) for n in (5, 20)]
    fleets += [spread(n, seed) for seed, n in enumerate((6, 20))]
    # three quick ones and two slow ones, as far apart as in the paper
    fleets += [[DeviceProfile(speed) for speed in (4.0, 4.0, 4.0, 0.1, 0.1)]]
    for profiles in fleets:
        records, _ = run(select(leaf(fraction_evaluate=1.0)), profiles, rounds=4)
        assert failures(records) == []


@pytest.mark.parametrize(
    ("kind", "others_s"),
    [("train", 1.0), pytest.param("evaluate", 1 / 30, marks=pytest.mark.nightly)],
)
def test_what_a_late_node_costs(kind, others_s, caplog):
    """50 times as long as most took, its reply, and twice that as a rest; the history says so."""
    faults = [Fault(0, "late", 2, 2, message_type=kind, delay_s=LATE_S)]
    strategy = ours.Wrapper(leaf(fraction_evaluate=1.0))
    strategy.late_limit = 20.0
    records, _ = run(strategy, [DeviceProfile()] * 6, faults, 70)
    lengths = np.diff([record["virtual_s"] for record in records])
    assert lengths[0] == pytest.approx(20 * others_s + (1 / 30 if kind == "train" else 1.0))
    reason = f"no reply within {20 * others_s:.3g} s, 20 times what most take (late_limit)"
    assert failures(records)[0] == {"node": "node-0", "reason": reason}
    there = ["node-0" in record["selected"] for record in records[2:]]
    if kind == "train":
        assert there.index(True) * (1 + 1 / 30) == pytest.approx(2 * 20 * others_s, abs=1.1)
    assert there[-1], "its old job is over"


@pytest.mark.parametrize("num_nodes", [4, 6])
def test_without_a_limit_the_time_out_counts(num_nodes):
    """Switched off, or in a fleet of four, of which one may well be a device of another kind."""
    strategy = ours.Wrapper(leaf())
    if num_nodes > 4:
        strategy.late_limit = None
    late = [Fault(0, "late", delay_s=LATE_S - 1)]
    records, took_s = run(strategy, [DeviceProfile(4.0)] * num_nodes, late)
    assert failures(records) == []
    assert took_s > 2 * TIMEOUT_S


def test_a_resumed_run_knows_who_is_late(tmp_path):
    """Rounds of three nodes alone do not tell when one is late."""

    def go(folder, evaluate_fn, resume):
        # beyond 50 times 0.1 s, but over when they are asked again
        faults = [Fault(i, "late", 5, delay_s=8.0) for i in range(3)]
        grid = LocalGrid(toy_app(), [DeviceProfile(10.0, jitter=0.1)] * 8, faults=faults)
        inner = ours.RandomSelection(leaf(), 3, seed=5)
        strategy = ours.Recorded(inner, run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(), 12, TIMEOUT_S, evaluate_fn=evaluate_fn)

    def same(record):
        # what late nodes go on with is not known after a resume
        return {k: v for k, v in record.items() if k not in ("wall_s", "device_s")}

    with only_errors():
        killed_and_resumed(go, tmp_path, 5, same)


HELD_UP_S, LIMIT_S = 180.0, 120.0


class RealGrid:
    """Nodes answer in turn: ``answers`` has the seconds and, for a bad reply, what is wrong."""

    def __init__(self, clock, answers, held_up_s=0.0):
        self.clock = clock
        self.answers = answers
        self.held_up_s = held_up_s
        self.num_polls = 0

    def push_messages(self, messages):
        self.messages = messages
        self.sent_s = self.clock.now_s
        for number, message in enumerate(messages):
            set_message_id(message, f"{number}")
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        self.num_polls += 1
        passed_s = self.clock.now_s - self.sent_s
        self.clock.now_s += self.held_up_s if self.num_polls == 1 else 0.0
        found = []
        for message, (at_s, error) in zip(self.messages, self.answers, strict=True):
            if message.metadata.message_id in ids and at_s <= passed_s:
                content = Error(3, error) if error else RecordDict()
                found.append(Message(content, reply_to=message))
        return found


@pytest.fixture
def clock(monkeypatch):
    def sleep(seconds):
        made.now_s += seconds

    made = SimpleNamespace(now_s=5.0, monotonic=lambda: made.now_s, sleep=sleep)
    monkeypatch.setattr(queue, "time", made)
    be_server_task(1, 1, 1)
    return made


def polled(grid, **settings):
    messages = [Message(RecordDict(), node, "train") for node, _ in enumerate(grid.answers, 1)]
    exchange = Exchange(Fleet(), messages=messages, timeout_s=LIMIT_S, **settings)
    return [reply.metadata.src_node_id for reply in exchange.send(grid)], exchange


def test_reply_sent_while_a_poll_was_held_up_counts(clock):
    """Node 1 goes while it sends its reply, which holds the first poll up; node 2 answers then."""
    grid = RealGrid(clock, [(0, "its objects are gone"), (HELD_UP_S, None), (1e9, None)], HELD_UP_S)
    nodes, exchange = polled(grid)
    assert nodes == [1, 2]
    assert exchange.round_trip_s == {"0": HELD_UP_S, "1": HELD_UP_S}
    assert grid.num_polls == 2, "the third node's time is over"


def test_a_real_fleet_waits_for_good_replies(clock):
    grid = RealGrid(clock, [(1, None), (2, "in vain"), (3, None), (4, None), (9, None)])
    nodes, _ = polled(grid, enough=2, judge=lambda reply, node: reply.has_content() and node > 1)
    assert nodes == [1, 2, 3, 4]


@pytest.mark.parametrize("others_s", [0.5, 9.0])
def test_a_late_real_node_has_ten_seconds(others_s, clock):
    nodes, exchange = polled(RealGrid(clock, [*[(others_s, None)] * 5, (1e9, None)]))
    assert nodes == [1, 2, 3, 4, 5]
    late_s = max(10.0, 50 * exchange.round_trip_s["0"])
    assert exchange.late_s == (late_s if late_s < LIMIT_S else np.inf)
    assert clock.now_s - 5 == pytest.approx(min(late_s, LIMIT_S), abs=1)
