import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.biased_local_sgd.algorithm import (
    epoch_sizes,
    fast_allocation,
    fast_share,
    high_loss_samples,
    record_losses,
    slow_allocation,
)

tables = st.lists(
    st.one_of(st.just(float("nan")), st.floats(0, 10), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=40,
)
fractions = st.floats(0.01, 1.0)
seeds = st.integers(0, 2**16)


def naive_top(losses, count):
    known = [index for index, loss in enumerate(losses) if loss == loss]
    return sorted(known, key=lambda index: (-losses[index], index))[:count]


def allocate(losses, share, high_loss_fraction, rng, *, unified=False):
    """Algorithm 1, lines 3 to 6."""
    num_fast, num_slow = epoch_sizes(len(losses), share)
    fast = fast_allocation(losses, num_fast, high_loss_fraction, rng)
    return fast, slow_allocation(len(losses), num_slow, rng, taken=fast if unified else None)


def test_algorithm_1_by_hand():
    # N = 12, two fast nodes with 4 steps, two slow with 2: N_F = 8; lambda .5: 4 by loss
    losses = [0.0, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 4.5, 3.5]
    share = fast_share([4, 4, 2, 2], [True, True, False, False])
    fast, slow = allocate(losses, share, 0.5, np.random.default_rng(0))
    assert len(fast) == 8
    assert {1, 3, 5, 7} <= set(fast.tolist()), "samples of loss 9, 8, 7, 6"
    assert len(slow) == 4


@given(tables, st.integers(0, 50))
def test_high_loss_samples_equal_a_full_sort(losses, count):
    assert high_loss_samples(losses, count).tolist() == naive_top(losses, count)


@given(tables, st.floats(0, 1), fractions, st.booleans(), seeds)
def test_epoch_has_the_right_sets(losses, share, high_loss_fraction, unified, seed):
    rng = np.random.default_rng(seed)
    num_fast, num_slow = epoch_sizes(len(losses), share)
    fast, slow = allocate(losses, share, high_loss_fraction, rng, unified=unified)
    assert len(set(fast.tolist())) == len(fast) == num_fast
    assert set(naive_top(losses, round(high_loss_fraction * num_fast))) <= set(fast.tolist())
    assert set(fast.tolist()) | set(slow.tolist()) <= set(range(len(losses)))
    if unified:
        assert not set(fast.tolist()) & set(slow.tolist())
        assert len(slow) == min(num_slow, len(losses) - num_fast)
    else:
        assert len(set(slow.tolist())) == len(slow) == num_slow


@given(st.integers(1, 1000), st.floats(0, 1))
def test_epoch_sizes_add_up_but_leave_no_class_without_samples(num_samples, share):
    num_fast, num_slow = epoch_sizes(num_samples, share)
    assert num_fast + num_slow - num_samples in (0, 1)
    assert abs(num_fast - share * num_samples) <= 1
    assert (num_fast > 0) == (share > 0)
    assert (num_slow > 0) == (share < 1)


def test_separate_slow_nodes_draw_uniformly_from_all():
    # each of 10 samples in 3 of 10 places, whatever its loss: 0.3 +- 4 standard errors
    losses, rng, rounds = np.arange(10.0), np.random.default_rng(5), 4000
    counts = np.zeros(10)
    for _ in range(rounds):
        counts[allocate(losses, 0.7, 1.0, rng)[1]] += 1
    np.testing.assert_allclose(counts / rounds, 0.3, atol=4 * np.sqrt(0.21 / rounds))


def test_fill_is_uniform_over_the_rest():
    # 2 by loss, 2 of the other 8 at random: chance 1 for the two, 2/8 for the others
    losses, rng, rounds = np.arange(10.0), np.random.default_rng(6), 4000
    counts = np.zeros(10)
    for _ in range(rounds):
        counts[fast_allocation(losses, 4, 0.5, rng)] += 1
    assert (counts[8:] == rounds).all()
    np.testing.assert_allclose(counts[:8] / rounds, 0.25, atol=4 * np.sqrt(0.1875 / rounds))


def test_order_is_shuffled_so_that_nodes_share_the_hard_ones():
    losses, rng, rounds = np.arange(8.0), np.random.default_rng(7), 2000
    first_half = sum(7 in fast_allocation(losses, 6, 0.5, rng)[:3] for _ in range(rounds))
    assert abs(first_half / rounds - 0.5) < 4 * np.sqrt(0.25 / rounds)


def test_before_the_first_loss_all_is_uniform():
    losses, rng, rounds = np.full(6, np.nan), np.random.default_rng(8), 3000
    counts = np.zeros(6)
    for _ in range(rounds):
        counts[fast_allocation(losses, 3, 1.0, rng)] += 1
    np.testing.assert_allclose(counts / rounds, 0.5, atol=4 * np.sqrt(0.25 / rounds))


def test_same_generator_same_allocation():
    losses = np.random.default_rng(1).random(100)
    first, second = (allocate(losses, 0.6, 0.3, np.random.default_rng(3)) for _ in "ab")
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fast_share_of_the_papers_fleets():
    fleet = [True] * 8 + [False] * 2
    assert fast_share([32] * 8 + [16] * 2, fleet) == 256 / 288
    assert fast_share([32] * 8 + [1] * 2, fleet) == 256 / 258
    assert fast_share([32, 32], [True, True]) == 1.0


def test_a_bad_report_leaves_the_loss_table_as_it_was():
    table = np.full(4, np.nan)
    record_losses(table, [3, 3], [1.0, 2.0])
    for indices, losses in (([0, 9], [1.0, 1.0]), ([0, 1], [1.0, np.inf])):
        with pytest.raises(ValueError, match="must"):
            record_losses(table, indices, losses)
    np.testing.assert_array_equal(table, [np.nan, np.nan, np.nan, 2.0])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda rng: fast_allocation([], 0, 0.5, rng), "losses must be a 1-D table with at least"),
        (lambda rng: fast_allocation([[1.0]], 0, 0.5, rng), "losses must be a 1-D table"),
        (lambda rng: fast_allocation([1.0], 1, 0.0, rng), "high_loss_fraction must lie in"),
        (lambda rng: fast_allocation([1.0], 1, 1.1, rng), "high_loss_fraction must lie in"),
        (lambda rng: fast_allocation([1.0], 1, np.nan, rng), "high_loss_fraction must lie in"),
        (lambda rng: fast_allocation([1.0], 2, 0.5, rng), "num_fast must lie in"),
        (lambda rng: epoch_sizes(9, 1.5), "share must lie in"),
        (lambda rng: epoch_sizes(9, np.nan), "share must lie in"),
        (lambda rng: slow_allocation(2, 3, rng), "num_slow must lie in"),
        (lambda rng: fast_share([], []), "num_steps must be at least 1"),
        (lambda rng: fast_share([0, 1], [True, False]), "num_steps must be at least 1"),
        (lambda rng: record_losses(np.zeros(2), [2], [1.0]), r"indices must lie in range\(2\)"),
        (lambda rng: record_losses(np.zeros(2), [-1], [1.0]), r"indices must lie in range\(2\)"),
        (lambda rng: record_losses(np.zeros(2), [0.5], [1.0]), ": pass integer positions"),
        (lambda rng: record_losses(np.zeros(2), [0, 1], [1.0]), "indices must be integers, one"),
        (lambda rng: record_losses(np.zeros(2), [0], [np.nan]), "losses must be finite"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call(np.random.default_rng(0))
