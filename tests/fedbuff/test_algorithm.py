import numpy as np
import pytest

from flwr_hetero.fedbuff.algorithm import default_buffer, interval_weights, staleness_weights


@pytest.mark.parametrize(("exponent", "weights"), [(0.5, [1, 0.5]), (0, [1, 1]), (1, [1, 0.25])])
def test_staleness_weights(exponent, weights):
    np.testing.assert_allclose(staleness_weights([0, 3], exponent), weights)


def test_nodes_count_by_their_weight_whatever_their_pace():
    weight, interval_s = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 8.0])
    arrivals = sorted((t, i) for i, s in enumerate(interval_s) for t in np.arange(s, 8000.0, s))
    total, mean = np.zeros(3), 0.0
    for number, start in enumerate(range(0, len(arrivals) - 3, 4), 1):
        nodes = [node for _, node in arrivals[start : start + 4]]
        found = interval_weights(weight[nodes], interval_s[nodes], mean, 1 / min(number, 100), 99.0)
        mean = found.mean
        np.add.at(total, nodes, found.step * found.weights / found.weights.sum())
    np.testing.assert_allclose(total / total.sum(), weight / weight.sum(), rtol=0.01)


def test_weights_are_clipped_and_it_is_said():
    found = interval_weights([1.0] * 4, [1, 1, 1, 97], mean=0.0, rate=0.5, limit=2.0)
    np.testing.assert_allclose(found.weights, [1, 1, 1, 50])
    assert found.clipped_share == pytest.approx(47 / 100)


def test_weights_of_zero_count_alike():
    found = interval_weights([0.0, 0.0], [1, 1], mean=0.0, rate=0.5, limit=2.0)
    assert found.weights.tolist() == [1, 1]
    assert found.step == 1


def test_default_buffer_is_never_more_than_the_nodes():
    assert [default_buffer(n) for n in (0, 1, 2, 3, 6, 7, 20)] == [1, 1, 2, 3, 3, 4, 10]
