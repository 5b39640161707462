"""PGDSampler: settings, the paper's rule, sizes and damaged states."""

import math

import numpy as np
import pytest

from flwr_hetero.pgd.algorithm import estimate
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import PGDSampler


def with_priorities(sampler, seed=0):
    """Give every example a priority, a third of them negative."""
    rng = np.random.default_rng(seed)
    num = sampler.num_samples
    priorities = rng.lognormal(size=num) * rng.choice([1, 1, -1], num)
    sampler.update(np.arange(num), priorities)
    return priorities


# --- Algorithm 1 -----------------------------------------------------------------------


def test_batch_is_round_robin_and_top():
    sampler = PGDSampler(20, 6, seed=3, rule="topk", renewal_share=0.5)
    priorities = with_priorities(sampler)
    turn = sampler.draw.order.tolist()
    for step in range(20):
        indices, weights = sampler.next_batch()
        expected = [turn[(3 * step + i) % 20] for i in range(3)]
        assert indices[:3].tolist() == expected
        best = [i for i in np.argsort(-priorities).tolist() if i not in expected]
        assert sorted(indices[3:].tolist()) == sorted(best[:3])
        assert weights.tolist() == [1.0] * 6


def test_two_iterations_by_hand():
    # priorities 8, 4, 2, 1 of the full pass in iteration 0
    sampler = PGDSampler(4, 2, seed=0, rule="topk")
    sampler.update(np.arange(4), np.array([8.0, 4.0, 2.0, 1.0]))
    sampler.draw.order = np.array([3, 2, 1, 0])
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [3, 0]
    sampler.update(indices, np.array([1.0, 1.0]))  # the first: slope -0.8 ln 8
    indices, _ = sampler.next_batch()
    assert indices.tolist() == [2, 1]
    sampler.update(indices, np.array([6.0, -4.0]))  # slopes 0.8 ln 3 over 2, and none
    expected = [8 ** (-0.8 * 2), -4.0, 6 * 3**0.4, 1.0]
    np.testing.assert_allclose(estimate(sampler.draw.trend, 3), expected)
    assert sampler.summary() == {"coverage": 1.0, "negative-share": 0.25, "mean-age": 1.5}


def test_first_epoch_is_taken_in_turn():
    sampler = PGDSampler(10, 4, seed=0, rule="topk")
    seen = []
    for _ in range(3):
        indices, _ = sampler.next_batch()
        seen += indices.tolist()
        sampler.update(indices, np.ones(4))
    assert sorted(seen[:10]) == list(range(10))
    sampler.update(np.arange(10), 1e3 * (np.arange(10) == 5))
    assert all(5 in sampler.next_batch()[0] for _ in range(5))


def test_unknown_example_waits_for_its_turn():
    sampler = PGDSampler(6, 2, seed=0, rule="topk")
    for _ in range(3):
        indices, _ = sampler.next_batch()
        if 0 not in indices:
            sampler.update(indices, np.full(2, -1.0))
    assert not sampler.draw.is_warming_up
    top = [sampler.next_batch()[0][1] for _ in range(6)]
    unknown = np.flatnonzero(sampler.draw.trend.computed_at < 0)
    assert 0 in unknown
    assert not set(top) & set(unknown)


# --- both rules ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (1, 8), (3, 8), (50, 7)])
def test_small_and_odd_sizes(rule, num_samples, batch_size):
    sampler = PGDSampler(num_samples, batch_size, seed=0, rule=rule, gate=0)
    for step in range(12):
        indices, weights = sampler.next_batch()
        assert 1 <= len(indices) == len(weights) <= batch_size
        if rule == "topk":
            assert len(indices) == min(num_samples, batch_size) == len(set(indices.tolist()))
        sampler.update(indices, np.cos(indices + step))


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        ("topk", "rule", "stochastic"),
        ("topk", "order", np.zeros(8, dtype=np.int32)),
        ("topk", "priority", np.full(8, np.inf)),
        ("topk", "slope", np.full(8, np.nan)),
        ("topk", "turns", -1),
        ("topk", "iteration", -1),
        ("stochastic", "rule", "topk"),
        ("stochastic", "order", np.full(8, 8, dtype=np.int32)),
        ("stochastic", "weights", np.zeros(8)),
        ("stochastic", "weights", np.full(8, 2.1)),
        ("stochastic", "importance", np.full(8, -1.0, dtype=np.float32)),
        ("stochastic", "importance", np.full(8, np.nan, dtype=np.float32)),
        ("stochastic", "position", 9),
        ("stochastic", "steps", -1),
        ("stochastic", "moments", np.array([1.0, math.nan, 1.0, 1.0])),
        ("stochastic", "moments", np.array([1.0, -1.0, 1.0, 1.0])),
    ],
)
def test_damaged_state_is_refused(rule, key, value):
    sampler, twin = (PGDSampler(8, 4, seed=1, rule=rule, gate=0) for _ in range(2))
    state = sampler.state_dict()
    with_priorities(sampler)
    with_priorities(twin)
    with pytest.raises(ValueError, match=r"state|importance must be"):
        sampler.load_state_dict({**state, key: value})
    for _ in range(3):
        np.testing.assert_array_equal(sampler.next_batch()[0], twin.next_batch()[0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rule": "top"}, "rule must be one of stochastic, topk"),
        ({"renewal_share": 0.0}, r"renewal_share must be a number in \(0, 1\]"),
        ({"renewal_share": math.nan}, "renewal_share must be"),
        ({"gate": -1.0}, r"gate must be a number in \[0, inf\)"),
        ({"gate": math.inf}, "gate must be"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        PGDSampler(**({"num_samples": 10, "batch_size": 4} | change))


@pytest.mark.parametrize(
    ("share", "batch_size", "number"), [(0.5, 12, 6), (0.01, 12, 1), (1.0, 12, 12), (0.5, 99, 20)]
)
def test_number_of_renewed_examples(share, batch_size, number):
    sampler = PGDSampler(40, batch_size, rule="topk", renewal_share=share)
    assert sampler.draw.num_renewed == number
