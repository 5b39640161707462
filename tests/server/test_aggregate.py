"""Models: read where they lie, checked, and averaged in place."""

import io
import re

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flwr_hetero.exchange.aggregate import (
    check_arrays,
    keep_dtypes,
    mean_arrays,
    model_norms,
    normalised,
    weighted_mean,
)
from flwr_hetero.records import MovedArray, mixed, view_array


def mean_of(models, weights):
    """Average NumPy arrays, whatever their order in memory."""
    readers = [model.reshape(-1).__getitem__ for model in models]
    mean = weighted_mean(readers, weights, models[0].dtype, models[0].size)
    return mean.reshape(models[0].shape)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("shape", [(0,), (), (30, 7)])
def test_weighted_mean(dtype, shape):
    rng = np.random.default_rng(0)
    models = [np.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]
    mean = mean_of(models, [5, 1, 0, 2])
    wide = [model.astype(np.result_type(dtype, np.float64)) for model in models]
    exact = np.average(wide, axis=0, weights=[5, 1, 0, 2])
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean, exact, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_integers_round_masks_vote_and_half_precision_sums_in_single():
    assert mean_of([np.array(320), np.array(11)], [32, 1]) == 311
    mask = mean_of([np.array([True, False]), np.array([False, False])], [2, 1])
    assert (mask.tolist(), mask.dtype) == ([True, False], bool)
    models = [np.full(3, value, np.float16) for value in np.linspace(1, 2, 60)]
    exact = np.float16(np.mean([model[0] for model in models], dtype=np.float64))
    np.testing.assert_array_equal(mean_of(models, np.ones(60)), exact)


@pytest.mark.parametrize("weights", [[1.0, float("nan")], [2.0, -1.0], [0.0, 0.0], [], [[1.0]]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be finite, at least 0 and of positive sum"):
        normalised(weights)


def test_mean_arrays_equals_flowers_and_numpys():
    shapes = {"conv": (4, 3, 3), "bias": (4,), "scale": (), "none": (0, 2)}
    weights = [3, 1, 96]
    rng = np.random.default_rng(0)
    records = [
        ArrayRecord({k: Array(np.asarray(rng.random(s), np.float32)) for k, s in shapes.items()})
        for _ in weights
    ]
    contents = [
        RecordDict({"arrays": one, "metrics": MetricRecord({"w": weight})})
        for one, weight in zip(records, weights, strict=True)
    ]
    theirs = aggregate_arrayrecords(contents, "w")
    ours = mean_arrays(records, weights, like=records[0])
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(array.numpy(), theirs[name].numpy(), rtol=1e-5, atol=1e-7)
        values = mean_of([one[name].numpy() for one in records], weights)
        file = io.BytesIO()
        np.save(file, values)
        assert array.data == file.getvalue()


def test_a_mean_has_the_type_and_order_that_were_sent():
    values = np.arange(6.0).reshape(2, 3)
    sent = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "n": Array(np.array(4))})
    wide = ArrayRecord({"w": Array(np.asfortranarray(values)), "n": Array(np.array(6.0))})
    mean = mean_arrays([sent, wide], [1, 1], like=sent)
    assert {name: mean[name].dtype for name in mean} == {"w": "float32", "n": "int64"}
    np.testing.assert_array_equal(mean["w"].numpy(), values / 2)
    assert mean["n"].numpy() == 5
    like = ArrayRecord({"n": Array(np.array([1, 2])), "w": Array(np.ones(2, np.float32))})
    means = {"n": np.array([1.5, 2.4]), "w": np.full(2, 0.5), "new": np.array([0.5])}
    kept = keep_dtypes(ArrayRecord({name: Array(mean) for name, mean in means.items()}), like)
    types = {"n": "int64", "w": "float32", "new": "float64"}
    assert {name: kept[name].dtype for name in kept} == types
    assert kept["n"].numpy().tolist() == [2, 2]


def test_blocks_change_nothing_and_neither_does_what_a_node_says_of_an_array(monkeypatch):
    rng = np.random.default_rng(0)
    base, start, *ends = (rng.standard_normal((7, 5)).astype(np.float32) for _ in range(4))
    lying = [Array("banana", (3,), "numpy.ndarray", Array(end).data) for end in ends]

    def both():
        models = []
        for end in lying:
            shortened = MovedArray(Array(start), Array(start), end, 0.5)
            models.append(ArrayRecord({"w": MovedArray(Array(base), Array(start), shortened, 0.3)}))
        mean = mean_arrays(models, [3, 1], like=ArrayRecord({"w": Array(base)}))
        moved = models[0]["w"].numpy()
        return mean["w"].numpy(), moved, mixed(base, start, 0.2), model_norms(models[0], models[1])

    whole = both()
    monkeypatch.setattr("flwr_hetero.records.BLOCK", 4)
    for found, expected in zip(both()[:3], whole[:3], strict=True):
        assert found.shape == (7, 5)
        np.testing.assert_array_equal(found, expected)
    assert both()[3] == pytest.approx(whole[3])
    expected = base + 0.15 * (0.75 * ends[0] + 0.25 * ends[1] - start)
    np.testing.assert_allclose(whole[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "values", "reason"),
    [
        ("float32", np.full((2, 3), 9e14, np.float32), None),  # as much as may be
        ("float32", np.full((2, 3), -1e38, np.float32), "holds values above 1e+15"),
        ("float32", np.full((2, 3), 2e15, np.float64), "holds values above 1e+15"),
        ("int64", np.full((2, 3), 1e30), "holds values above 1e+15"),
        ("float16", np.full((2, 3), -70000), "holds figures too large for float16"),
        ("int32", np.full((2, 3), 1e12), "holds figures too large for int32"),
        ("int64", np.full((2, 3), 3e9), "holds integers more than 2147483648 from those sent"),
        ("float32", np.full((2, 3), np.inf, np.float16), "NaN or infinity"),
        ("float32", np.zeros((3, 2), np.float32), "shape"),
        ("float32", np.array([["a"] * 3] * 2), "cannot be averaged"),
        *((m, np.eye(2, 3, dtype=k), None) for m in ("f2", "f4", "f8", "i8", "?") for k in "fdl?"),
    ],
)
def test_arrays_are_checked(model, values, reason):
    sent = ArrayRecord({"w": Array(np.zeros((2, 3), model))})
    given = ArrayRecord({"w": Array(values)})
    if reason is None:
        check_arrays(given, sent)
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            check_arrays(given, sent)


def test_arrays_are_viewed_as_they_are_and_never_unpickled():
    for values in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)), np.zeros((0, 2))):
        assert np.array_equal(view_array(Array(values)), values)
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        view_array(Array("object", (1,), "numpy.ndarray", stream.getvalue()))


def whole(**changes: str) -> str:
    entries = {"descr": "'<f4'", "fortran_order": "False", "shape": "(4,)"} | changes
    return "{" + ", ".join(f"'{key}': {value}" for key, value in entries.items()) + "}\n"


HEADERS = {
    "unclosed bracket": "{'descr': '<f4', 'shape': (4,",
    "unclosed quote": whole() + "'''",
    "nested too deeply": "(" * 3000,
    "long minus": "-" * 9000 + "1",
    "negative length": whole(shape="(-4,)"),
    "unhashable key": "{[]: 1}",
    "negative among others": whole(shape="(-2, -2)"),
    "more than there is": whole(shape="(5,)"),
}


@pytest.mark.parametrize("header", sorted(HEADERS))
def test_broken_header_is_a_bad_reply(header):
    start = len(HEADERS[header]).to_bytes(2, "little") + HEADERS[header].encode()
    data = np.lib.format.magic(1, 0) + start + bytes(16)
    broken = ArrayRecord({"w": Array("float32", (4,), "numpy.ndarray", data)})
    sent = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    with pytest.raises(ValueError, match=r"array 'w' cannot be read \("):
        check_arrays(broken, sent)
