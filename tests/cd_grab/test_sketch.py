"""Linear sketches and what goes over the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.cd_grab.gradients import fold, random_signs, sketch
from flwr_hetero.cd_grab.wire import (
    pack_order,
    pack_signs,
    pack_vectors,
    unpack_order,
    unpack_signs,
    unpack_vectors,
)

# --- the sketch ----------------------------------------------------------------------


def test_signs_never_change():
    """Nodes with different versions of this package and of NumPy must agree on them."""
    assert random_signs(16, seed=0).tolist() == [
        -1, 1, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, 1, -1,
    ]  # fmt: skip
    assert random_signs(100, seed=0)[:16].tolist() == random_signs(16, seed=0).tolist()
    assert random_signs(64, seed=1).tolist() != random_signs(64, seed=2).tolist()


def test_signs_are_fair():
    assert abs(random_signs(100_000, seed=5).mean()) < 4 / np.sqrt(100_000)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9))
def test_sketch_is_the_sum_over_each_remainder(dim, size, seed):
    vector = np.random.default_rng(seed).standard_normal(dim)
    signs, slow = random_signs(dim, seed), np.zeros(min(size, dim))
    for j in range(dim):
        slow[j % size] += signs[j] * vector[j]
    np.testing.assert_allclose(sketch(vector, size, seed), slow, atol=1e-12)


def test_sketch_is_linear_and_keeps_type_and_batch():
    a, b = np.random.default_rng(0).standard_normal((2, 3, 50)).astype(np.float32)
    both = sketch(a - b, 8, seed=1)
    np.testing.assert_allclose(both, sketch(a, 8, 1) - sketch(b, 8, 1), atol=1e-5)
    assert both.shape == (3, 8)
    assert both.dtype == np.float32


def test_inner_products_are_kept_to_one_over_the_root_of_size():
    rng, size = np.random.default_rng(0), 64
    a, b = rng.standard_normal((2, 1000))
    a, b = a / np.linalg.norm(a), 0.6 * a / np.linalg.norm(a) + 0.8 * b / np.linalg.norm(b)
    products = [sketch(a, size, s) @ sketch(b, size, s) for s in range(400)]
    assert np.mean(products) == pytest.approx(a @ b, abs=4 * np.std(products) / 20)
    assert 0.5 < np.std(products) * np.sqrt(size) < 2.0


def test_a_short_vector_is_kept_exactly():
    a, b = np.random.default_rng(0).standard_normal((2, 30))
    assert sketch(a, 64, 0) @ sketch(b, 64, 0) == pytest.approx(a @ b)


def test_folding_a_sketch_is_a_shorter_sketch():
    vector = np.random.default_rng(0).standard_normal(777)
    np.testing.assert_allclose(fold(sketch(vector, 64, 3), 16), sketch(vector, 16, 3), atol=1e-9)


# --- the wire ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "accuracy"), [("float16", 1e-3), ("float32", 1e-7)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_vectors_survive_the_wire_at_any_scale(dtype, accuracy, scale):
    vectors = (np.random.default_rng(0).standard_normal((5, 7)) * scale).astype(np.float32)
    back = unpack_vectors(*pack_vectors(vectors, dtype), dim=7, dtype=dtype)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, vectors, atol=accuracy * np.abs(vectors).max())


def test_exact_types_are_exact():
    for dtype in ("float32", "float64"):
        vectors = np.random.default_rng(0).standard_normal((3, 4)).astype(dtype)
        back = unpack_vectors(*pack_vectors(vectors, dtype), dim=4, dtype=dtype)
        assert back.dtype == dtype
        assert np.array_equal(back, vectors)


@given(st.lists(st.sampled_from([-1, 1]), max_size=40))
def test_signs_survive_the_wire(signs):
    data = pack_signs(signs)
    assert len(data) == -(-len(signs) // 8)
    assert unpack_signs(data, len(signs)).tolist() == signs


@given(st.integers(1, 40), st.randoms())
def test_orders_survive_the_wire(num_units, random):
    order = random.sample(range(num_units), num_units)
    assert unpack_order(pack_order(order), num_units).tolist() == order


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fold(np.zeros(4), 0), "size must be at least 1, got 0"),
        (lambda: random_signs(-1, 0), "dim, seed must be at least 0"),
        (lambda: unpack_vectors(bytes(6), 1.0, dim=2), "whole rows of 2 float16, got 6 bytes"),
        (lambda: unpack_vectors(bytes(8), 1.0, dim=0), "whole rows of 0"),
        (lambda: unpack_vectors(bytes(8), 1.0, dim=2, dtype="int8"), "dtype must be one of"),
        (lambda: unpack_vectors(bytes(8), float("nan"), dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(bytes(8), -1.0, dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(b"\xff\x7f\0\0", 1.0, dim=2), "vectors must be finite"),
        (lambda: unpack_vectors(bytes(8) + b"\0\x3c", 1e39, dim=1), "vectors must be finite"),
        (lambda: unpack_signs(b"\0", 9), "signs must be 2 bytes for 9 pairs"),
        (lambda: unpack_order(bytes(8), 3), "order must be 12 bytes for 3 units"),
        (lambda: unpack_order(bytes(8), 2), "order must be a permutation"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
