"""Reshuffling by priority: counts, expectation and order of an epoch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_hetero.pgd.algorithm import shares, weighted_shuffle

SCORES = arrays(np.float32, st.integers(1, 40), elements=st.floats(0, 1e6, width=32))


@given(SCORES, st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_each_example_stands_its_share_of_times(
    scores: np.ndarray, mixing: float, seed: int
) -> None:
    known = np.ones(len(scores), dtype=bool)
    wanted = shares(scores, known, float(scores.mean(dtype=np.float64)), mixing)
    np.testing.assert_allclose(wanted.mean(), 1.0, rtol=1e-6)
    assert (wanted >= mixing * (1 - 1e-9)).all()
    epoch = weighted_shuffle(wanted, np.random.default_rng(seed))
    times = np.bincount(epoch, minlength=len(scores))
    assert len(epoch) == len(scores) == len(times)
    assert (times >= np.floor(wanted - 1e-6)).all()
    assert (times <= np.ceil(wanted + 1e-6)).all()


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_equal_shares_are_a_permutation(count: int, seed: int) -> None:
    epoch = weighted_shuffle(np.ones(count), np.random.default_rng(seed))
    assert sorted(epoch.tolist()) == list(range(count))


def test_the_expected_number_is_the_share_at_every_place() -> None:
    wanted, rng = np.array([2.3, 0.2, 0.9, 0.6]), np.random.default_rng(0)
    epochs = np.array([weighted_shuffle(wanted, rng) for _ in range(20_000)])
    for place in epochs.T:
        found = np.bincount(place, minlength=4) / len(place)
        np.testing.assert_allclose(found, wanted / 4, atol=0.015)


def test_the_unknown_count_as_average_and_nothing_known_as_equal() -> None:
    known = np.array([True, False, True, False])
    scores = np.array([1.0, 0.0, 3.0, 0.0], dtype=np.float32)
    found = shares(scores, known, mean=2.0, mixing=0.2)
    np.testing.assert_allclose(found, [0.6, 1.0, 1.4, 1.0])
    assert shares(0 * scores, known, mean=0.0, mixing=0.2).tolist() == [1.0] * 4
