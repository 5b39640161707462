"""What is offered and matched; the swap table and the nodes together, under random failures."""

from collections import Counter

import numpy as np
import pytest

from flwr_hetero.mercury.algorithm import Groups
from flwr_hetero.mercury.resharding import Delivery, NodeShard, offer, pack, unpack
from flwr_hetero.mercury.strategy import SwapTable, match


def groups_of(sizes: list[int]) -> Groups:
    order = np.random.default_rng(0).permutation(sum(sizes))
    return Groups(order, np.concatenate([[0], np.cumsum(sizes)]), 0, max(sizes))


@pytest.mark.parametrize("sizes", [[1], [12, 1], [3, 3, 3], [5, 12, 1, 7, 2, 2, 9, 4]])
def test_each_group_offers_its_share(sizes: list[int]) -> None:
    groups = groups_of(sizes)
    total = sum(sizes)
    for count in range(total + 1):
        offered = offer(np.arange(total) % 3 * 1.0, groups, count, np.random.default_rng(1))
        assert len(offered) == len(set(offered.tolist())) == count
        for group, size in enumerate(sizes):
            given_away = np.isin(groups.members(group), offered).sum()
            assert abs(given_away - count * size / total) < 1.0


def test_offers_are_in_proportion_to_importance() -> None:
    importance = np.array([0.0, 1.0, 2.0, 5.0])
    rng = np.random.default_rng(2)
    firsts = Counter(int(offer(importance, groups_of([4]), 1, rng)[0]) for _ in range(4000))
    for sample, share in enumerate(importance / 8):
        tolerance = 4.5 * np.sqrt(share * (1 - share) / 4000)
        assert firsts[sample] / 4000 == pytest.approx(share, abs=tolerance)
    assert sorted(offer(np.zeros(6), groups_of([6]), 6, rng).tolist()) == list(range(6))


@pytest.mark.parametrize("counts", [[], [9], [0, 3], [1, 1, 1], [9, 2, 2], [5, 5, 9, 8, 0]])
def test_match_swaps_as_much_as_can_be(counts: list[int]) -> None:
    offers = {node: list(range(10, 10 + n)) for node, n in zip("fbdca", counts, strict=False)}
    swaps = match(offers, np.random.default_rng(0))
    used = [slot for swap in swaps for slot in swap]
    assert len(used) == len(set(used))
    assert all(one[0] != other[0] for one, other in swaps)
    total = sum(counts)
    most = max(counts, default=0)
    assert len(swaps) == min(total // 2, total - most)


NODES, SLOTS = ("a", "b", "c"), 6
EVENTS = ("works", "works", "works", "reply lost", "absent", "state lost")


def own(node: str) -> dict[int, bytes]:
    return {slot: f"{node}{slot:03d}".encode() for slot in range(SLOTS)}


def assigned(table: SwapTable, node: str) -> dict[int, bytes]:
    """What the table says the node holds."""
    slots = table.slots.get(node, {})
    return own(node) | {slot: table.store[held.sample_id] for slot, held in slots.items()}


def restarted(table: SwapTable) -> SwapTable:
    twin = SwapTable()
    twin.load_state_dict(table.state_dict())
    return twin


@pytest.mark.parametrize("back", [None, 3, 9])
@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_lost_or_doubled(seed: int, back: int | None) -> None:
    rng = np.random.default_rng(seed)
    everything = Counter(content for node in NODES for content in own(node).values())
    table = SwapTable()
    states = dict.fromkeys(NODES)
    checkpoint = None
    for number in range(14):
        if number == back:  # the server dies, and returns to an older checkpoint
            table = checkpoint or table
        for node in NODES:
            event = rng.choice(EVENTS) if number < 12 else "works"
            if event == "absent":
                continue
            state = None if event == "state lost" else states[node]
            shard = NodeShard(table.deliver(node).to_record(), state)
            held = own(node) | shard.held
            wanted = assigned(table, node)
            assert all(held[slot] == wanted[slot] for slot in held if slot not in shard.missing)
            assert not shard.missing or event == "state lost" or back is not None
            states[node] = shard.state_dict()
            if event != "reply lost":
                table.confirm(node, shard.missing)
                if not shard.missing:
                    slots = rng.choice(SLOTS, 2, replace=False).tolist()
                    table.add(node, slots, b"".join(held[slot] for slot in slots))
        if number < 12:
            table.swap(rng)
        table = restarted(table)
        checkpoint = checkpoint or restarted(table)
        assert Counter(c for n in NODES for c in assigned(table, n).values()) == everything
    for node in NODES:  # two rounds later every node holds what the table says
        shard = NodeShard(table.deliver(node).to_record(), states[node])
        assert shard.missing == []
        assert own(node) | shard.held == assigned(table, node)


def test_swap_by_hand() -> None:
    table = SwapTable()
    rng = np.random.default_rng(0)
    for _ in range(2):
        table.add("a", [4], b"A4")  # twice: its reply came, its receipt did not
    assert table.store == [b"A4"]
    assert table.swap(rng) == 0
    table.add("b", [1], b"B1")
    assert table.swap(rng) == 1
    assert table.deliver("a") == Delivery([4], [1], [4], b"B1")
    assert table.deliver("b") == Delivery([1], [0], [1], b"A4")
    table.confirm("a", [])
    assert table.deliver("a") == Delivery([4], [1], [], b"")
    assert table.deliver("c") == Delivery([], [], [], b"")
    table.confirm("a", [4])
    assert table.deliver("a").content == b"B1"
    table.add("a", [4], b"A4")  # it lost its state, and takes its old sample for its own
    assert table.slots["a"][4].offered
    assert table.store == [b"A4", b"B1"]
    assert table.received == {"a": 3, "b": 1}
    table.add("longer", [0, 1], bytes(14))
    assert table.swap(rng) == 0
    table.add("b", [2], b"B2")
    assert table.swap(rng) == 1, "samples of one size change places"
    assert table.deliver("longer").slots == []


def test_limits_are_fixed_at_the_first_offer() -> None:
    table = SwapTable()
    table.set_limits({"a": 3, "b": 5, "c": 10**6})
    assert table.limits == {"a": 3, "b": 5, "c": 10}  # twice the median
    table.set_limits({"a": 100, "d": 2})
    assert (table.limits["a"], table.limits["d"]) == (3, 2)
    table.add("a", [1, 2], b"AB")
    table.add("a", [2, 3, 4], b"BCD")
    assert (list(table.slots["a"]), table.store) == ([1, 2, 3], [b"A", b"B", b"C"])
    assert table.room("a") == 0
    assert restarted(table).limits["a"] == 3


@pytest.mark.parametrize(
    ("slots", "content"),
    [([1], b""), ([], b"a"), ([1, 2], b"abc"), ([1, 1], b"abcd"), ([-1], b"ab"), ([1], b"abc")],
)
def test_bad_offer_is_refused_whole(slots: list[int], content: bytes) -> None:
    table = SwapTable()
    table.add("a", [7], b"xy")
    with pytest.raises(ValueError, match=r"samples of one size|distinct"):
        table.add("a", slots, content)
    assert list(table.slots["a"]) == [7]
    assert (table.store, table.received) == ([b"xy"], {"a": 1})


def test_unpack_reads_what_pack_wrote() -> None:
    inputs = np.random.default_rng(0).random((3, 2, 5), np.float32)
    targets = np.array([0, 3, 1])
    read = unpack(pack(inputs, targets), (2, 5), 4)
    np.testing.assert_array_equal(read[0], inputs)
    np.testing.assert_array_equal(read[1], targets)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"123", "no samples of"),
        (pack(np.full((1, 2), np.nan, np.float32), np.zeros(1, np.int64)), "NaN"),
        (pack(np.zeros((1, 2), np.float32), np.array([4])), "unknown label"),
        (pack(np.zeros((1, 2), np.float32), np.array([-1])), "unknown label"),
    ],
)
def test_unpack_refuses_what_is_no_sample(content: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        unpack(content, (2,), 4)
