import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.mercury.algorithm import (
    Groups,
    advance,
    check_groups,
    cut,
    make_groups,
    relative_steps,
    resize,
)


def make(num_samples: int, num_groups: int) -> Groups:
    return make_groups(num_samples, num_groups, np.random.default_rng(0))


@given(st.integers(1, 60), st.data())
def test_a_cycle_visits_every_sample_once(num_samples: int, data: st.DataObject) -> None:
    groups = make(num_samples, data.draw(st.integers(1, num_samples)))
    for _ in range(2):
        seen = []
        while True:
            seen += groups.members(groups.turn).tolist()
            groups = advance(groups)
            if groups.turn == 0:
                break
        assert sorted(seen) == list(range(num_samples))


@given(st.integers(1, 60), st.lists(st.integers(1, 70), min_size=1, max_size=20), st.data())
def test_changing_sizes_lose_and_double_nobody(
    num_samples: int, sizes: list[int], data: st.DataObject
) -> None:
    groups = make(num_samples, data.draw(st.integers(1, num_samples)))
    seen: list[int] = []
    for size in [*sizes, *[sizes[-1]] * num_samples]:
        groups = resize(groups, size)
        check_groups(groups, num_samples)
        assert len(groups.members(groups.turn)) <= size
        seen += groups.members(groups.turn).tolist()
        groups = advance(groups)
        if groups.turn == 0:
            assert sorted(seen) == list(range(num_samples))
            seen = []


def test_a_new_size_holds_at_once_and_for_the_whole_next_cycle() -> None:
    groups = advance(make(100, 10))
    groups = resize(groups, 45)
    assert groups.sizes.tolist() == [10, 45, 45]
    groups = advance(advance(groups))
    assert groups.sizes.tolist() == [33, 33, 34]


def test_every_group_has_every_age_once_in_a_cycle() -> None:
    groups = make(20, 5)
    ages = []
    for _ in range(5):
        groups = advance(groups)
        newest = relative_steps(groups).max()
        ages.append(newest - relative_steps(groups))
    np.testing.assert_array_equal(np.sort(ages, axis=0).T, np.tile(np.arange(5), (5, 1)))


def test_steps_count_refreshes_within_the_cycle() -> None:
    groups = make(9, 3)
    assert relative_steps(groups).tolist() == [-3, -2, -1]
    assert relative_steps(advance(groups)).tolist() == [0, -2, -1]


def test_cut_covers_and_is_even() -> None:
    assert cut(7, 3).tolist() == [0, 2, 4, 7]
    assert cut(0, 3).tolist() == [0]


@pytest.mark.parametrize("num_groups", [0, -1, 11])
def test_refuses_group_counts(num_groups: int) -> None:
    with pytest.raises(ValueError, match="num_groups must lie between 1 and the 10 samples"):
        make(10, num_groups)


def test_refuses_a_size_of_zero() -> None:
    with pytest.raises(ValueError, match="size must be at least 1"):
        resize(make(10, 2), 0)


@pytest.mark.parametrize(
    "damage",
    [
        {"order": np.zeros(6, dtype=np.int64)},
        {"order": np.arange(5)},
        {"bounds": np.array([0, 3])},
        {"bounds": np.array([0, 3, 3, 6])},
        {"bounds": np.array([0, 4, 3, 6])},
        {"bounds": np.array([], dtype=np.int64)},
        {"turn": 2},
        {"turn": -1},
        {"size": 0},
    ],
)
def test_refuses_damaged_groups(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="start afresh"):
        check_groups(make(6, 2)._replace(**damage), 6)
