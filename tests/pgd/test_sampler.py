"""PGDSampler: the paper's rule, the unbiased draw, sizes, settings and damaged states."""

import math

import numpy as np
import pytest

from flwr_hetero.pgd.algorithm import estimate
from flwr_hetero.sampler import PGDSampler


def with_priorities(sampler):
    """Give every example a priority, a third of them negative."""
    rng = np.random.default_rng(0)
    num = sampler.num_samples
    priorities = rng.lognormal(size=num) * rng.choice([1, 1, -1], num)
    sampler.update(np.arange(num), priorities)
    return priorities


@pytest.mark.parametrize(
    ("share", "size", "renewed"), [(0.5, 6, 3), (0.01, 6, 1), (1.0, 6, 6), (0.5, 99, 10)]
)
def test_batch_is_round_robin_and_top(share, size, renewed):
    sampler = PGDSampler(20, size, rule="topk", renewal_share=share)
    used = min(size, 20)
    assert sampler.num_renewed == used  # at first all, in turn
    priorities = with_priorities(sampler)
    turn = sampler.order.tolist()
    for step in range(20):
        indices, weights = sampler.next_batch()
        expected = [turn[(renewed * step + i) % 20] for i in range(renewed)]
        assert indices[:renewed].tolist() == expected
        best = [i for i in np.argsort(-priorities).tolist() if i not in expected]
        assert sorted(indices[renewed:].tolist()) == sorted(best[: used - renewed])
        assert weights.tolist() == [1.0] * used


def test_two_iterations_by_hand():
    # priorities 8, 4, 2, 1 of the full pass in iteration 0
    sampler = PGDSampler(4, 2, seed=0, rule="topk")
    sampler.update(np.arange(4), np.array([8.0, 4.0, 2.0, 1.0]))
    sampler.order = np.array([3, 2, 1, 0])
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [3, 0]
    sampler.update(indices, np.array([1.0, 1.0]))  # the first: slope -0.8 ln 8
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [2, 1]
    sampler.update(indices, np.array([6.0, -4.0]))  # slopes 0.8 ln 3 over 2, and none
    expected = [8 ** (-0.8 * 2), -4.0, 6 * 3**0.4, 1.0]
    np.testing.assert_allclose(estimate(sampler.trend, 3), expected)
    assert sampler.summary() == {"coverage": 1.0, "mean-age": 1.5}


@pytest.mark.parametrize("renewal_share", [0.25, 0.5, 1.0])
def test_weighted_mean_is_unbiased(renewal_share):
    rng = np.random.default_rng(5)
    gradients = rng.normal(size=(30, 3)) + np.linspace(0, 4, 30)[:, None]
    sampler = PGDSampler(30, 8, seed=5, renewal_share=renewal_share)
    with_priorities(sampler)
    sampler.update(np.arange(10), np.zeros(10))  # no priority at all must not mean never drawn
    means = [[], [], [], []]  # by place in the epoch
    for step in range(4000):
        indices, weights = sampler.next_batch()
        assert weights.max() <= 1 / renewal_share * (1 + 1e-6)
        means[step % 4].append((weights[:, None] * gradients[indices]).mean(0))
    for found in means:
        error = np.mean(found, 0) - gradients.mean(0)
        standard_error = np.std(found, 0) / math.sqrt(len(found))
        assert (np.abs(error) < 4 * standard_error + 1e-9).all()


def test_priorities_count_from_the_next_epoch_on():
    sampler = PGDSampler(10, 4, seed=3)
    epoch = [sampler.next_batch() for _ in range(2)]
    assert all((weights == 1).all() for _, weights in epoch)  # nothing is known: a permutation
    sampler.update(np.array([1, 2]), np.array([1e4, 1.0]))
    epoch.append(sampler.next_batch())
    assert [len(batch) for batch, _ in epoch] == [4, 4, 2]
    assert sorted(np.concatenate([batch for batch, _ in epoch]).tolist()) == list(range(10))
    assert any((weights != 1).any() for _, weights in (sampler.next_batch() for _ in range(3)))
    sampler.update(np.arange(10), np.ones(10))  # of all: at once
    later = [sampler.next_batch() for _ in range(3)]
    assert [len(batch) for batch, _ in later] == [4, 4, 2]
    assert all((weights == 1).all() for _, weights in later)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rule must be one of stochastic, topk"):
        PGDSampler(10, 4, rule="top")
    with pytest.raises(ValueError, match=r"renewal_share must be a number in \(0, 1\]"):
        PGDSampler(10, 4, renewal_share=0.0)
