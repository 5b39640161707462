import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.baselines.fednova import accumulated_steps, update_scales

counts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(counts, st.floats(0, 0.95))
def test_accumulated_steps_equal_sgd_with_momentum_unrolled(num_steps, momentum):
    for count, figure in zip(num_steps, accumulated_steps(num_steps, momentum), strict=True):
        velocity, moved = 0.0, 0.0
        for _ in range(count):  # gradient 1, learning rate 1
            velocity = momentum * velocity + 1.0
            moved += velocity
        assert figure == pytest.approx(moved, rel=1e-6)


@given(counts, st.data())
def test_scaled_mean_equals_the_papers_formula(num_steps, data):
    weights = data.draw(
        st.lists(st.integers(1, 100), min_size=len(num_steps), max_size=len(num_steps))
    )
    update = np.random.default_rng(0).standard_normal((len(num_steps), 3))  # x_i - x_t
    shares = np.array(weights) / sum(weights)
    effective = sum(p * tau for p, tau in zip(shares, num_steps, strict=True))
    expected = np.zeros(3)
    for share, tau, one in zip(shares, num_steps, update, strict=True):
        expected += effective * share * one / tau
    scales = update_scales(num_steps, weights)
    np.testing.assert_allclose((shares * scales) @ update, expected, rtol=1e-9, atol=1e-12)


def test_equal_steps_change_nothing():
    np.testing.assert_allclose(update_scales([7, 7, 7], [1, 5, 2], momentum=0.9), 1.0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: accumulated_steps([0]), "num_steps must be at least 1"),
        (lambda: accumulated_steps([np.nan]), "num_steps must be at least 1"),
        (lambda: accumulated_steps([1], momentum=1.0), "momentum must lie in"),
        (lambda: update_scales([1], [0.0]), "weights must have a positive sum"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
