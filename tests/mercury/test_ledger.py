"""The server's book and the devices' shards together, under random failures."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_hetero.mercury.resharding import Delivery, Ledger, Shard

NODES, SLOTS = ("a", "b", "c"), 6


def content_of(node: str, slot: int) -> bytes:
    return f"{node}{slot:03d}".encode()


def view(node: str, shard: Shard, missing: list[int]) -> dict[int, bytes]:
    """What a device trains on."""
    own = {slot: content_of(node, slot) for slot in range(SLOTS)}
    own |= shard.held
    return {slot: content for slot, content in own.items() if slot not in missing}


def assigned(ledger: Ledger, node: str) -> dict[int, bytes]:
    """What the book says the device holds."""
    own = {slot: content_of(node, slot) for slot in range(SLOTS)}
    held = ledger.holdings.get(node, {})
    return own | {slot: ledger.store[holding.sample] for slot, holding in held.items()}


EVENT = st.sampled_from(["works", "works", "works", "reply lost", "absent", "state lost"])


@settings(max_examples=60)
@given(st.lists(st.tuples(EVENT, EVENT, EVENT), max_size=12), st.integers(0, 999))
def test_no_sample_is_lost_or_doubled_whatever_fails(
    rounds: list[tuple[str, str, str]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ledger, shards = Ledger(), {node: Shard() for node in NODES}
    for events in rounds:
        for node, event in zip(NODES, events, strict=True):
            if event == "absent":
                continue
            if event == "state lost":
                shards[node] = Shard()
            shard = Shard.from_state(shards[node].state())
            _, missing = shard.receive(ledger.deliver(node))
            trained = view(node, shard, missing)
            book = assigned(ledger, node)
            assert trained == {slot: book[slot] for slot in book if slot not in missing}
            assert not missing or event == "state lost"
            shards[node] = shard
            if event == "reply lost":
                continue
            ledger.confirm(node, missing)
            slots = rng.choice(SLOTS, 2, replace=False).tolist()
            everything = view(node, shard, [])
            ledger.take(node, slots, b"".join(everything[slot] for slot in slots))
        ledger.swap(rng)
        ledger = Ledger.from_state(ledger.state())
        held = Counter(c for node in NODES for c in assigned(ledger, node).values())
        assert held == Counter(content_of(node, slot) for node in NODES for slot in range(SLOTS))
    for node in NODES:  # one quiet round later every device holds what the book says
        for _ in range(2):
            _, missing = shards[node].receive(ledger.deliver(node))
            ledger.confirm(node, missing)
        assert view(node, shards[node], []) == assigned(ledger, node)


def test_a_swap_by_hand() -> None:
    ledger = Ledger()
    ledger.take("a", [4], b"A4")
    assert ledger.swap(np.random.default_rng(0)) == 0  # nobody to swap with
    ledger.take("b", [1], b"B1")
    assert ledger.swap(np.random.default_rng(0)) == 1
    assert ledger.deliver("a") == Delivery([4], [1], [4], b"B1")
    assert ledger.deliver("b") == Delivery([1], [1], [1], b"A4")
    assert ledger.deliver("a") == ledger.deliver("a")
    ledger.confirm("a", [])
    assert ledger.deliver("a") == Delivery([4], [1], [], b"")
    assert ledger.deliver("c") == Delivery([], [], [], b"")


def test_the_book_knows_better_than_a_device_that_lost_its_state() -> None:
    ledger = Ledger()
    ledger.take("a", [0], b"A0")
    ledger.take("b", [0], b"B0")
    ledger.swap(np.random.default_rng(0))
    ledger.take("a", [0], b"A0")  # it believes to hold its own sample still
    assert ledger.store[ledger.waiting["a"][0]] == b"B0"


def test_a_returned_sample_is_delivered_too() -> None:
    shard = Shard()
    shard.receive(Delivery([0], [1], [0], b"B0"))
    assert shard.receive(Delivery([0], [2], [], b"")) == ([], [0])  # outdated: not to be used
    assert shard.receive(Delivery([0], [2], [0], b"A0")) == ([0], [])


def test_the_queue_resumes_where_the_server_says() -> None:
    shard = Shard()
    shard.queue = [5, 3, 9, 1]
    assert shard.offers(0, 10, 25) == [5, 3]
    assert shard.offers(0, 10, 25) == [5, 3]  # the reply was lost
    assert shard.offers(2, 10, 25) == [9, 1]
    assert shard.offers(4, 10, 25) == []
    assert shard.offers(0, 10, 0) == []


@pytest.mark.parametrize(
    ("slots", "content"),
    [([1], b""), ([1, 2], b"abc"), ([1, 1], b"abcd"), ([-1], b"ab"), ([1], b"abc")],
)
def test_bad_offers_are_refused_whole(slots: list[int], content: bytes) -> None:
    ledger = Ledger()
    ledger.take("a", [7], b"xy")
    with pytest.raises(ValueError, match=r"samples of 2 bytes|distinct"):
        ledger.take("b", slots, content)
    assert ledger.waiting.get("b", {}) == {}
    assert len(ledger.store) == 1


@pytest.mark.parametrize(
    "delivery",
    [
        Delivery([1], [1, 2], [], b""),
        Delivery([1], [1], [1], b""),
        Delivery([1, 2], [1, 1], [1, 2], b"abc"),
        Delivery([1], [1], [2], b"ab"),
    ],
)
def test_bad_deliveries_change_nothing(delivery: Delivery) -> None:
    shard = Shard()
    with pytest.raises(ValueError, match=r"fit together|zip\(\)"):
        shard.receive(delivery)
    assert shard.foreign == {}


@pytest.mark.parametrize(
    "damage",
    [
        None,
        {},
        {"content": np.zeros(3, np.uint8)},
        {"versions": np.array([1, 2, 3])},
        {"plan": None},
    ],
)
def test_a_damaged_shard_is_an_empty_one(damage: dict[str, object] | None) -> None:
    shard = Shard()
    shard.receive(Delivery([0, 1], [1, 2], [0, 1], b"abcd"))
    state = None if damage is None else shard.state() | damage if damage else {"plan": 1}
    assert Shard.from_state(state).foreign == {}
    assert Shard.from_state(shard.state()).foreign == shard.foreign


@pytest.mark.parametrize(
    "damage", [{"held": np.array([[0, 0, 1, 9, 0]])}, {"offered": np.array([[7, 0, 0]])},
               {"store": None}, {"num_swaps": "x"}],
)  # fmt: skip
def test_a_damaged_book_is_refused(damage: dict[str, object]) -> None:
    ledger = Ledger()
    ledger.take("a", [0], b"A0")
    with pytest.raises(ValueError, match="ledger is damaged"):
        Ledger.from_state(ledger.state() | damage)
    assert Ledger.from_state(ledger.state()).waiting == {"a": {0: 0}}
    assert Ledger.from_state(Ledger().state()).store == []


def test_an_offer_made_twice_is_stored_once() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.take("a", [4], b"A4")
    assert ledger.store == [b"A4"]


def test_the_size_of_a_sample_is_what_most_devices_say() -> None:
    ledger = Ledger()
    assert not ledger.settle([(1, 7), (2, 4), (1, 2), (0, 0), (3, 7)])
    with pytest.raises(ValueError, match="7 bytes are not 1 samples of 2 bytes"):
        ledger.take("wrong", [0], bytes(7))
    assert ledger.take("a", [0, 1], b"A0A1") == 2


def test_two_devices_overrule_the_first_before_the_first_swap() -> None:
    ledger = Ledger()
    ledger.take("wrong", [0], bytes(7))
    assert not ledger.settle([(1, 2)])  # one against one
    assert not ledger.settle([(1, 2), (1, 2), (1, 7), (1, 7)])
    assert Ledger.from_state(ledger.state()).settle([(1, 2), (1, 2)])
    assert ledger.settle([(1, 2), (1, 2), (1, 7)])
    assert (ledger.store, ledger.waiting) == ([], {})
    for node in ("a", "b"):
        ledger.take(node, [0], f"{node}0".encode())
    ledger.swap(np.random.default_rng(0))
    assert not ledger.settle([(1, 7), (1, 7), (1, 7)])
    assert ledger.store == [b"a0", b"b0"]
