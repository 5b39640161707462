import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.biased_local_sgd.algorithm import (
    class_gamma,
    deadline_steps,
    fast_class,
    gamma_steps,
    smooth_step_time,
)

step_times = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


def test_paper_settings_by_hand():
    # section 5.1: 3.8906 s against 0.1737 s a batch, "approximately 22 times", tau_S = 1
    assert gamma_steps([1, 0.1737 / 3.8906], fast_steps=32).tolist() == [32, 1]
    assert gamma_steps([1, 16 / 32, 4 / 32, 1 / 32], fast_steps=32).tolist() == [32, 16, 4, 1]


def test_rounding_survives_binary_fractions():
    assert gamma_steps([0.29], fast_steps=100).tolist() == [29]
    assert deadline_steps(0.3, [0.1]).tolist() == [3]


def test_unknown_nodes_get_the_least_that_measures_them():
    assert gamma_steps([math.nan, 1.0], 32, min_steps=2).tolist() == [2, 32]
    assert deadline_steps(8.0, [math.nan, 1.0], [1.0, math.nan]).tolist() == [1, 8]


@given(step_times, st.integers(1, 64), st.integers(1, 4))
def test_gamma_steps_stay_in_bounds_and_never_delay_the_fastest(times, fast_steps, min_steps):
    step_s = np.asarray(times)
    steps = gamma_steps(step_s.min() / step_s, max(fast_steps, 4), min_steps=min_steps)
    assert steps.min() >= min_steps
    assert steps.max() <= max(fast_steps, 4)
    above_least = steps > min_steps
    busy_s = steps * step_s
    assert np.all(busy_s[above_least] <= step_s.min() * max(fast_steps, 4) * (1 + 1e-6))


@given(step_times, st.floats(0, 10), st.floats(0.1, 100))
def test_deadline_steps_are_the_most_that_fit(times, transfer_s, deadline_s):
    step_s = np.asarray(times)
    steps = deadline_steps(deadline_s, step_s, transfer_s)
    end_s = transfer_s + steps * step_s
    assert np.all((end_s <= deadline_s * (1 + 1e-6)) | (steps == 1))
    assert np.all(end_s + step_s > deadline_s)


def test_max_steps_bounds_a_generous_deadline():
    assert deadline_steps(1e9, [1.0, 1e-3], max_steps=32).tolist() == [32, 32]


def test_fast_class_by_hand():
    assert fast_class([0.1] * 8 + [3.2] * 2).tolist() == [True] * 8 + [False] * 2
    assert fast_class([1.0, 1.1, 1.3]).all(), "10 % apart is one class"
    assert fast_class([math.nan, 1.0]).tolist() == [False, True]
    assert fast_class([math.nan]).tolist() == [False]


@given(step_times)
def test_the_fast_class_holds_the_fastest_and_is_a_threshold(times):
    step_s = np.asarray(times)
    fast = fast_class(step_s)
    assert fast[np.argmin(step_s)]
    if not fast.all():
        assert step_s[fast].max() < step_s[~fast].min()


def test_class_gamma_ties_the_classes_by_their_slowest():
    step_s = [1.0, 2.0, 30.0, 64.0, math.nan]
    gamma = class_gamma(step_s, fast_class(step_s))
    assert gamma == 2.0 / 64.0
    assert class_gamma([1.0, 2.0], [True, True]) == 1.0


def test_smoothing_forgets_geometrically():
    step_s = math.nan
    for observed_s in (8.0, 4.0, 2.0):
        step_s = smooth_step_time(step_s, observed_s, smoothing=0.5)
    assert step_s == 0.25 * 8 + 0.25 * 4 + 0.5 * 2


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: gamma_steps([0.0], 32), "gamma must lie in"),
        (lambda: gamma_steps([1.5], 32), "gamma must lie in"),
        (lambda: gamma_steps([-0.5], 32), "gamma must lie in"),
        (lambda: gamma_steps([1.0], 0), "fast_steps must be a whole number of at least 1"),
        (lambda: gamma_steps([1.0], 2.5), "fast_steps must be a whole number of at least 1"),
        (
            lambda: gamma_steps([1.0], 32, min_steps=0),
            "min_steps must be a whole number of at least 1",
        ),
        (lambda: gamma_steps([1.0], 8, min_steps=9), "max_steps must be at least min_steps"),
        (lambda: gamma_steps([1.0], True), "fast_steps must be a whole number of at least 1"),
        (lambda: deadline_steps(0.0, [1.0]), "deadline_s must be positive"),
        (lambda: deadline_steps(math.nan, [1.0]), "deadline_s must be positive"),
        (lambda: deadline_steps(1.0, [0.0]), "step_times_s must be positive"),
        (lambda: deadline_steps(1.0, [math.inf]), "step_times_s must be positive"),
        (lambda: fast_class([-1.0]), "step_times_s must be positive"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
