import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.local_steps import high_loss_samples

from flwr_hetero.biased_local_sgd.algorithm import (
    class_gamma,
    deadline_steps,
    epoch_sizes,
    fast_allocation,
    fast_class,
    fast_share,
    gamma_steps,
    slow_allocation,
)

NAN = math.nan
step_times = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
tables = st.lists(
    st.one_of(st.just(NAN), st.floats(0, 10), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40
)
fractions, seeds = st.floats(0.01, 1.0), st.integers(0, 2**16)


# --- steps -----------------------------------------------------------------------------------


def test_gamma_steps_of_the_paper():
    # section 5.1: 3.8906 s against 0.1737 s a batch, "approximately 22 times", tau_S = 1
    assert gamma_steps([1, 0.1737 / 3.8906], 32, 1, 32).tolist() == [32, 1]
    assert gamma_steps([1, 16 / 32, 4 / 32, 1 / 32], 32, 1, 32).tolist() == [32, 16, 4, 1]


def test_rounding_survives_binary_fractions():
    assert gamma_steps([0.29], 100, 1, 100).tolist() == [29]
    assert deadline_steps(0.3, [0.1], [0.0], 1, 9).tolist() == [3]


def test_unknown_nodes_get_min_steps():
    assert gamma_steps([NAN, 1.0], 32, 2, 32).tolist() == [2, 32]
    assert deadline_steps(8.0, [NAN, 1.0], [1.0, NAN], 1, 99).tolist() == [1, 8]


@given(step_times, st.integers(4, 64), st.integers(1, 4))
def test_gamma_steps_never_delay_the_fastest(times, fast_steps, min_steps):
    step_s = np.asarray(times)
    steps = gamma_steps(step_s.min() / step_s, fast_steps, min_steps, fast_steps)
    assert min_steps <= steps.min() <= steps.max() == fast_steps
    in_time = steps * step_s <= step_s.min() * fast_steps * (1 + 1e-6)
    assert np.all(in_time | (steps == min_steps))


@given(step_times, st.floats(0, 10), st.floats(0.1, 100), st.integers(1, 10**6))
def test_deadline_steps_are_the_most_that_fit(times, transfer_s, deadline_s, max_steps):
    step_s = np.asarray(times)
    steps = deadline_steps(deadline_s, step_s, transfer_s, 1, max_steps)
    end_s = transfer_s + steps * step_s
    assert np.all((end_s <= deadline_s * (1 + 1e-6)) | (steps == 1))
    assert np.all((end_s + step_s > deadline_s) | (steps == max_steps))


def test_fast_class_by_hand():
    assert fast_class([0.1] * 8 + [3.2] * 2).tolist() == [True] * 8 + [False] * 2
    assert fast_class([1.0, 1.1, 1.3]).all(), "a ratio of at most 1.5 is one class"
    assert fast_class([1.0, 1.6]).tolist() == [True, False]
    assert fast_class([NAN, 1.0]).tolist() == [False, True]
    assert fast_class([]).tolist() == []


@given(step_times)
def test_fast_class_is_a_threshold(times):
    step_s, fast = np.asarray(times), fast_class(times)
    assert fast[np.argmin(step_s)]
    assert fast.all() or step_s[fast].max() < step_s[~fast].min()


def test_class_gamma_by_the_slowest_of_each():
    step_s = [1.0, 2.0, 30.0, 64.0, NAN]
    assert class_gamma(step_s, fast_class(step_s)) == 2.0 / 64.0
    assert class_gamma([1.0, 2.0], [True, True]) == 1.0


# --- samples ---------------------------------------------------------------------------------


def allocate(losses, share, high_loss_fraction, rng, *, unified=False):
    """Lines 3 to 6 of Algorithm 1."""
    num_fast, num_slow = epoch_sizes(len(losses), share)
    fast = fast_allocation(np.asarray(losses), num_fast, high_loss_fraction, rng)
    return fast, slow_allocation(len(losses), num_slow, rng, taken=fast if unified else None)


def test_algorithm_1_by_hand():
    # N = 12, two fast nodes with 4 steps, two slow with 2: N_F = 8; lambda .5: 4 by loss
    losses = [0.0, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 4.5, 3.5]
    share = fast_share([4, 4, 2, 2], [True, True, False, False])
    fast, slow = allocate(losses, share, 0.5, np.random.default_rng(0))
    assert (len(fast), len(slow)) == (8, 4)
    assert {1, 3, 5, 7} <= set(fast.tolist()), "samples of loss 9, 8, 7, 6"


def test_fast_share_of_the_paper():
    fleet = [True] * 8 + [False] * 2
    assert fast_share([32] * 8 + [16] * 2, fleet) == 256 / 288
    assert fast_share([32] * 8 + [1] * 2, fleet) == 256 / 258
    assert fast_share([32, 32], [True, True]) == 1.0


@given(tables, st.floats(0, 1), fractions, st.booleans(), seeds)
def test_allocations_hold_the_right_samples(losses, share, high_loss_fraction, unified, seed):
    rng = np.random.default_rng(seed)
    num_fast, num_slow = epoch_sizes(len(losses), share)
    both = allocate(losses, share, high_loss_fraction, rng, unified=unified)
    fast, slow = (set(allocation.tolist()) for allocation in both)
    if unified:
        assert not fast & slow
        num_slow = min(num_slow, len(losses) - num_fast)
    assert [len(allocation) for allocation in both] == [len(fast), len(slow)], "distinct"
    assert (len(fast), len(slow)) == (num_fast, num_slow)
    assert set(high_loss_samples(losses, round(high_loss_fraction * num_fast))) <= fast
    assert fast | slow <= set(range(len(losses)))


@given(st.integers(1, 1000), st.floats(0, 1))
def test_epoch_sizes_leave_no_class_empty(num_samples, share):
    num_fast, num_slow = epoch_sizes(num_samples, share)
    assert num_fast + num_slow - num_samples in (0, 1)
    assert abs(num_fast - share * num_samples) <= 1
    assert (num_fast > 0) == (share > 0)
    assert (num_slow > 0) == (share < 1)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda rng: slow_allocation(10, 3, rng), [0.3] * 10),
        # the fill, 2 of the other 8, is uniform
        (lambda rng: fast_allocation(np.arange(10.0), 4, 0.5, rng), [0.25] * 8 + [1, 1]),
        # the 3 hard ones are spread over the order, as is the fill of 3 of 5
        (lambda rng: fast_allocation(np.arange(8.0), 6, 0.5, rng)[:3], [0.3] * 5 + [0.5] * 3),
        # before the first loss all is uniform
        (lambda rng: fast_allocation(np.full(6, NAN), 3, 1.0, rng), [0.5] * 6),
    ],
)
def test_how_often_each_sample_is_drawn(draw, expected):
    rng, rounds = np.random.default_rng(5), 3000
    found = sum(np.bincount(draw(rng), minlength=len(expected)) for _ in range(rounds)) / rounds
    np.testing.assert_allclose(found, expected, atol=4 * math.sqrt(0.25 / rounds))
