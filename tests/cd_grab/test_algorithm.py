"""Pair balancing, groups, reordering and the herding bound."""

import numpy as np
import pytest
from oracles.cd_grab import TwoPointers

from flwr_hetero.cd_grab.algorithm import (
    balance_group,
    herding_bound,
    own_share,
    pair_balance,
    reorder,
    unit_signs,
    walk_balance,
)


def vectors_of(num_nodes, num_units, dim=16, dtype=np.float64):
    """Uniform, centred over all nodes, of length 1: the synthetic set-up of the paper."""
    vectors = np.random.default_rng(0).random((num_nodes, num_units, dim))
    vectors -= vectors.mean(axis=(0, 1))
    return (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(dtype)


def shuffled(num_nodes, num_units):
    rng = np.random.default_rng(1)
    return np.array([rng.permutation(num_units) for _ in range(num_nodes)])


def next_orders(vectors, orders):
    """One epoch of Algorithm 4."""
    num_nodes, num_units, dim = vectors.shape
    visited = np.take_along_axis(vectors, orders[:, :, None], axis=1)
    even = num_units // 2 * 2
    diffs = list(visited[:, 0:even:2] - visited[:, 1:even:2])
    sums = [np.zeros(dim, vectors.dtype) for _ in diffs]
    _, signs = balance_group(sums, diffs, np.zeros(num_nodes))
    return np.array([reorder(orders[i], unit_signs(s, num_units)) for i, s in enumerate(signs)])


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**40])
@pytest.mark.parametrize("seed", range(5))
def test_pair_balance_takes_the_shorter_sum(seed, scale):
    diffs = np.random.default_rng(seed).integers(-64, 64, (9, 5)) / 16.0 * scale
    r = start = np.arange(5) * scale
    total, signs = pair_balance(start, diffs)
    for sign, z in zip(signs, diffs, strict=True):
        assert np.linalg.norm(r + sign * z) <= np.linalg.norm(r - sign * z)
        r = r + sign * z
    np.testing.assert_array_equal(total, r)


def test_sign_of_a_walk_follows_the_sum():
    rng = np.random.default_rng(0)
    signs = [walk_balance([1.0], [[1.0]], 4.0, rng)[1][0] for _ in range(2000)]
    assert np.mean(np.array(signs) > 0) == pytest.approx(0.5 - 1 / 8, abs=0.03)
    assert walk_balance([-9.0], [[1.0]] * 3, 4.0, rng)[1].tolist() == [1, 1, 1]
    diffs = rng.uniform(-0.5, 0.5, (50, 4))
    total, signs = walk_balance(np.zeros(4), diffs, 4.0, rng)
    np.testing.assert_allclose(total, signs @ diffs)
    with pytest.raises(ValueError, match="pair_diffs must have a length of at most 1"):
        walk_balance([0.0], [[2.0]], 4.0, rng)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "shape", [(1, 8, 3), (2, 7, 5), (4, 64, 16), (16, 32, 2), (3, 33, 40)], ids=str
)
def test_orders_are_the_oracles(shape, dtype):
    vectors = vectors_of(*shape, dtype=dtype)
    orders = shuffled(*shape[:2])
    oracle = TwoPointers(vectors, orders)
    for _ in range(8):
        orders = next_orders(vectors, orders)
        assert orders.tolist() == oracle.epoch()


def test_bound_halves_to_a_floor():
    vectors = vectors_of(16, 1024)
    orders = shuffled(16, 1024)
    bounds = []
    for _ in range(9):
        bounds.append(herding_bound(vectors, orders))
        orders = next_orders(vectors, orders)
    assert 0.4 < bounds[1] / bounds[0] < 0.6
    assert bounds[-1] < 3.0


@pytest.mark.parametrize(("weight", "sign"), [(0.0, -1), (0.4, -1), (0.5, 1), (1.0, 1)])
def test_own_weights_between_by_hand(weight, sign):
    sums = [np.array([-2.0]), np.array([1.0])]  # together -1
    diffs = [np.array([[0.0]]), np.array([[-1.0]])]  # vote (1-h)(-1)(-1) + h(1)(-1)
    total, signs = balance_group(sums, diffs, [0.0, weight])
    assert signs[1].tolist() == [sign]
    assert sums[1].tolist() == [1.0 - sign]
    assert total.tolist() == [-1.0 - sign]


def test_own_share_falls_with_the_overlap():
    q = np.linspace(0, 1, 11)
    assert (np.diff(own_share(q, 8)) < 0).all()
    assert (own_share(q[1:-1], 32) > own_share(q[1:-1], 2)).all()
    assert own_share([1.0], 1).tolist() == [1.0]


def test_reorder_by_hand():
    # front: 4, 1 as visited; back: 0, 3, 2 reversed
    assert reorder([4, 0, 3, 1, 2], [1, -1, -1, 1, -1]).tolist() == [4, 1, 2, 3, 0]
    assert reorder([0], unit_signs([], 1)).tolist() == [0]


@pytest.mark.parametrize(
    ("num_nodes", "num_units", "dim"), [(1, 1, 1), (1, 5, 2), (2, 2, 1), (4, 6, 3)]
)
def test_herding_bound_is_equation_8(num_nodes, num_units, dim):
    vectors = np.random.default_rng(0).standard_normal((num_nodes, num_units, dim))
    orders = shuffled(num_nodes, num_units)
    mean = vectors.mean(axis=(0, 1))
    prefix = np.zeros(dim)
    worst = 0.0
    for j in range(num_units):
        for i in range(num_nodes):
            prefix += vectors[i, orders[i, j]] - mean
        worst = max(worst, np.abs(prefix).max())
    assert herding_bound(vectors, orders) == pytest.approx(worst, abs=1e-9)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (pair_balance, (np.zeros(2), np.zeros((3, 4))), "pair_diffs must have rows"),
        (pair_balance, (np.zeros((2, 2)), np.zeros((2, 2))), "pair_diffs must have rows"),
        (pair_balance, (np.zeros(2), [[0.0, np.nan]]), "pair_diffs must be finite"),
        (pair_balance, (np.zeros(2), [[np.inf, 0], [1, 1]]), "pair_diffs must be finite"),
        (reorder, ([0, 1, 1], [1, 1, 1]), r"order must be a permutation of range\(3\)"),
        (reorder, ([0.0, 1.0], [1, 1]), "order must be a permutation"),
        (reorder, ([[0, 1]], [[1, 1]]), "order must be a permutation"),
        (reorder, ([], []), "order must be a permutation"),
        (reorder, ([0, 1], [1, 0]), "signs must hold"),
        (reorder, ([0, 1], [1]), "signs must hold"),
        (unit_signs, ([1, 1], 6), r"pair_signs must have shape \(3,\)"),
    ],
)
def test_bad_input_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
