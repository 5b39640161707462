import io
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import SType
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.server.aggregate import (
    CHUNK,
    keep_dtypes,
    mean_arrays,
    normalised,
    weighted_mean,
)
from flwr_hetero.server.context import Exchange, Fleet
from flwr_hetero.server.rounds import MAX_NODES, by_node


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("size", [0, CHUNK, 2 * CHUNK + 7])
def test_weighted_mean_in_chunks(dtype, size):
    rng = np.random.default_rng(size)
    models = [rng.standard_normal(size).astype(dtype) for _ in range(4)]
    mean = weighted_mean(models, [5, 1, 0, 2])
    wide = [model.astype(np.result_type(dtype, np.float64)) for model in models]
    exact = np.average(wide, axis=0, weights=[5, 1, 0, 2])
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean, exact, rtol=0, atol=8 * np.finfo(dtype).eps)


def test_integers_round_and_masks_vote():
    assert weighted_mean([np.array(320), np.array(11)], [32, 1]) == 311
    mask = weighted_mean([np.array([True, False]), np.array([False, False])], [2, 1])
    assert (mask.tolist(), mask.dtype) == ([True, False], bool)


def test_any_memory_and_byte_order_is_read():
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    mean = weighted_mean([plain, np.asfortranarray(plain), plain.astype(">f4")], [1, 1, 1])
    np.testing.assert_allclose(mean, plain, rtol=1e-6)
    assert mean.dtype == np.float32


def test_half_precision_sums_in_single():
    models = [np.full(3, value, np.float16) for value in np.linspace(1, 2, 60)]
    exact = np.float16(np.mean([model[0] for model in models], dtype=np.float64))
    np.testing.assert_array_equal(weighted_mean(models, np.ones(60)), exact)


def test_extra_memory_is_two_chunks():
    models = [np.ones(500_000, np.float32) for _ in range(8)]
    out = np.empty_like(models[0])
    tracemalloc.start()
    assert weighted_mean(models, range(1, 9), out=out) is out
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * CHUNK * 4


@pytest.mark.parametrize("weights", [[1.0, float("nan")], [2.0, -1.0], [0.0, 0.0], [], [[1.0]]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be finite, at least 0 and of positive sum"):
        normalised(weights)


def test_mean_arrays_equals_flowers_and_numpys():
    shapes, weights = {"conv": (4, 3, 3), "bias": (4,), "scale": (), "none": (0, 2)}, [3, 1, 96]
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
        values, file = weighted_mean([one[name].numpy() for one in records], weights), io.BytesIO()
        np.save(file, values)
        assert array.data == file.getvalue()
        assert (array.dtype, array.shape, array.stype) == ("float32", values.shape, SType.NUMPY)


def test_mean_arrays_has_the_type_that_was_sent():
    sent = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32)), "n": Array(np.array(4))})
    values = np.arange(6.0).reshape(2, 3)
    wide = ArrayRecord({"w": Array(np.asfortranarray(values)), "n": Array(np.array(6.0))})
    mean = mean_arrays([sent, wide], [1, 1], like=sent)
    assert {name: mean[name].dtype for name in mean} == {"w": "float32", "n": "int64"}
    np.testing.assert_array_equal(mean["w"].numpy(), values / 2)
    assert mean["n"].numpy() == 5


def test_keep_dtypes_rounds_what_it_knows():
    like = ArrayRecord({"n": Array(np.array([1, 2])), "w": Array(np.ones(2, np.float32))})
    means = {"n": np.array([1.5, 2.4]), "w": np.full(2, 0.5), "new": np.array([0.5])}
    kept = keep_dtypes(ArrayRecord({name: Array(mean) for name, mean in means.items()}), like)
    types = {"n": "int64", "w": "float32", "new": "float64"}
    assert {name: kept[name].dtype for name in kept} == types
    assert kept["n"].numpy().tolist() == [2, 2]


def evaluated(metric, values):
    be_server_task(1, 1, 1)
    for node, value in enumerate(values):
        message = Message(RecordDict(), node + 1, "evaluate")
        set_message_id(message, str(node))
        metrics = MetricRecord({"num-examples": 1, metric: value})
        yield Message(RecordDict({"metrics": metrics}), reply_to=message)


@pytest.mark.parametrize(
    ("metric", "tenth", "first"),
    [("eval-acc", range(12), "id-1"), ("eval-loss", range(108, 120), "id-120")],
)
def test_by_node_has_mean_and_worst_tenth(metric, tenth, first):
    values = [i / 100 for i in range(120)]
    found = by_node(Exchange(Fleet()), [*evaluated(metric, values)])
    figures = (found["metric"], found["nodes"], found["mean"], found["worst-tenth"])
    assert figures == (metric, 120, pytest.approx(0.595), pytest.approx(np.mean(tenth) / 100))
    assert len(found["by-node"]) == MAX_NODES
    assert next(iter(found["by-node"])) == first


def test_by_node_passes_over_what_is_no_figure():
    replies = [*evaluated("acc", [0.5, float("nan"), 0.7])]
    assert by_node(Exchange(Fleet()), replies)["by-node"] == {"id-1": 0.5, "id-3": 0.7}
    assert by_node(Exchange(Fleet()), [*evaluated("f1", [0.5])]) == {}
    assert by_node(Exchange(Fleet()), []) == {}
