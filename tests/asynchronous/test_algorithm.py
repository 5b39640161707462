import numpy as np
import pytest

from flwr_hetero.asynchronous.algorithm import (
    Usual,
    default_buffer,
    merge_weights,
    staleness_weights,
)


@pytest.mark.parametrize(("exponent", "weights"), [(0.5, [1, 0.5]), (0, [1, 1]), (1, [1, 0.25])])
def test_staleness_weights(exponent, weights):
    np.testing.assert_allclose(staleness_weights([0, 3], exponent), weights)


def test_nodes_count_by_their_weight_whatever_their_pace():
    weight, interval_s = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 8.0])
    arrivals = sorted((t, i) for i, s in enumerate(interval_s) for t in np.arange(s, 8000.0, s))
    total, steps = np.zeros(3), []
    for start in range(0, len(arrivals) - 3, 4):
        nodes = [node for _, node in arrivals[start : start + 4]]
        every = weight * interval_s
        found = merge_weights(every[nodes], every, 1 / interval_s, 99.0)
        steps.append(found.step)
        np.add.at(total, nodes, found.step * found.weights / found.weights.sum())
    np.testing.assert_allclose(total / total.sum(), weight / weight.sum(), rtol=0.01)
    assert np.mean(steps) == pytest.approx(1.0, rel=0.01)


def test_weights_are_clipped_and_it_is_said():
    every, rate = [1.0, 1.0, 1.0, 97.0], [1.0] * 4
    found = merge_weights(every, every, rate, limit=2.0)
    np.testing.assert_allclose(found.weights, [1, 1, 1, 50])
    assert found.clipped_share == pytest.approx(47 / 100)
    assert found.step == pytest.approx(1.0)  # of the weights as they are after clipping
    alone = merge_weights([97.0], every, rate, limit=2.0)
    assert alone.step == pytest.approx(50 / (53 / 4))


def test_weights_of_zero_count_alike():
    found = merge_weights([0.0, 0.0], [0.0, 0.0], [1, 1], limit=2.0)
    assert found.weights.tolist() == [1, 1]
    assert found.step == 1
    assert merge_weights([0.0, 0.0], [0.0, 5.0], [1, 1]).step == 0


def test_usual_of_a_node():
    usual = Usual()
    for number in range(1, 4):
        usual.see(10.0 * number, 2.0 * number, None, discount=1 / number)
    assert (usual.weight, usual.interval_s(0.0)) == pytest.approx((20.0, 4.0))
    assert usual.discount == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    for _ in range(100):
        usual.see(5.0, 1.0, None, 0.5)
    assert (usual.weight, usual.interval_s(0.0), usual.discount) == pytest.approx(
        (5, 1, 0.5), rel=0.01
    )
    usual.see(5.0, 1e6, None, 0.5)  # it was away
    assert usual.interval_s(0.0) == pytest.approx(1.9, rel=0.01)


def test_a_node_that_answers_at_once_has_an_interval():
    usual = Usual()
    usual.see(1.0, 0.0, None, 1.0)
    assert 0 < usual.interval_s(0.0) < 0.01


def test_default_buffer_is_never_more_than_the_nodes():
    assert [default_buffer(n) for n in (0, 1, 2, 3, 6, 7, 20)] == [1, 1, 2, 3, 3, 4, 10]


def test_idle_time_of_a_node_is_first_that_of_all():
    usual = Usual()
    usual.see(1.0, 2.0, None, 1.0)
    assert usual.interval_s(30.0) == 32.0
    for _ in range(5):
        usual.see(1.0, 2.0, 10.0, 1.0)
    assert usual.interval_s(30.0) == pytest.approx(2.0 + (5 * 30.0 + 5 * 10.0) / 10)
    for _ in range(500):
        usual.see(1.0, 2.0, 10.0, 1.0)
    assert usual.interval_s(30.0) == pytest.approx(12.0, rel=0.02)
    before_s = usual.interval_s(10.0)
    usual.see(1.0, 2.0, 1e9, 1.0)  # it was away
    assert usual.interval_s(10.0) < before_s + 1
