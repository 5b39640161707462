"""PGD's core against the paper's algorithms written out example by example."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.pgd.algorithm import (
    MAX_EXPONENT,
    Trend,
    batch_parts,
    estimate,
    learn,
    pick_top,
    renew_sum,
    start_trend,
    top_scale,
    top_share,
)

POSITIVE = st.floats(1e-6, 1e6)
SIGNED = st.floats(-1e6, 1e6)


def twin_learn(
    p_j: float, a_j: float, j: int, p_i: float, i: int, smoothing: float
) -> tuple[float, float, int]:
    """Algorithm 2 for one example, in logarithms as printed, with our rule for signs."""
    if i == j:
        return p_i, a_j, i
    if math.isnan(p_j) or p_i == 0 or p_j == 0 or (p_i > 0) != (p_j > 0):
        return p_i, 0.0, i
    newest = (math.log(abs(p_i)) - math.log(abs(p_j))) / (i - j)
    return p_i, smoothing * newest + (1 - smoothing) * a_j, i


@given(
    st.lists(
        st.tuples(st.one_of(SIGNED, st.just(math.nan)), st.integers(0, 9), SIGNED), min_size=1
    ),
    st.floats(0, 1),
)
def test_learn_follows_algorithm_2(rows: list[tuple[float, int, float]], smoothing: float) -> None:
    slopes = np.linspace(-0.3, 0.3, len(rows))
    last = Trend(np.array([r[0] for r in rows]), slopes, np.array([r[1] for r in rows]))
    now = learn(last, np.array([r[2] for r in rows]), iteration=9, smoothing=smoothing)
    for k, (p_j, j, p_i) in enumerate(rows):
        p, a, at = twin_learn(p_j, slopes[k], j, p_i, 9, smoothing)
        assert (now.priority[k], now.computed_at[k]) == (p, at)
        assert now.slope[k] == pytest.approx(a, abs=1e-9)


@given(st.lists(POSITIVE, min_size=2, max_size=8), st.integers(1, 5))
def test_two_values_span_a_line_in_log_scale(values: list[float], gap: int) -> None:
    first, ratio = np.array(values), 0.9
    trend = Trend(first, np.zeros(len(first)), np.zeros(len(first), dtype=np.int64))
    trend = learn(trend, first * ratio**gap, iteration=gap, smoothing=1.0)
    np.testing.assert_allclose(estimate(trend, gap + 3), first * ratio ** (gap + 3))


def test_by_hand_with_the_paper_s_smoothing() -> None:
    # ln 8 -> ln 2 over 2 iterations: -0.693; then ln 2 -> ln 4 over 1: 0.8 * 0.693 - 0.2 * 0.555
    trend = learn(start_trend(1), np.array([8.0]), 0)
    assert trend.slope.tolist() == [0.0]
    trend = learn(trend, np.array([2.0]), 2)
    assert trend.slope[0] == pytest.approx(0.8 * -math.log(2))
    trend = learn(trend, np.array([4.0]), 3)
    assert trend.slope[0] == pytest.approx(0.8 * math.log(2) - 0.2 * 0.8 * math.log(2))
    assert estimate(trend, 5)[0] == pytest.approx(4 * math.exp(2 * trend.slope[0]))


def test_negative_priorities_keep_their_sign_and_a_flip_starts_a_flat_trend() -> None:
    trend = learn(start_trend(2), np.array([-4.0, 4.0]), 0)
    trend = learn(trend, np.array([-2.0, -2.0]), 1, smoothing=1.0)
    np.testing.assert_allclose(trend.slope, [-math.log(2), 0.0])
    np.testing.assert_allclose(estimate(trend, 2), [-1.0, -2.0])


def test_extrapolation_is_bounded() -> None:
    trend = Trend(np.array([1.0, -1.0]), np.array([5.0, -5.0]), np.array([0, 0]))
    far = estimate(trend, 10**6)
    np.testing.assert_allclose(far, [math.exp(MAX_EXPONENT), -math.exp(-MAX_EXPONENT)])


def test_unknown_stays_unknown() -> None:
    assert np.isnan(estimate(start_trend(3), 7)).all()


@given(st.data(), st.integers(1, 12), st.integers(0, 14))
def test_top_is_what_a_full_sort_gives(data: st.DataObject, size: int, num_top: int) -> None:
    priority = np.array(data.draw(st.permutations(range(size))), dtype=float)
    taken = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True)), dtype=np.int64)
    left = [i for i in np.argsort(-priority).tolist() if i not in taken.tolist()]
    assert sorted(pick_top(priority, num_top, taken).tolist()) == sorted(left[:num_top])


def test_unknown_priorities_come_last() -> None:
    priority = np.array([np.nan, -3.0, np.nan, -5.0])
    assert pick_top(priority, 2, np.array([], dtype=np.int64)).tolist() == [1, 3]
    assert len(pick_top(priority, 3, np.array([], dtype=np.int64))) == 3


def test_rows_and_put_leave_the_others_alone() -> None:
    trend = start_trend(3)
    rows = learn(trend.rows(np.array([2, 0])), np.array([5.0, 7.0]), 4)
    assert np.isnan(trend.priority).all()
    trend.put(np.array([2, 0]), rows)
    np.testing.assert_array_equal(trend.priority, [7.0, np.nan, 5.0])
    assert trend.computed_at.tolist() == [4, -1, 4]


def test_the_aggregated_gradient_settles_at_the_sum_of_constant_gradients() -> None:
    gradients = np.random.default_rng(0).normal(size=(40, 3))
    total = np.zeros(3)
    for _ in range(100):  # 100 cycles of 4 batches
        for batch in np.split(gradients, 4):
            total = renew_sum(total, batch.sum(0), num_new=10, num_samples=40)
    start = total.copy()
    for batch in np.split(gradients, 4):
        total = renew_sum(total, batch.sum(0), num_new=10, num_samples=40)
    np.testing.assert_allclose(total, start)  # a fixed point of a whole cycle
    same = np.broadcast_to(gradients.mean(0), (40, 3))
    total = renew_sum(same.sum(0), same[:10].sum(0), num_new=10, num_samples=40)
    np.testing.assert_allclose(total, same.sum(0))


def test_renewing_everything_forgets_the_past() -> None:
    assert renew_sum(np.array([1e9]), np.array([2.0]), 5, 5).tolist() == [2.0]


@pytest.mark.parametrize(
    ("top", "renewal", "match"),
    [
        (0.6, 0.5, "top_ratio must be at most 1 - renewal_ratio = 0.5, got 0.6"),
        (0.1, 0.0, "renewal_ratio must lie in"),
        (0.1, -0.1, "renewal_ratio must lie in"),
        (0.1, 1.1, "renewal_ratio must lie in"),
        (0.1, math.nan, "renewal_ratio must lie in"),
        (-0.1, 0.5, "top_ratio must lie in"),
        (1.0, 0.1, "top_ratio must lie in"),
        (math.nan, 0.1, "top_ratio must lie in"),
    ],
)
def test_refuses(top: float, renewal: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        batch_parts(100, top, renewal)


@given(st.integers(1, 500), st.floats(0, 0.99), st.floats(0.001, 1))
def test_parts_fit_into_the_data(num_samples: int, top: float, renewal: float) -> None:
    if top + renewal <= 1:
        num_top, num_renewed = batch_parts(num_samples, top, renewal)
        assert num_renewed >= 1
        assert num_top >= 0
        assert num_top + num_renewed <= num_samples


@pytest.mark.parametrize(
    ("renewed", "top", "scale"),
    [(1.0, 4.0, 0.25), (3.0, 2.0, 1.0), (-5.0, 2.0, 0.01), (1.0, -2.0, 1.0), (1.0, 0.0, 1.0)],
)
def test_the_top_part_progresses_no_further_than_the_renewed(
    renewed: float, top: float, scale: float
) -> None:
    assert top_scale(renewed, top) == scale


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_share_of_the_top_is_what_a_full_sort_gives(values: list[float], top: float) -> None:
    count = max(1, round(top * len(values)))
    whole = float(np.array(values).sum())
    share = top_share(np.array(values), top)
    if whole <= 0:
        assert math.isnan(share)
    else:
        assert share * whole == pytest.approx(sum(sorted(values)[-count:]), abs=1e-9)
