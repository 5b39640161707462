from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from recording import History
from toy import toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mercury.algorithm import make_groups
from flwr_hetero.mercury.resharding import NodeShard, offer, pack, unpack
from flwr_hetero.strategy import Recorded, Resharding, TiFL, Wrapper

NODES, SLOTS, SIZE = 4, 10, 4 * 2 + 8
ALL = Counter((float(node), float(slot)) for node in range(NODES) for slot in range(SLOTS))


def own_inputs(node: int) -> np.ndarray:
    return np.array([[node, slot] for slot in range(SLOTS)], np.float32)


def app(seen: list, spoil=None) -> ClientApp:
    """A node whose samples are (node, slot); what it trains on goes into ``seen``."""
    client = ClientApp()

    @client.train()
    def train(message, context):
        node = int(context.node_config["partition-id"])
        inputs, targets = own_inputs(node), np.full(SLOTS, node)
        shard = NodeShard.open(message, context)
        keep = np.arange(SLOTS)
        if shard is not None:
            for slot, content in shard.held.items():
                inputs[slot], targets[slot] = (x[0] for x in unpack(content, (2,), NODES))
            keep = np.setdiff1d(keep, shard.missing)
        round_number = message.content["config"]["server-round"]
        seen.append((round_number, node, [tuple(map(float, row)) for row in inputs[keep]]))
        metrics = MetricRecord({"num-examples": len(keep)})
        arrays = message.content["arrays"]
        reply = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
        if shard is not None:
            importance = np.arange(SLOTS, dtype=float)
            groups = make_groups(SLOTS, 2, np.random.default_rng(0))

            def choose(count, by_importance):
                weights = importance if by_importance else np.ones(SLOTS)
                return offer(weights, groups, count, np.random.default_rng(node))

            slots = shard.offers(SLOTS, SIZE, choose)
            shard.close(reply, context, slots, pack(inputs[slots], targets[slots]))
            if spoil:
                spoil(reply.content[keys.RESHARDING], node)
        return reply

    @client.train("profile")
    def report(message, context):
        metrics = MetricRecord({"num-examples": SLOTS})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return client


def run(num_rounds=6, faults=(), spoil=None, **settings):
    seen: list = []
    grid = LocalGrid(app(seen, spoil), profiles=[DeviceProfile()] * NODES, faults=faults)
    settings = {"share": 1.0, "budget_bytes": 3 * SIZE, **settings}
    strategy = Resharding(FedAvg(fraction_evaluate=0.0), **settings)
    history = History(strategy)
    history.start(grid, toy_arrays(), num_rounds, timeout=100)
    return seen, strategy, [r["resharding"] for r in history.records[1:]], grid


def trained_in(seen, number):
    return Counter(sample for r, _, samples in seen if r == number for sample in samples)


def test_samples_move_in_chunks_and_none_is_lost_or_doubled():
    seen, _, rounds, _ = run()
    for number in range(1, 7):
        assert trained_in(seen, number) == ALL
    for _, _, samples in seen:
        assert len(samples) == SLOTS
    assert [r["offered_bytes"] // SIZE for r in rounds] == [12, 12, 12, 4, 0, 0]
    assert [r["delivered_bytes"] // SIZE for r in rounds] == [0, 12, 12, 12, 4, 0]
    assert sum(r["swaps"] for r in rounds) == NODES * SLOTS // 2
    last = next(samples for r, node, samples in seen if r == 6 and node == 0)
    assert all(node != 0 for node, _ in last), "everything was offered, nothing stayed"


@pytest.mark.parametrize("kind", ["errs", "dies", "late", "garbage"])
def test_failures_lose_and_double_nothing(kind):
    strikes = ((0, 1), (1, 2), (2, 2), (3, 3), (0, 4))
    faults = [Fault(node, kind, at, at, delay_s=500.0) for node, at in strikes]
    seen, strategy, _, _ = run(num_rounds=12, faults=faults)
    for number in range(1, 13):
        assert trained_in(seen, number) <= ALL, "nobody trains on another's sample"
    assert trained_in(seen, 12) == ALL
    assert not any(strategy.ledger.unconfirmed.values())


def test_a_node_that_lost_its_state_leaves_out_what_is_elsewhere_until_it_is_sent_again():
    seen, strategy, _, grid = run(num_rounds=4)
    node = grid.context(1000)
    for name in list(node.state):
        del node.state[name]
    again = Resharding(FedAvg(fraction_evaluate=0.0), share=1.0)
    again.load_state_dict(strategy.state_dict())
    seen.clear()
    again.start(grid, toy_arrays(), 2, timeout=100)
    assert trained_in(seen, 1) < ALL
    assert len(next(s for r, n, s in seen if r == 1 and n == 0)) < SLOTS
    assert trained_in(seen, 2) == ALL


def test_stop_and_resume_equals_uninterrupted():
    def holdings(strategy):
        return {
            node: {slot: strategy.ledger.store[h.sample] for slot, h in slots.items()}
            for node, slots in strategy.ledger.holdings.items()
        }

    _, whole, _, _ = run(num_rounds=4)
    seen: list = []
    grid = LocalGrid(app(seen), profiles=[DeviceProfile()] * NODES)
    settings = {"share": 1.0, "budget_bytes": 3 * SIZE}
    strategy = Resharding(FedAvg(fraction_evaluate=0.0), **settings)
    for _ in range(4):
        fresh = Resharding(FedAvg(fraction_evaluate=0.0), **settings)
        fresh.load_state_dict(strategy.state_dict())
        strategy = fresh
        strategy.start(grid, toy_arrays(), 1)
    assert holdings(strategy) == holdings(whole)


class Keeper:
    """A run directory with a checkpoint and nothing else."""

    def __init__(self, folder):
        self.checkpoint_dir = folder

    def append_round(self, record): ...

    def cut_after(self, last_round): ...

    def save_model(self, arrays): ...

    def finish(self): ...


def test_a_killed_run_resumes_on_nodes_that_lost_everything(tmp_path):
    def start(num_rounds, resume):
        seen: list = []
        grid = LocalGrid(app(seen), profiles=[DeviceProfile()] * NODES)
        strategy = Resharding(FedAvg(fraction_evaluate=0.0), share=1.0, budget_bytes=3 * SIZE)
        Recorded(strategy, run_dir=Keeper(tmp_path), resume=resume).start(
            grid, toy_arrays(), num_rounds
        )
        return seen, strategy

    start(3, resume=False)
    seen, strategy = start(6, resume=True)
    assert sorted({number for number, _, _ in seen}) == [4, 5, 6]
    for number in (4, 5, 6):
        assert trained_in(seen, number) <= ALL
    assert trained_in(seen, 6) == ALL
    assert strategy.ledger.num_swaps == NODES * SLOTS // 2


def test_after_a_resume_the_roll_is_called_within_the_runs_time_out():
    grid = LocalGrid(app([]), profiles=[DeviceProfile()] * NODES)
    first = Resharding(FedAvg(fraction_evaluate=0.0), share=1.0, budget_bytes=3 * SIZE)
    first.start(grid, toy_arrays(), 2)
    second = Resharding(FedAvg(fraction_evaluate=0.0), share=1.0, budget_bytes=3 * SIZE)
    second.load_state_dict(first.state_dict())
    deaf = [Fault(0, "dies", message_type="train.profile")]
    grid = LocalGrid(app([]), profiles=[DeviceProfile()] * NODES, faults=deaf)
    second.start(grid, toy_arrays(), 0, timeout=60)
    assert grid.virtual_time_s == 60
    assert sorted(second.session.registry.identity(node) for node in grid.get_node_ids()) == [
        *("id-1000", "node-1", "node-2", "node-3")
    ]


def test_it_goes_with_selection_and_other_strategies():
    seen: list = []
    grid = LocalGrid(app(seen), profiles=[DeviceProfile(f) for f in (4, 4, 1, 1)], seed=1)
    resharding = Resharding(FedAdam(fraction_evaluate=0.0), share=1.0, budget_bytes=10 * SIZE)
    tifl = TiFL(resharding, clients_per_round=2, num_tiers=2, policy="uniform", seed=1)
    tifl.start(grid, toy_arrays(buffer=False), 8)
    assert resharding.ledger.num_swaps > 0
    for number in range(1, 9):
        assert trained_in(seen, number) <= ALL


def test_important_samples_go_first():
    seen, _, _, _ = run(num_rounds=2, share=0.2, budget_bytes=10 * SIZE)
    moved = [slot for r, node, s in seen if r == 2 for n, slot in s if n != node]
    agnostic, _, _, _ = run(num_rounds=2, share=0.2, budget_bytes=10 * SIZE, by_importance=False)
    moved_any = [slot for r, node, s in agnostic if r == 2 for n, slot in s if n != node]
    assert len(moved) == len(moved_any) == 2 * NODES
    assert np.mean(moved) > np.mean(moved_any)


def test_a_new_plan_every_few_rounds():
    _, _, rounds, _ = run(num_rounds=6, share=0.2, budget_bytes=10 * SIZE, every=3)
    assert [r["plan"] for r in rounds] == [1, 1, 1, 2, 2, 2]
    assert [r["offered_bytes"] // SIZE for r in rounds] == [8, 0, 0, 8, 0, 0]


SPOILT = {
    "too much": {keys.CONTENT: bytes(4 * SIZE), keys.SLOTS: np.arange(4, dtype="<i4").tobytes()},
    "no bytes": {keys.CONTENT: 3.0},
    "odd size": {keys.CONTENT: bytes(2 * SIZE + 1)},
    "twice the same slot": {keys.SLOTS: np.zeros(3, "<i4").tobytes()},
    "negative slots": {keys.SLOTS: np.array([-1, 0, 1], "<i4").tobytes()},
    "no list": {keys.SLOTS: b"123"},
    "missing what it never had": {keys.MISSING: np.array([99], "<i4").tobytes()},
    "no plan": {keys.PLAN: "x"},
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_nonsensical_offer_costs_itself_only(kind):
    def spoil(record: ConfigRecord, node: int) -> None:
        if node == 2:
            record.update(SPOILT[kind])

    seen, strategy, _, _ = run(num_rounds=5, spoil=spoil)
    for number in range(1, 6):
        assert trained_in(seen, number) == ALL
    if kind != "missing what it never had":
        assert "node-2" not in strategy.ledger.holdings


@pytest.mark.parametrize("alone_at_first", [False, True])
def test_a_node_with_samples_of_another_size_shuts_nobody_out(alone_at_first):
    def spoil(record: ConfigRecord, node: int) -> None:
        if node == 0:
            record[keys.CONTENT] = bytes(2 * SIZE * (len(record[keys.SLOTS]) // 4))

    faults = [Fault(i, "errs", 1, 1, message_type="train") for i in (1, 2, 3)]
    _, strategy, rounds, _ = run(
        8, faults if alone_at_first else (), spoil, share=0.4, budget_bytes=8 * SIZE
    )
    assert sorted(strategy.ledger.holdings) == ["node-1", "node-2", "node-3"]
    assert sum(r["swaps"] for r in rounds) == 6  # all of 3 x 4 samples


def test_samples_stay_out_of_the_wrapped_strategys_sight():
    class Inside(Wrapper):
        seen: ClassVar[list] = []

        def on_replies(self, server_round, replies):
            self.seen += [name for reply in replies for name in reply.content]
            return replies

    grid = LocalGrid(app([]), profiles=[DeviceProfile()] * NODES)
    Resharding(Inside(FedAvg(fraction_evaluate=0.0))).start(grid, toy_arrays(), 1)
    assert Inside.seen
    assert keys.RESHARDING not in Inside.seen


def test_nodes_without_resharding_are_left_alone():
    def forget(record: ConfigRecord, node: int) -> None:
        record.clear()

    seen, _, rounds, _ = run(num_rounds=2, spoil=forget)
    assert trained_in(seen, 2) == ALL
    assert rounds[-1]["swaps"] == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"share": 0.0}, "share must lie in"),
        ({"share": 1.1}, "share must lie in"),
        ({"share": float("nan")}, "share must lie in"),
        ({"budget_bytes": 0}, "budget_bytes must be a whole number of at least 1"),
        ({"every": -1}, "every must be a whole number of at least 0"),
        ({"every": 0.5}, r"every must be a whole number of at least 0, got 0\.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_refuses_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        Resharding(**settings)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"123", "no samples of"),
        (pack(np.full((1, 2), np.nan, np.float32), np.zeros(1, np.int64)), "NaN"),
        (pack(np.zeros((1, 2), np.float32), np.array([4])), "unknown label"),
        (pack(np.zeros((1, 2), np.float32), np.array([-1])), "unknown label"),
    ],
)
def test_a_node_refuses_samples_that_are_none(content, match):
    with pytest.raises(ValueError, match=match):
        unpack(content, (2,), 4)
