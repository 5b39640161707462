from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.biased_local_sgd.sampler import TopLossSampler
from flwr_hetero.client.batch_sampler import UniformSampler


def draw(sampler, count):
    """Draw single indices from batches until there are ``count``."""
    drawn = []
    while len(drawn) < count:
        drawn += sampler.next_batch()[0].tolist()
    return drawn


def test_epoch_of_a_fast_node_by_hand():
    # N = 8, share .75: 6 samples; lambda .5: the 3 of highest loss, 3 others at random
    sampler = TopLossSampler(8, 2, seed=0, high_loss_fraction=0.5, share=0.75)
    sampler.update(np.arange(8), np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.5]))
    epoch = [index for batch in sampler for index in batch]
    assert len(sampler) == 3
    assert len(set(epoch)) == len(epoch) == 6
    assert {1, 3, 5} <= set(epoch)


@given(st.integers(1, 30), st.integers(1, 9), st.floats(0.05, 1), st.floats(0.05, 1), st.integers())
def test_each_allocation_holds_the_top_samples_once(size, batch_size, share, fraction, seed):
    rng = np.random.default_rng(abs(seed))
    sampler = TopLossSampler(
        size, batch_size, seed=abs(seed), high_loss_fraction=fraction, share=share
    )
    losses = rng.random(size)
    sampler.update(np.arange(size), losses)
    allocated = max(1, round(share * size))
    top = np.argsort(-losses.astype(np.float32), kind="stable")[: round(fraction * allocated)]
    for _ in range(2):
        epoch = [index for batch in sampler for index in batch]
        assert len(set(epoch)) == len(epoch) == allocated
        assert set(top.tolist()) <= set(epoch)


def test_ranking_follows_the_losses_as_they_come_in():
    sampler = TopLossSampler(4, 1, seed=0, high_loss_fraction=1.0, share=0.25)
    for hardest in (2, 0, 3):
        losses = np.full(4, 0.1)
        losses[hardest] = 5.0
        sampler.update(np.arange(4), losses)
        assert sampler.next_batch()[0].tolist() == [hardest]


def test_a_slow_node_draws_uniformly_whatever_the_losses():
    sampler = TopLossSampler(5, 2, seed=0, fast=False, share=0.4)
    sampler.update(np.arange(5), np.array([9.0, 0.0, 0.0, 0.0, 0.0]))
    assert Counter(draw(sampler, 25)) == dict.fromkeys(range(5), 5)
    assert len(sampler) == 3


def test_without_losses_a_fast_node_is_uniform():
    # allocations of 5 of 10 without a loss: each sample in half of them, +- 4 standard errors
    sampler, epochs = TopLossSampler(10, 5, seed=3, share=0.5), 2000
    counts = np.bincount(draw(sampler, 5 * epochs), minlength=10)
    np.testing.assert_allclose(counts / epochs, 0.5, atol=4 * np.sqrt(0.25 / epochs))


def test_a_change_of_class_starts_a_new_allocation():
    sampler = TopLossSampler(100, 10, seed=0, fast=False)
    sampler.next_batch()
    sampler.update(np.arange(100), np.arange(100.0))
    sampler.set_role(fast=True, share=0.1)
    assert {95, 96, 97, 98, 99} <= set(sampler.next_batch()[0].tolist())
    sampler.set_role(fast=False, share=0.1)
    assert sorted(draw(sampler, 100)) == list(range(100))


def test_assigned_samples_come_in_order_then_reshuffled():
    sampler = TopLossSampler(100, 3, seed=0)
    sampler.assign([7, 99, 3, 42])
    batches = [sampler.next_batch()[0].tolist() for _ in range(2)]
    assert batches == [[7, 99, 3], [42]]
    assert sorted(draw(sampler, 4)) == [3, 7, 42, 99]
    sampler.assign(np.arange(60))
    first, second = draw(sampler, 60), draw(sampler, 60)
    assert first == list(range(60)) == sorted(second) != second


def test_take_losses_gives_each_once_with_its_latest_loss():
    sampler = TopLossSampler(10, 2)
    sampler.update(np.array([4, 1]), np.array([0.5, 0.25]))
    sampler.update(np.array([4]), np.array([0.125]))
    indices, losses = sampler.take_losses()
    assert (indices.tolist(), losses.tolist()) == ([1, 4], [0.25, 0.125])
    assert sampler.take_losses()[0].size == 0


@pytest.mark.parametrize("taken_after", [0, 1, 4, 9])
@pytest.mark.parametrize("assigned", [False, True])
def test_stop_save_load_continue_equals_uninterrupted(taken_after, assigned):
    def steps(sampler, count):
        batches = []
        for _ in range(count):
            indices, _ = sampler.next_batch()
            batches.append(indices.tolist())
            sampler.update(indices, np.sin(indices) + 1)
        return batches

    whole, part = (TopLossSampler(23, 4, seed=9, share=0.6) for _ in "ab")
    if assigned:
        for sampler in (whole, part):
            sampler.assign(np.arange(0, 23, 3))
    steps(whole, taken_after)
    steps(part, taken_after)
    resumed = TopLossSampler(23, 4, seed=1)
    resumed.load_state_dict(part.state_dict())
    assert steps(resumed, 12) == steps(whole, 12)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    np.testing.assert_array_equal(resumed.take_losses()[0], whole.take_losses()[0])


def test_state_is_a_copy():
    sampler = TopLossSampler(5, 2)
    state = sampler.state_dict()
    sampler.update(np.array([0]), np.array([1.0]))
    assert np.isnan(state["losses"]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"losses": np.zeros(4)},
        {"allocation": np.array([5])},
        {"allocation": np.array([-1])},
        {"allocation": np.array([0.5])},
        {"unreported": np.zeros(3, bool)},
        {"num_samples": 6},
        {"position": 1},
        {"position": None},
        {"share": 2.0},
        {"assigned": "yes"},
        {"fast": 1},
        {"rng": "nonsense"},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change):
    sampler = TopLossSampler(5, 2, seed=4)
    sampler.update(np.array([1]), np.array([2.0]))
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict(before | change)
    after = sampler.state_dict()
    assert all(np.array_equal(before[k], after[k], equal_nan=k == "losses") for k in before)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: TopLossSampler(0, 2), "num_samples must be"),
        (lambda: TopLossSampler(5, 0), "batch_size must be"),
        (lambda: TopLossSampler(5, 2, high_loss_fraction=0.0), "high_loss_fraction must lie in"),
        (lambda: TopLossSampler(5, 2, high_loss_fraction=1.01), "high_loss_fraction must lie in"),
        (lambda: TopLossSampler(5, 2, share=0.0), "share must lie in"),
        (lambda: TopLossSampler(5, 2, share=1.5), "share must lie in"),
        (lambda: TopLossSampler(5, 2).assign([]), "indices must be a non-empty list"),
        (lambda: TopLossSampler(5, 2).assign([5]), r"indices must lie in range\(5\)"),
        (lambda: TopLossSampler(5, 2).assign([-1]), r"indices must lie in range\(5\)"),
        (lambda: TopLossSampler(5, 2).assign([1.5]), "indices must be a non-empty list of int"),
        (lambda: TopLossSampler(5, 2).update([5], [1.0]), r"indices must lie in range\(5\)"),
        (lambda: TopLossSampler(5, 2).update([0], [np.nan]), "scores must be finite"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_full_share_is_reshuffling_as_the_uniform_sampler():
    sampler, uniform = TopLossSampler(9, 2, share=1.0), UniformSampler(9, 2)
    sampler.update(np.arange(9), np.arange(9.0))
    assert sorted(draw(sampler, 9)) == sorted(draw(uniform, 9)) == list(range(9))
