import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_hetero.server.aggregate import CHUNK, normalised, weighted_mean


def test_equation_4_by_hand():
    # (32 * 1 + 32 * 2 + 1 * 10) / 65
    models = [np.full((2, 3), value) for value in (1.0, 2.0, 10.0)]
    np.testing.assert_allclose(weighted_mean(models, [32, 32, 1]), np.full((2, 3), 106 / 65))


@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4)),
        elements=st.floats(-1e6, 1e6),
    ),
    st.data(),
)
def test_equals_numpy_average(stacked, data):
    num_nodes = len(stacked)
    weights = data.draw(st.lists(st.floats(0.1, 100), min_size=num_nodes, max_size=num_nodes))
    expected = np.average(stacked, axis=0, weights=weights)
    np.testing.assert_allclose(
        weighted_mean(list(stacked), weights), expected, rtol=1e-9, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.complex64])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 7])
def test_keeps_precision_across_chunks(dtype, size):
    rng = np.random.default_rng(size)
    models = [rng.standard_normal(size).astype(dtype) for _ in range(4)]
    mean = weighted_mean(models, [5, 1, 0, 2])
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    exact = np.average([model.astype(wide) for model in models], axis=0, weights=[5, 1, 0, 2])
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean, exact, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_integer_and_boolean_buffers_keep_their_dtype():
    steps = weighted_mean([np.array(320), np.array(11)], [32, 1])
    assert steps.dtype == np.int64
    assert steps == round((32 * 320 + 11) / 33)
    mask = weighted_mean([np.array([True, False]), np.array([False, False])], [2, 1])
    assert mask.tolist() == [True, False]
    assert mask.dtype == bool


def test_other_memory_orders_and_byte_orders_are_read():
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    swapped = plain.astype(">f4")
    mean = weighted_mean([plain, np.asfortranarray(plain), swapped], [1, 1, 1])
    np.testing.assert_allclose(mean, plain, rtol=1e-6)
    assert mean.dtype == np.float32


def test_writes_to_out_and_never_to_its_inputs():
    models = [np.ones(10), np.zeros(10)]
    for model in models:
        model.flags.writeable = False
    out = np.full(10, np.nan)
    assert weighted_mean(models, [3, 1], out=out) is out
    assert (out == 0.75).all()


def test_extra_memory_is_the_result_and_two_chunks():
    models = [np.ones(500_000, np.float32) for _ in range(8)]
    out = np.empty_like(models[0])
    tracemalloc.start()
    weighted_mean(models, range(1, 9), out=out)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * CHUNK * 4


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: normalised([1.0, float("nan")]), "weights must be finite"),
        (lambda: normalised([2.0, -1.0]), "weights must be finite and at least 0"),
        (lambda: normalised([0.0, 0.0]), "weights must have a positive sum"),
        (lambda: normalised([]), "weights must have a positive sum"),
        (lambda: weighted_mean([np.ones(2)], [1, 1]), "arrays must be 2, one per weight"),
        (
            lambda: weighted_mean([np.ones(2), np.ones(3)], [1, 1]),
            r"arrays must all be float64 \(2",
        ),
        (lambda: weighted_mean([np.ones(2), np.ones(2, np.float32)], [1, 1]), "arrays must all be"),
        (lambda: weighted_mean([np.ones(2)], [1], out=np.ones(3)), "out must be a C-contiguous"),
        (lambda: weighted_mean([np.ones(2)], [1], out=np.ones(4)[::2]), "out must be a C-contig"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_half_precision_is_added_up_in_single():
    models = [np.full(3, value, np.float16) for value in np.linspace(1, 2, 60)]
    exact = np.float16(np.mean([model[0] for model in models], dtype=np.float64))
    np.testing.assert_array_equal(weighted_mean(models, np.ones(60)), exact)
