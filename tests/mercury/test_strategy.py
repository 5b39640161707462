"""Runs in which samples (node, slot) move: in every round each is trained on at most once."""

from collections import Counter

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import Folder, History
from toy import app_of, partition_of, reply_with, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mercury.algorithm import make_groups
from flwr_hetero.mercury.resharding import NodeShard, offer, pack, unpack
from flwr_hetero.strategy import Recorded, Resharding

NODES, SLOTS, SIZE = 4, 10, 4 * 2 + 8
ALL = Counter((float(node), float(slot)) for node in range(NODES) for slot in range(SLOTS))


def app(seen: list, spoil=None) -> ClientApp:
    """A node whose samples are (node, slot); what it trains on goes into ``seen``."""
    groups = make_groups(SLOTS, 2, np.random.default_rng(0))

    def train(message, context):
        node = partition_of(context)
        inputs = np.array([[node, slot] for slot in range(SLOTS)], np.float32)
        targets = np.full(SLOTS, node)
        shard = NodeShard.open(message, context)
        for slot, content in shard.held.items():
            inputs[slot], targets[slot] = (x[0] for x in unpack(content, (2,), NODES))
        keep = np.setdiff1d(np.arange(SLOTS), shard.missing)
        number = message.content["config"]["server-round"]
        seen.append((number, node, [tuple(map(float, row)) for row in inputs[keep]]))

        def choose(count, by_importance):
            weights = np.arange(SLOTS, dtype=float) if by_importance else np.ones(SLOTS)
            return offer(weights, groups, count, np.random.default_rng(node))

        reply = reply_with(message, {"num-examples": len(keep)}, dict(message.content["arrays"]))
        slots = shard.offers(SLOTS, SIZE, choose)
        shard.close(reply, context, slots, pack(inputs[slots], targets[slots]))
        if spoil:
            spoil(reply.content[keys.RESHARDING], node)
        return reply

    return app_of(train, profile={"num-examples": SLOTS})


def resharding(**settings) -> Resharding:
    settings = {"share": 1.0, "budget_bytes": 3 * SIZE, **settings}
    return Resharding(FedAvg(fraction_evaluate=0.0), **settings)


def grid_of(seen, spoil=None, faults=()) -> LocalGrid:
    return LocalGrid(app(seen, spoil), profiles=[DeviceProfile()] * NODES, faults=faults)


def run(num_rounds=6, faults=(), spoil=None, timeout=100.0, **settings):
    seen: list = []
    strategy = resharding(**settings)
    history = History(strategy)
    history.start(grid_of(seen, spoil, faults), toy_arrays(), num_rounds, timeout=timeout)
    return seen, strategy, [record["resharding"] for record in history.records[1:]]


def trained_in(seen, number):
    return Counter(sample for r, _, samples in seen if r == number for sample in samples)


def test_samples_move_in_chunks_and_none_is_lost():
    seen, _, rounds = run()
    for number in range(1, 7):
        assert trained_in(seen, number) == ALL
    assert all(len(samples) == SLOTS for _, _, samples in seen)
    assert [r["offered_bytes"] // SIZE for r in rounds] == [12, 12, 12, 4, 0, 0]
    assert [r["delivered_bytes"] // SIZE for r in rounds] == [0, 12, 12, 12, 4, 0]
    assert sum(r["swaps"] for r in rounds) == NODES * SLOTS // 2
    assert rounds[-1]["waiting"] == 0
    last = next(samples for r, node, samples in seen if r == 6 and node == 0)
    assert all(node != 0 for node, _ in last), "everything was offered, nothing stayed"


@pytest.mark.parametrize(
    "kind",
    ["errs", "late", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("dies", "garbage"))],
)
def test_failures_lose_and_double_nothing(kind):
    where = ((0, 1), (1, 2), (2, 2), (3, 3), (0, 4))
    faults = [Fault(node, kind, at, at, delay_s=1.5) for node, at in where]
    # a round lasts 0.1 s, and a silent node is left out for 1 s, after the second time for 3 s
    seen, strategy, _ = run(num_rounds=30, faults=faults, timeout=1.0)
    for number in range(1, 31):
        assert trained_in(seen, number) <= ALL, "no node trains on another's sample"
    assert trained_in(seen, 30) == ALL
    assert all(slot.confirmed for slot in strategy.table if slot.exchanged)


def test_killed_run_resumes_on_nodes_without_state(tmp_path):
    def start(num_rounds, resume):
        seen = []
        strategy = resharding()
        recorded = Recorded(strategy, run_dir=Folder(tmp_path), resume=resume)
        recorded.start(grid_of(seen), toy_arrays(), num_rounds)
        return seen, strategy

    start(3, resume=False)
    seen, strategy = start(6, resume=True)
    assert sorted({number for number, _, _ in seen}) == [4, 5, 6]
    for number in (4, 5, 6):
        assert trained_in(seen, number) <= ALL
    assert trained_in(seen, 6) == ALL
    assert sum(slot.exchanged for slot in strategy.table) == NODES * SLOTS


def test_after_a_resume_nodes_are_identified_in_time():
    first = resharding()
    second = resharding()
    first.start(grid_of([]), toy_arrays(), 2)
    second.load_state_dict(first.state_dict())
    grid = grid_of([], faults=[Fault(0, "dies", message_type="train.profile")])
    second.start(grid, toy_arrays(), 0, timeout=60)
    assert grid.virtual_time_s == 2 * 60  # the node that is asked first, then all
    names = sorted(second.fleet.nodes.identity(node) for node in grid.get_node_ids())
    assert names == ["id-1000", "node-1", "node-2", "node-3"]


SPOILT = {
    "too much": {keys.CONTENT: bytes(4 * SIZE), keys.SLOTS: np.arange(4, dtype="<i4").tobytes()},
    "no bytes": {keys.CONTENT: 3.0},
    "no samples": {keys.NUM_SAMPLES: 0},
    "odd size": {keys.CONTENT: bytes(2 * SIZE + 1)},
    "no list": {keys.SLOTS: b"123"},
    "missing what it never had": {keys.MISSING: np.array([99], "<i4").tobytes()},
    "long list": {keys.SLOTS: bytes(4_000_000)},  # refused unread: its numbers would take 36 MB
}


@pytest.mark.parametrize("kind", SPOILT)
def test_bad_offer_costs_its_node_only(kind, caplog):
    def spoil(record: ConfigRecord, node: int) -> None:
        if node == 2:
            record.update(SPOILT[kind])

    seen, strategy, _ = run(num_rounds=5, spoil=spoil)
    for number in range(1, 6):
        assert trained_in(seen, number) == ALL
    slots = strategy.table.slots
    holders = {node for node in slots if any(slot.exchanged for slot in slots[node].values())}
    assert holders == {"node-0", "node-1", "node-3"}
    assert ("must hold at most" in caplog.text) == (
        kind in ("missing what it never had", "long list")
    )


def test_invented_offers_buy_nothing():
    """A node that claims a million samples and offers new slots in every round."""
    rounds = 12
    store = []

    def invent(record: ConfigRecord, node: int) -> None:
        if node == 0:
            store.append(len(store))
            slots = np.arange(64 * len(store), 64 * len(store) + 64, dtype="<i4")
            lies = {keys.SLOTS: slots.tobytes(), keys.CONTENT: bytes(64 * SIZE)}
            record.update(lies | {keys.NUM_SAMPLES: 2**62, keys.MISSING: b""})

    _, strategy, told = run(rounds, spoil=invent, share=0.4, budget_bytes=64 * SIZE)
    counts = {node: len(slots) for node, slots in strategy.table.slots.items()}
    honest = {f"node-{i}": 4 for i in range(1, NODES)}
    assert counts == honest | {"node-0": 8}  # twice as many as the others, once
    assert len(strategy.table.store) == 20
    again = resharding(share=0.4)
    again.load_state_dict(strategy.state_dict())
    assert again.table.limits == strategy.table.limits
    assert told[-1]["waiting"] <= 2
