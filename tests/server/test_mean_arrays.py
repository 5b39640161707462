import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common.constant import SType
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.server.aggregate import keep_dtypes, mean_arrays, weighted_mean


def record(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {"conv": (4, 3, 3), "bias": (4,), "scale": (), "none": (0, 2)}
    return ArrayRecord(
        {k: Array(np.asarray(rng.standard_normal(s), dtype)) for k, s in shapes.items()}
    )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_equals_flowers_own_mean(weights):
    records = [record(seed) for seed in range(len(weights))]
    contents = [
        RecordDict({"arrays": one, "metrics": MetricRecord({"w": weight})})
        for one, weight in zip(records, weights, strict=True)
    ]
    theirs = aggregate_arrayrecords(contents, "w")
    ours = mean_arrays(records, weights, like=records[0])
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), rtol=1e-5, atol=1e-7)


def test_the_bytes_are_those_that_numpy_writes():
    records = [record(seed) for seed in range(3)]
    mean = mean_arrays(records, [1, 2, 3], like=records[0])
    for name, array in mean.items():
        stream = io.BytesIO()
        values = weighted_mean([one[name].numpy() for one in records], [1, 2, 3])
        np.save(stream, values)
        assert array.data == stream.getvalue()
        assert (array.dtype, array.shape) == ("float32", values.shape)
        assert array.stype == SType.NUMPY


def test_a_reply_in_another_precision_or_order_is_read_as_what_was_sent():
    sent = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "n": Array(np.array(4))})
    values = np.arange(6.0).reshape(2, 3)
    wide = ArrayRecord({"w": Array(np.asfortranarray(values)), "n": Array(np.array(6.0))})
    mean = mean_arrays([sent, wide], [1, 1], like=sent)
    assert {name: mean[name].dtype for name in mean} == {"w": "float32", "n": "int64"}
    np.testing.assert_array_equal(mean["w"].numpy(), values / 2)
    assert mean["n"].numpy() == 5


def test_keep_dtypes_leaves_what_fits_and_what_is_unknown():
    like = ArrayRecord({"n": Array(np.array([1, 2])), "w": Array(np.ones(2, np.float32))})
    arrays = ArrayRecord(
        {
            "n": Array(np.array([1.5, 2.4])),
            "w": Array(np.full(2, 0.5)),
            "new": Array(np.array([0.5])),
        }
    )
    kept = keep_dtypes(arrays, like)
    assert {name: kept[name].dtype for name in kept} == {
        "n": "int64",
        "w": "float32",
        "new": "float64",
    }
    assert kept["n"].numpy().tolist() == [2, 2]


def test_no_replies_are_an_error():
    with pytest.raises((ValueError, IndexError)):
        mean_arrays([], [], like=record(0))
