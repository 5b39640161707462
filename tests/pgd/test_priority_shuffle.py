"""The unbiased rule of PGDSampler: draws, weights, and the gate."""

import math

import numpy as np
import pytest

from flwr_hetero.sampler import PGDSampler, UniformSampler


@pytest.mark.parametrize("renewal_share", [0.25, 0.5, 1.0])
def test_weighted_mean_is_unbiased(renewal_share):
    rng = np.random.default_rng(5)
    gradients = rng.normal(size=(30, 3)) + np.linspace(0, 4, 30)[:, None]
    sampler = PGDSampler(30, 8, seed=5, renewal_share=renewal_share, gate=0)
    sampler.update(np.arange(30), rng.lognormal(size=30) * rng.choice([1, 1, -1], 30))
    sampler.update(np.arange(10), np.zeros(10))  # no priority at all must not mean never drawn
    means = [[], [], [], []]  # by place in the epoch
    for step in range(8000):
        indices, weights = sampler.next_batch()
        assert weights.max() <= 1 / renewal_share * (1 + 1e-6)
        means[step % 4].append((weights[:, None] * gradients[indices]).mean(0))
    for found in means:
        error = np.mean(found, 0) - gradients.mean(0)
        standard_error = np.std(found, 0) / math.sqrt(len(found))
        assert (np.abs(error) < 4 * standard_error + 1e-9).all()


def test_draws_by_root_of_absolute_priority():
    sampler = PGDSampler(4, 4, seed=0, renewal_share=0.2, gate=0)
    sampler.update(np.arange(4), np.array([16.0, -4.0, 1.0, 0.0]))
    expected = 4 * (np.array([4, 2, 1, 0]) / 7 * 0.8 + 0.05)
    counts = np.zeros(4)
    for _ in range(1000):
        indices, weights = sampler.next_batch()
        np.testing.assert_allclose(weights, 1 / expected[indices], rtol=1e-6)
        times = np.bincount(indices, minlength=4)
        assert ((times >= np.floor(expected)) & (times <= np.ceil(expected))).all()
        counts += times
    np.testing.assert_allclose(counts / 1000, expected, atol=0.06)
    assert sampler.summary()["effective-share"] == pytest.approx(1 / (1 / expected).mean())


def test_gate_opens_only_when_priorities_pay():
    sampler, uniform = PGDSampler(12, 4, seed=3), UniformSampler(12, 4, seed=3)
    for _ in range(10):
        (indices, weights), (expected, _) = sampler.next_batch(), uniform.next_batch()
        assert indices.tolist() == expected.tolist()
        assert (weights == 1).all()
        sampler.update(indices, np.ones(4))  # all alike: nothing to gain
    assert sampler.summary()["importance-open"] == 0.0
    sampler.update(np.arange(12), np.r_[1e4, np.zeros(11)])
    assert sampler.summary()["importance-open"] == 1.0
    assert any(0 in sampler.next_batch()[0] for _ in range(2))
    sampler.update(np.arange(12), np.ones(12))
    assert not sampler.is_open


def test_gate_opens_at_its_ratio_and_closes_on_harm():
    sampler = PGDSampler(12, 4, seed=0, gate=1e-9)
    spread = np.r_[np.full(3, 1e4), np.ones(9)]
    sampler.update(np.arange(12), spread)
    ratio = sampler.summary()["variance-ratio-fresh"]
    assert ratio == pytest.approx(sampler.summary()["variance-ratio"])
    for gate, opens in ((ratio * 0.999, True), (ratio * 1.001, False)):
        other = PGDSampler(12, 4, seed=0, gate=gate)
        other.update(np.arange(12), spread)
        assert other.is_open == opens
    while sampler.summary()["variance-ratio"] > 0.95:  # what was large is small, and reverse
        assert sampler.is_open
        sampler.update(np.array([0, 1, 5, 6]), np.array([1.0, 1, 1, 1]), np.array([0, 0, 1, 1.0]))
        sampler.update(np.array([0, 1, 5, 6]), np.array([1e4, 1e4, 1, 1]), np.array([0, 0, 1, 1.0]))
    assert not sampler.is_open


def test_gate_goes_by_norms_not_priorities():
    spread, even = np.r_[np.full(3, 1e4), np.ones(9)], np.ones(12)
    for norms, opens in ((even, False), (np.sqrt(spread), True), (None, True)):
        sampler = PGDSampler(12, 4, seed=0)
        sampler.update(np.arange(12), spread, norms)
        assert sampler.is_open == opens
    exact = (spread.mean()) / (spread / sampler.draw._counts()).mean()
    assert sampler.summary()["variance-ratio"] == pytest.approx(exact)


def test_evidence_is_the_same_however_drawn():
    for gate in (0.0, 1e9):  # by priority, and uniformly
        sampler = PGDSampler(200, 20, seed=1, gate=gate, renewal_share=0.2)
        rng = np.random.default_rng(1)
        norms = rng.exponential(size=200)
        priorities = norms**2 * rng.uniform(0.2, 5.0, size=200)
        sampler.update(np.arange(200), priorities)
        before = sampler.summary()["variance-ratio"]
        sampler.update(np.arange(200), priorities, norms)
        expected = sampler.summary()["variance-ratio"]
        for _ in range(600):
            indices, _ = sampler.next_batch()
            sampler.update(indices, priorities[indices], norms[indices])
        assert expected != pytest.approx(before, rel=0.2)
        assert sampler.summary()["variance-ratio"] == pytest.approx(expected, rel=0.15)


def test_evidence_does_not_depend_on_norms_length():
    ratios = []
    for first in (1.0, 1e3):  # norms shrink in training
        sampler = PGDSampler(12, 4, seed=0, gate=1e9)
        for factor, norms in ((first, np.r_[9.0, 1, 1, 1]), (1.0, np.r_[3.0, 1, 1, 1])):
            indices, _ = sampler.next_batch()
            sampler.update(indices, norms**2, factor * norms)
        ratios.append(sampler.summary()["variance-ratio-fresh"])
    assert ratios[0] == pytest.approx(ratios[1])


def test_open_gate_begins_an_epoch_at_once():
    sampler, uniform = PGDSampler(10, 4, seed=3, gate=1.2), UniformSampler(10, 4, seed=3)
    for _ in range(4):  # the last batch of an epoch is smaller
        indices, _ = sampler.next_batch()
        assert indices.tolist() == uniform.next_batch()[0].tolist()
    sampler.update(indices, np.array([1e4, 1.0, 1.0, 1.0]))  # stored are none, fresh are spread
    assert sampler.summary()["variance-ratio"] == pytest.approx(1.0)
    assert sampler.summary()["variance-ratio-fresh"] > 1.2
    epoch = [sampler.next_batch() for _ in range(3)]
    assert [len(batch) for batch, _ in epoch] == [4, 4, 2]
    assert min(weights.min() for _, weights in epoch) < 1


@pytest.mark.parametrize(
    ("norms", "match"),
    [
        (np.ones(3), r"norms must have the shape of indices"),
        (np.array([1.0, -1.0]), "importance must be finite and not negative"),
        (np.array([1.0, np.nan]), "importance must be finite and not negative"),
    ],
)
def test_bad_norms_are_refused(norms, match):
    sampler = PGDSampler(8, 2)
    with pytest.raises(ValueError, match=match):
        sampler.update(np.array([0, 1]), np.ones(2), norms)
    assert sampler.summary()["coverage"] == 0.0
