"""Pair balancing, reordering and the herding bound of CD-GraB."""

from math import fsum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flwr_hetero.cd_grab.algorithm import (
    herding_bound,
    pair_balance,
    relative_herding,
    reorder,
    self_balancing_walk,
    unit_signs,
)

diffs_of_5 = arrays(
    np.int64, st.tuples(st.integers(1, 9), st.just(5)), elements=st.integers(-64, 64)
).map(lambda sixteenths: sixteenths / 16.0)


def vectors_of(num_nodes, num_units, dim=16, seed=0, dtype=np.float64):
    """Uniform, centred over all nodes, of length 1: the synthetic set-up of the paper."""
    vectors = np.random.default_rng(seed).random((num_nodes, num_units, dim))
    vectors -= vectors.mean(axis=(0, 1))
    return (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(dtype)


def shuffled(num_nodes, num_units, seed=1):
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(num_units) for _ in range(num_nodes)])


def next_orders(vectors, orders):
    """One epoch of Algorithm 4 by the functions under test."""
    num_nodes, num_units, dim = vectors.shape
    visited = np.take_along_axis(vectors, orders[:, :, None], axis=1)
    even = num_units // 2 * 2
    diffs = (visited[:, 0:even:2] - visited[:, 1:even:2]).swapaxes(0, 1)
    _, signs = pair_balance(np.zeros(dim, vectors.dtype), diffs.reshape(-1, dim))
    per_node = signs.reshape(-1, num_nodes).T
    return np.array([reorder(o, unit_signs(s, num_units)) for o, s in zip(orders, per_node)])  # noqa: B905


class Oracle:
    """Algorithms 1, 2 and 4 in plain Python, by two pointers per node; mistakes on request."""

    def __init__(self, vectors, orders, mistake=""):
        self.vectors = [[[float(x) for x in unit] for unit in node] for node in vectors]
        self.orders, self.mistake = [list(map(int, order)) for order in orders], mistake
        self.total = [0.0] * vectors.shape[2]

    def epoch(self):
        nodes, units = range(len(self.orders)), len(self.orders[0])
        if self.mistake != "sum kept over epochs":
            self.total = [0.0] * len(self.total)
        slots = [[None] * units for _ in nodes]
        left, right = [0] * len(slots), [units - 1] * len(slots)
        steps = [(p, i) for p in range(0, units - 1, 2) for i in nodes]
        if self.mistake == "node by node":
            steps.sort(key=lambda step: step[1])
        for p, i in steps:
            first, second = self.orders[i][p], self.orders[i][p + 1]
            if self.sign(self.vectors[i][first], self.vectors[i][second]) < 0:
                first, second = second, first
            slots[i][left[i]], slots[i][right[i]] = first, second
            left[i], right[i] = left[i] + 1, right[i] - 1
        for i in nodes:
            if units % 2:
                slots[i][left[i]] = self.orders[i][-1]
            if self.mistake == "back half not reversed":
                slots[i][right[i] + 1 :] = slots[i][: right[i] : -1]
            if self.mistake == "signs on the identity":
                place = {unit: position for position, unit in enumerate(self.orders[i])}
                slots[i] = [place[unit] for unit in slots[i]]
        self.orders = slots
        return slots

    def sign(self, first, second):
        if self.mistake == "aliased":  # the second gradient has overwritten the first
            first = second
        diff = [a - b for a, b in zip(first, second)]  # noqa: B905
        product = fsum(r * z for r, z in zip(self.total, diff))  # noqa: B905
        plus = product < 0 if self.mistake == "tie is minus" else product <= 0
        if self.mistake == "rule inverted":
            plus = product >= 0
        sign = 1 if plus else -1
        self.total = [r + sign * z for r, z in zip(self.total, diff)]  # noqa: B905
        return sign


# --- signs -------------------------------------------------------------------------


def test_signs_by_hand():
    total, signs = pair_balance(np.zeros(2), np.array([[1.0, 0], [3, 0], [0, 1], [1, 1]]))
    # 0 -> (1,0); <r,z>=3 -> minus: (-2,0); 0 -> (-2,1); <r,z>=-1 -> plus: (-1,2)
    assert signs.tolist() == [1, -1, 1, 1]
    assert signs.dtype == np.int8
    assert total.tolist() == [-1.0, 2.0]


def test_a_tie_is_plus_one():
    assert pair_balance(np.zeros(3), np.ones((1, 3)))[1].tolist() == [1]
    assert pair_balance([1.0, 0.0], [[0.0, -2.0]])[1].tolist() == [1]


@given(diffs_of_5, arrays(np.float64, 5, elements=st.floats(-4, 4)))
def test_each_sign_gives_the_shorter_sum(diffs, start):
    total, signs = pair_balance(start, diffs)
    r = start.copy()
    for sign, z in zip(signs, diffs, strict=True):
        assert np.linalg.norm(r + sign * z) <= np.linalg.norm(r - sign * z) + 1e-9
        r += sign * z
    np.testing.assert_allclose(total, r, atol=1e-12)


@given(diffs_of_5, st.sampled_from([2.0**-20, 0.5, 8.0, 2.0**40]))
def test_scale_does_not_matter(diffs, scale):
    _, signs = pair_balance(np.zeros(5), diffs)
    assert np.array_equal(signs, pair_balance(np.zeros(5), diffs * scale)[1])
    assert np.array_equal(signs, pair_balance(np.zeros(5), -diffs)[1])  # flips the sum as well


def test_steps_one_by_one_equal_all_at_once():
    diffs = np.random.default_rng(0).standard_normal((60, 4, 7))
    whole, signs = pair_balance(np.zeros(7), diffs.reshape(-1, 7))
    total, parts = np.zeros(7), []
    for step in diffs:
        total, part = pair_balance(total, step)
        parts += part.tolist()
    assert parts == signs.tolist()
    assert np.array_equal(total, whole)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inputs_are_left_as_they_were_and_types_are_kept(dtype):
    start, diffs = np.ones(3, dtype), np.full((4, 3), 2, dtype)
    start.setflags(write=False)
    diffs.setflags(write=False)
    total, _ = pair_balance(start, diffs)
    assert total.dtype == dtype
    assert not np.shares_memory(total, start)
    assert pair_balance(np.zeros(3, np.float16), diffs.astype(np.float16))[0].dtype == np.float32


# --- the whole algorithm against the oracle ------------------------------------------

SHAPES = [(1, 8, 3), (2, 7, 5), (4, 64, 16), (16, 32, 2), (3, 33, 40)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orders_are_the_oracles(shape, dtype):
    vectors, orders = vectors_of(*shape, dtype=dtype), shuffled(*shape[:2])
    oracle = Oracle(vectors, orders)
    for _ in range(8):
        orders = next_orders(vectors, orders)
        assert orders.tolist() == oracle.epoch()


@pytest.mark.parametrize(
    "mistake",
    [
        "back half not reversed",
        "sum kept over epochs",
        "node by node",
        "signs on the identity",
        "aliased",
        "rule inverted",
        "tie is minus",
    ],
)
def test_each_known_mistake_gives_other_orders(mistake):
    """So that the test above would notice it; a loose bound would miss the first two."""
    vectors, orders = vectors_of(4, 64), shuffled(4, 64)
    right, wrong = Oracle(vectors, orders), Oracle(vectors, orders, mistake)
    assert any(right.epoch() != wrong.epoch() for _ in range(2))


def test_the_bound_halves_to_a_floor_that_no_number_of_nodes_raises():
    vectors, orders = vectors_of(16, 1024), shuffled(16, 1024)
    apart = orders.copy()
    bounds = [herding_bound(vectors, orders)]
    for _ in range(8):
        orders = next_orders(vectors, orders)
        apart = np.concatenate([next_orders(v[None], o[None]) for v, o in zip(vectors, apart)])  # noqa: B905
        bounds.append(herding_bound(vectors, orders))
    assert 0.4 < bounds[1] / bounds[0] < 0.6
    assert bounds[-1] < 3.0
    assert bounds[-1] < 0.45 * herding_bound(vectors, apart)


def test_an_odd_number_of_units_costs_nothing():
    bounds = []
    for num_units in (256, 255):
        vectors, orders = vectors_of(8, num_units), shuffled(8, num_units)
        for _ in range(8):
            orders = next_orders(vectors, orders)
        bounds.append(herding_bound(vectors, orders))
    assert bounds[1] < 1.5 * bounds[0]


# --- the walk ------------------------------------------------------------------------


def test_the_walk_draws_with_the_stated_chance():
    start, diffs = np.array([2.0, 0.0]), np.array([[0.5, 0.3]])
    rng = np.random.default_rng(0)
    plus = np.mean([self_balancing_walk(start, diffs, rng, c=4.0)[1][0] > 0 for _ in range(4000)])
    assert plus == pytest.approx(0.5 - 1.0 / 8.0, abs=4 * np.sqrt(0.375 * 0.625 / 4000))


def test_the_walk_clips_its_chances():
    rng = np.random.default_rng(0)
    for _ in range(200):
        assert self_balancing_walk([50.0], [[1.0]], rng)[1].tolist() == [-1]
        assert self_balancing_walk([-50.0], [[1.0]], rng)[1].tolist() == [1]


def test_the_walk_sums_what_it_signs_and_repeats_with_its_seed():
    diffs = np.random.default_rng(1).standard_normal((50, 6))
    total, signs = self_balancing_walk(np.zeros(6), diffs, np.random.default_rng(2))
    again = self_balancing_walk(np.zeros(6), diffs, np.random.default_rng(2))[1]
    np.testing.assert_allclose(total, signs @ diffs, atol=1e-12)
    assert np.array_equal(signs, again)
    assert 0 < (signs > 0).sum() < 50


# --- orders --------------------------------------------------------------------------


def test_reorder_by_hand():
    # front: 4, 1 as visited; back: 0, 3, 2 reversed
    assert reorder([4, 0, 3, 1, 2], [1, -1, -1, 1, -1]).tolist() == [4, 1, 2, 3, 0]


@given(st.integers(1, 40), st.randoms())
def test_reorder_is_the_two_pointer_form(num_units, random):
    order = random.sample(range(num_units), num_units)
    pairs = [random.choice([-1, 1]) for _ in range(num_units // 2)]
    slots, left, right = [None] * num_units, 0, num_units - 1
    for sign, first, second in zip(pairs, order[::2], order[1::2], strict=False):
        slots[left], slots[right] = (first, second) if sign > 0 else (second, first)
        left, right = left + 1, right - 1
    if num_units % 2:
        assert left == right
        slots[left] = order[-1]
    assert reorder(order, unit_signs(pairs, num_units)).tolist() == slots


def test_a_lone_last_unit_is_not_last_twice():
    order = np.arange(5)
    following = reorder(order, unit_signs([1, -1], 5))
    assert following[2] == 4
    assert following[-1] != 4


# --- the bound -----------------------------------------------------------------------


def test_herding_bound_by_hand():
    vectors = np.array([[[1.0], [3.0]], [[0.0], [4.0]]])  # mean 2
    assert herding_bound(vectors, [[0, 1], [0, 1]]) == 3.0  # (1-2) + (0-2)
    assert herding_bound(vectors, [[0, 1], [1, 0]]) == 1.0  # (1-2) + (4-2)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_herding_bound_is_equation_8(num_nodes, num_units, dim, seed):
    vectors = np.random.default_rng(seed).standard_normal((num_nodes, num_units, dim))
    orders = shuffled(num_nodes, num_units, seed)
    mean, worst = vectors.mean(axis=(0, 1)), 0.0
    for last in range(num_units):
        prefix = np.zeros(dim)
        for i in range(num_nodes):
            for j in range(last + 1):
                prefix += vectors[i, orders[i, j]] - mean
        worst = max(worst, np.abs(prefix).max())
    assert herding_bound(vectors, orders) == pytest.approx(worst, abs=1e-9)


def test_relative_herding_knows_no_scale_and_no_shift():
    rng = np.random.default_rng(0)
    passes = [rng.standard_normal((n, 3)) for n in (6, 6, 4)]
    centred = [p - p.mean(axis=0) for p in passes]
    usual = np.sqrt(np.mean([np.sum(row**2) for p in centred for row in p]))
    prefixes = [sum(p[:l].sum(axis=0) for p in centred) for l in range(1, 7)]  # noqa: E741
    expected = max(np.linalg.norm(prefix) for prefix in prefixes) / usual
    assert relative_herding(passes) == pytest.approx(expected)
    moved = [1e-6 * (p + i) for i, p in enumerate(passes)]
    assert relative_herding(moved) == pytest.approx(expected)
    assert relative_herding([np.ones((4, 2))]) == 0.0


# --- errors --------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pair_balance(np.zeros(2), np.zeros((3, 4))), r"pair_diffs must have shape"),
        (lambda: pair_balance(np.zeros(2), np.zeros(2)), r"pair_diffs must have shape"),
        (lambda: pair_balance(np.zeros((2, 2)), np.zeros((2, 2))), r"pair_diffs must have shape"),
        (lambda: pair_balance(np.zeros(2), [[0.0, NAN]]), "pair_diffs must be finite"),
        (lambda: pair_balance(np.zeros(2), [[INF, 0], [1, 1]]), "pair_diffs must be finite"),
        (lambda: pair_balance([NAN, 0], [[1.0, 0]]), "pair_diffs must be finite"),
        (
            lambda: self_balancing_walk([0.0], [[NAN]], np.random.default_rng(0)),
            "pair_diffs must be finite",
        ),
        (
            lambda: self_balancing_walk([0.0], [[1.0]], np.random.default_rng(0), c=0),
            "c must be positive, got 0",
        ),
        (
            lambda: self_balancing_walk([0.0], [[1.0]], np.random.default_rng(0), c=NAN),
            "c must be positive, got nan",
        ),
        (lambda: reorder([0, 1, 1], [1, 1, 1]), r"order must be a permutation of range\(3\)"),
        (lambda: reorder([0, 1, 3], [1, 1, 1]), "order must be a permutation"),
        (lambda: reorder([0, -1], [1, 1]), "order must be a permutation"),
        (lambda: reorder([0.0, 1.0], [1, 1]), "order must be a permutation"),
        (lambda: reorder([[0, 1]], [[1, 1]]), "order must be a permutation"),
        (lambda: reorder([0, 1], [1, 0]), "signs must hold"),
        (lambda: reorder([0, 1], [1]), "signs must hold"),
        (lambda: unit_signs([1, 1], 6), r"pair_signs must have shape \(3,\)"),
        (lambda: herding_bound(np.zeros((2, 3)), [[0, 1, 2]]), "orders must have shape"),
        (lambda: herding_bound(np.zeros((2, 3, 1)), [[0, 1, 2]]), "orders must have shape"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
