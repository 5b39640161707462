import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_hetero.mercury import importance_cache as sum_tree
from flwr_hetero.mercury.importance_cache import SumTree


@pytest.fixture(params=[sum_tree.TOP, 1], ids=["flat", "deep"], autouse=True, scope="module")
def top(request):
    """Small trees with few levels, and with as many as large ones have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_tree, "TOP", request.param)
        patch.setattr(sum_tree, "FANOUT", 64 if request.param > 1 else 4)
        yield


VALUES = arrays(np.float64, st.integers(1, 300), elements=st.floats(0, 1e6, width=32))


@given(VALUES, st.integers(0, 2**32 - 1))
def test_finds_what_a_cumulative_sum_finds(values: np.ndarray, seed: int) -> None:
    if values.sum() == 0:
        return
    rng = np.random.default_rng(seed)
    points = rng.random(50)
    tree = SumTree(values)
    found = tree.find(points)
    assert (values[found] > 0).all()
    sums = np.cumsum(values)
    lower, upper = (sums - values)[found], sums[found]
    slack = 1e-9 * values.sum()
    assert (points * values.sum() >= lower - slack).all()
    assert (points * values.sum() <= upper + slack).all()


@given(VALUES, st.integers(0, 2**32 - 1))
def test_setting_equals_building_anew(values: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = SumTree(rng.random(len(values)))
    for index in rng.permutation(len(values)):
        tree.set(np.array([index]), values[[index]])
    fresh = SumTree(values)
    assert tree.total == fresh.total  # to the bit: sums carry no history
    np.testing.assert_array_equal(tree.values, values)


def test_draws_follow_the_values() -> None:
    values = np.zeros(5000)
    values[[3, 777, 4999]] = [1.0, 2.0, 7.0]
    found = SumTree(values).find(np.random.default_rng(0).random(20_000))
    shares = np.bincount(found, minlength=5000)[[3, 777, 4999]] / 20_000
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.7], atol=0.015)  # about 4.5 sigma


def test_the_last_value_of_a_repeated_index_stays() -> None:
    tree = SumTree(np.ones(3))
    tree.set(np.array([1, 1]), np.array([5.0, 2.0]))
    assert tree.values.tolist() == [1.0, 2.0, 1.0]
    assert tree.total == 4.0


@pytest.mark.parametrize("bad", [[], [-1.0], [np.nan], [np.inf], [[1.0]]])
def test_refuses_what_is_no_vector_of_weights(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="values must be"):
        SumTree(bad)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="all values are 0"):
        SumTree(np.zeros(3)).find(np.array([0.5]))
