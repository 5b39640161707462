import numpy as np
import pytest

from flwr_hetero.tifl.grouping import (
    MIN_REPEATS,
    SAME,
    censored_latency,
    median_latency,
    speeds_differ,
)

NAN = np.nan


def test_median_latency_by_hand():
    rounds = np.array([[12, 10, 9.9, NAN, NAN], [1, 11, 9.9, NAN, 10], [2, 10, 9.8, 3, NAN]])
    latency, dropout = median_latency(rounds, t_max=10)
    assert latency.tolist() == [2.0, 10.0, 9.9, 10.0, 10.0]
    assert dropout.tolist() == [False, True, False, False, True]


def noise(spread, shape, seed=0):
    return np.exp(spread * np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("speeds", "differ"),
    [(np.ones(10), False), (np.linspace(1, 1.2, 10), False), (np.linspace(1, 3, 10), True)],
)
def test_repeated_latencies_differ_by_more_than_their_spread(seed, speeds, differ):
    rounds = speeds * noise(0.2, (5, 10), seed)
    assert speeds_differ(rounds) == differ
    rounds[np.random.default_rng(seed).random(rounds.shape) < 0.4] = NAN
    assert speeds_differ(rounds) == differ


def test_variance_components_by_hand():
    logs = np.array([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    assert not speeds_differ(np.exp(logs))  # between (3 * 1 - 1) / 3, within 1
    logs[:, 1:] += [0.25, 0.5]
    assert speeds_differ(np.exp(logs))  # between 1.25^2 - 1 / 3


@pytest.mark.parametrize(
    ("ratio", "repeats", "differ"),
    [
        (SAME * 0.99, 0, False),
        (SAME, 0, True),
        (1.1, MIN_REPEATS - 1, False),
        (1.1, MIN_REPEATS, True),
    ],
)
def test_few_repeats_ask_for_a_ratio(ratio, repeats, differ):
    rounds = np.full((MIN_REPEATS + 1, 3), NAN)
    rounds[0] = [1.0, 1.0, ratio]
    rounds[1 : 1 + repeats, 0] = 1.0
    assert speeds_differ(rounds) == differ


def test_one_node_or_none_has_nothing_to_differ_from():
    assert not speeds_differ(np.full((3, 2), NAN))
    assert not speeds_differ(np.array([[1.0, NAN], [9.0, NAN]]))


def test_nodes_that_have_not_answered_come_last_and_apart():
    filled = censored_latency(np.array([1.0, 4.0]), at_least=np.array([0.0, 0.0, 9.0]))
    assert filled[:2].tolist() == [1.0, 4.0]
    assert (np.diff(filled[1:]) > 0).all()
    assert filled[-1] == pytest.approx(9.0, rel=1e-5)
