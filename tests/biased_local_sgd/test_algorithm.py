import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.local_steps import high_loss_samples

from flwr_hetero.biased_local_sgd.algorithm import (
    epoch_sizes,
    fast_allocation,
    fast_class,
    fast_share,
    gamma_steps,
    slow_allocation,
    timed_steps,
)

NAN = math.nan
tables = st.lists(
    st.one_of(st.just(NAN), st.floats(0, 10), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40
)


@pytest.mark.parametrize(
    ("gammas", "fast_steps", "expected"),
    [
        # section 5.1: 3.8906 s against 0.1737 s a batch, "approximately 22 times", tau_S = 1
        ([1, 0.1737 / 3.8906], 32, [32, 1]),
        ([1, 16 / 32, 4 / 32, 1 / 32], 32, [32, 16, 4, 1]),
        ([0.99, 0.01, 0.8], 32, [31, 1, 25]),
        ([0.29], 100, [29]),  # though 0.29 * 100 is a little less
        ([NAN, 1.0], 32, [1, 32]),
    ],
)
def test_gamma_steps_by_hand(gammas, fast_steps, expected):
    assert gamma_steps(gammas, fast_steps).tolist() == expected


@pytest.mark.parametrize(
    ("limit_s", "step_s", "transfer_s", "expected"),
    [
        (8.0, [0.5, 0.5, 3.0, 9.0], [0.0, 1.0, 0.1, 0.0], [16, 14, 2, 1]),
        (8.0, [0.01, 1.0], [0.0, 9.0], [99, 1]),  # the most; the link alone takes longer
        (8.0, [NAN, 1.0], [1.0, NAN], [1, 8]),
        (0.3, [0.1], [0.0], [3]),  # though 0.3 / 0.1 is a little less
    ],
)
def test_timed_steps_by_hand(limit_s, step_s, transfer_s, expected):
    assert timed_steps(limit_s, step_s, transfer_s, 99).tolist() == expected


@pytest.mark.parametrize(
    ("step_s", "fast", "gamma"),
    [
        ([0.1] * 8 + [3.2] * 2, [True] * 8 + [False] * 2, 1 / 32),
        ([1.0, 2.0, 30.0, 64.0, NAN], [True, True, False, False, False], 2 / 64),
        ([40.0, 1.0, 5.0], [False, True, True], 5 / 40),  # the widest gap, not the first
        ([1.0, 1.1, 1.3], [True] * 3, 1.0),  # ratios of at most 1.5 are one class
        ([1.0, 1.5], [True, True], 1.0),
        ([1.0, 1.6], [True, False], 1 / 1.6),
        ([NAN, 1.0], [False, True], 1.0),
        ([], [], 1.0),
    ],
)
def test_classes_by_hand(step_s, fast, gamma):
    found, ratio = fast_class(step_s)
    assert (found.tolist(), ratio) == (fast, pytest.approx(gamma))


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


@pytest.mark.parametrize(
    ("num_samples", "share", "sizes"),
    [
        (100, 0.696, (70, 30)),
        (10, 0.001, (1, 10)),  # no class with nodes is without samples
        (10, 0.999, (10, 1)),
        (10, 0.0, (0, 10)),
        (10, 1.0, (10, 0)),
        (1, 0.6, (1, 1)),
    ],
)
def test_epoch_sizes_by_hand(num_samples, share, sizes):
    assert epoch_sizes(num_samples, share) == sizes


@given(tables, st.floats(0, 1), st.floats(0.01, 1), st.booleans(), st.integers(0, 2**16))
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
    rng = np.random.default_rng(5)
    rounds = 3000
    found = sum(np.bincount(draw(rng), minlength=len(expected)) for _ in range(rounds)) / rounds
    np.testing.assert_allclose(found, expected, atol=4 * math.sqrt(0.25 / rounds))
