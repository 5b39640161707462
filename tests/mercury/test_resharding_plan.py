from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.mercury.algorithm import Groups, make_groups
from flwr_hetero.mercury.resharding import Swap, chunk, match, offer


def groups_of(sizes: list[int]) -> Groups:
    order = np.random.default_rng(0).permutation(sum(sizes))
    return Groups(order, np.concatenate([[0], np.cumsum(sizes)]), 0, max(sizes))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.data())
def test_each_group_offers_its_share(sizes: list[int], data: st.DataObject) -> None:
    groups, total = groups_of(sizes), sum(sizes)
    count = data.draw(st.integers(0, total))
    importance = np.arange(total) % 3 * 1.0
    offered = offer(importance, groups, count, np.random.default_rng(1))
    assert len(offered) == len(set(offered.tolist())) == count
    for group, size in enumerate(sizes):
        given_away = np.isin(groups.members(group), offered).sum()
        assert abs(given_away - count * size / total) < 1.0


def test_important_samples_are_offered_first_and_in_proportion() -> None:
    groups = groups_of([4])
    importance, rng = np.array([0.0, 1.0, 2.0, 5.0]), np.random.default_rng(2)
    firsts = Counter(int(offer(importance, groups, 1, rng)[0]) for _ in range(4000))
    assert firsts[0] == 0
    for sample in (1, 2, 3):
        share = importance[sample] / 8
        tolerance = 4.5 * np.sqrt(share * (1 - share) / 4000)
        assert firsts[sample] / 4000 == pytest.approx(share, abs=tolerance)


def test_equal_importance_is_agnostic_and_zeros_fill_up() -> None:
    groups, rng = groups_of([6]), np.random.default_rng(3)
    firsts = Counter(int(offer(np.ones(6), groups, 1, rng)[0]) for _ in range(3000))
    assert min(firsts.values()) > 400
    assert sorted(offer(np.zeros(6), groups, 6, rng).tolist()) == list(range(6))


def test_fewer_offers_than_groups_are_fair_in_the_mean() -> None:
    groups, rng = groups_of([2, 6]), np.random.default_rng(4)
    small = groups.members(0)
    hits = sum(int(np.isin(offer(np.ones(8), groups, 1, rng), small).sum()) for _ in range(3000))
    assert hits / 3000 == pytest.approx(0.25, abs=0.036)


@pytest.mark.parametrize("count", [-1, 9])
def test_refuses_more_offers_than_samples(count: int) -> None:
    with pytest.raises(ValueError, match=r"num_offers must lie in 0\.\.8"):
        offer(np.ones(8), make_groups(8, 2, np.random.default_rng(0)), count, None)  # type: ignore


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9)), st.integers(0, 99))
def test_matching_uses_each_slot_once_and_leaves_as_few_as_possible(
    counts: dict[str, int], seed: int
) -> None:
    offers = {node: list(range(10, 10 + count)) for node, count in counts.items()}
    swaps = match(offers, np.random.default_rng(seed))
    used = [(s.node, s.slot) for s in swaps] + [(s.other_node, s.other_slot) for s in swaps]
    assert len(used) == len(set(used)) == 2 * len(swaps)
    assert all(slot in offers[node] for node, slot in used)
    assert all(swap.node != swap.other_node for swap in swaps)
    total, most = sum(counts.values()), max(counts.values(), default=0)
    assert len(swaps) == min(total // 2, total - most)


def match_naively(offers: dict[str, list[int]], rng: np.random.Generator) -> list[Swap]:
    """Look through all devices for each swap."""

    def pick(nodes: list[str]) -> str:
        return nodes[int(rng.integers(len(nodes)))]

    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}
    swaps = []
    while len(left := {node: slots for node, slots in left.items() if slots}) > 1:
        most = max(len(slots) for slots in left.values())
        first = pick([n for n, slots in left.items() if len(slots) == most])
        others = {node: slots for node, slots in left.items() if node != first}
        most = max(len(slots) for slots in others.values())
        second = pick([n for n, slots in others.items() if len(slots) == most])
        swaps.append(Swap(first, left[first].pop(), second, left[second].pop()))
    return swaps


@given(st.dictionaries(st.sampled_from("fbdcae"), st.integers(0, 9)), st.integers(0, 99))
def test_matching_makes_the_same_draws_as_its_naive_twin(counts: dict[str, int], seed: int) -> None:
    offers = {node: list(range(count)) for node, count in counts.items()}
    rng, twin = np.random.default_rng(seed), np.random.default_rng(seed)
    assert match(offers, rng) == match_naively(offers, twin)
    assert rng.random() == twin.random()


def test_matching_looks_at_each_device_a_few_times_only() -> None:
    class Name(str):
        looked_up = 0

        def __hash__(self) -> int:
            Name.looked_up += 1
            return str.__hash__(self)

    def looks(num_nodes: int) -> float:
        Name.looked_up = 0
        offers = {Name(f"{i:04d}"): list(range(10)) for i in range(num_nodes)}
        match(offers, np.random.default_rng(0))
        return Name.looked_up / num_nodes

    assert looks(400) < 1.1 * looks(50)


@given(st.lists(st.integers(0, 99)), st.integers(1, 50), st.integers(0, 1000))
def test_chunks_lose_nothing(slots: list[int], size: int, budget: int) -> None:
    now, later = chunk(slots, size, budget)
    assert now + later == slots
    assert len(now) * size <= budget
    assert not later or (len(now) + 1) * size > budget
