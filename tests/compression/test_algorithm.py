"""The codec: bounds of its errors, and what it does with bytes that it has not written."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_hetero import keys
from flwr_hetero.compression import wire
from flwr_hetero.compression.algorithm import (
    BITS,
    BLOCK,
    TINY,
    decode,
    encode,
    encoded_size,
    highest_code,
    with_error,
)

NAN = float("nan")
INF = float("inf")
COUNTS = st.integers(0, 3 * BLOCK + 1)
SHAPES = st.lists(st.integers(-1, 10**12), max_size=3).map(tuple)
SENT = {
    "w": Array(np.ones((10, 30), np.float32)),
    "half": Array(np.ones(300, np.float16)),
    "small": Array(np.ones(255, np.float32)),
    "count": Array(np.arange(300)),
}


def blocks_of(values):
    flat = np.asarray(values, np.float64).reshape(-1)
    return np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def drawn(count, seed, spread=25):
    """Draw values of as many magnitudes, each block's about alike."""
    rng = np.random.default_rng(seed)
    powers = np.repeat(10.0 ** rng.uniform(-spread, spread, -(-count // BLOCK)), BLOCK)[:count]
    return (rng.normal(size=count) * powers).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@given(count=COUNTS, seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_each_value_is_within_half_a_step(bits, count, seed):
    values = drawn(count, seed)
    data = encode(values, bits)
    decoded = decode(data, count, bits)
    assert len(data) == encoded_size(count, bits)
    assert (decoded.dtype, decoded.shape) == (np.float32, (count,))
    # a scale is rounded up to 8 bits
    steps = np.abs(blocks_of(values)).max(axis=1) * (1 + 2**-7) / (highest_code(bits) / 2)
    off = np.abs(blocks_of(values) - blocks_of(decoded))
    assert (off <= steps[:, np.newaxis] * 0.5001).all()


@pytest.mark.parametrize("bits", BITS)
@given(count=COUNTS, seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_no_longer_is_never_longer(bits, count, seed):
    values = drawn(count, seed)
    decoded = decode(encode(values, bits, no_longer=True), count, bits)
    lengths = [np.linalg.norm(blocks_of(each), axis=1) for each in (decoded, values)]
    assert (lengths[0] <= lengths[1]).all()
    assert not count or lengths[0].any()


def test_without_no_longer_blocks_do_become_longer():
    values = np.full(BLOCK, 0.6, np.float32)
    values[0] = 1.0
    assert np.linalg.norm(decode(encode(values, 2), BLOCK, 2)) > 1.5 * np.linalg.norm(values)


@pytest.mark.parametrize("bits", BITS)
def test_with_feedback_the_updates_sum_up(bits):
    rng = np.random.default_rng(bits)
    drift = rng.normal(size=500).astype(np.float32)
    error = None
    true = np.zeros(500)
    alone = np.zeros(500)
    received = np.zeros(500)
    for _ in range(60):
        update = (drift + 0.1 * rng.normal(size=500)).astype(np.float32)
        owed = with_error(update, np.zeros_like(update), error)
        sent = decode(encode(owed, bits), 500, bits)
        error = (owed - sent).astype(np.float32)
        true += update
        received += sent
        alone += decode(encode(update, bits), 500, bits)
    step = np.abs(blocks_of(owed)).max(axis=1) * (1 + 2**-7) / (highest_code(bits) / 2)
    assert (np.abs(blocks_of(received - true)) <= step[:, np.newaxis]).all()
    # what is lost without it
    assert np.abs(alone - true).max() > 2 * np.abs(received - true).max()


@pytest.mark.parametrize("bits", BITS)
def test_extremes(bits):
    for values in (np.zeros(70), np.full(70, TINY), -np.full(70, TINY)):
        assert not decode(encode(values, bits), 70, bits).any()
    most = np.array([3.2e38, -3.2e38], np.float32)
    np.testing.assert_allclose(decode(encode(most, bits), 2, bits), most, rtol=2**-7)
    for bad in (NAN, INF, -INF, 3.4e38, -3.4e38, 1e39):
        with pytest.raises(ValueError, match="be finite"):
            encode(np.array([0.0] * 64 + [bad]), bits)


@given(
    name=st.sampled_from([*SENT, "unknown"]),
    stype=st.sampled_from([*wire.STYPES]),
    shape=SHAPES,
    dtype=st.sampled_from(["float32", "float64", "int8", "O", "nonsense"]),
    data=st.one_of(
        st.binary(max_size=300), st.sampled_from(BITS).map(lambda b: encode(np.ones(300), b))
    ),
    asked=st.sampled_from([*BITS, None]),
)
@settings(max_examples=100)
def test_a_strange_array_becomes_one_like_that_sent_or_a_value_error(
    name, stype, shape, dtype, data, asked
):
    reply = ArrayRecord({name: Array(dtype, shape, stype, data)})
    try:
        decoded = wire.restored(reply, SENT, asked)[name]
    except ValueError:
        return
    assert wire.STYPES[stype] == asked
    assert (decoded.dtype, tuple(decoded.shape)) == (SENT[name].dtype, tuple(SENT[name].shape))
    assert np.isfinite(decoded.numpy()).all()


def test_no_reply_takes_more_memory_than_the_model():
    data = bytes(encoded_size(10**8, 4))
    replies = [
        ArrayRecord({"w": Array("float32", (10**12,), keys.PACKED + "4", b"\0")}),
        ArrayRecord({"w": Array("float32", (10**8,), keys.PACKED + "4", data)}),
        ArrayRecord({"w": Array("float32", (10, 30), keys.PACKED + "4", data)}),
    ]
    tracemalloc.start()
    for reply in replies:
        with pytest.raises(ValueError, match="packed array 'w' holds"):
            wire.restored(reply, SENT, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_what_is_packed_and_what_stays_as_it_is():
    model = dict(SENT)
    model["bn.running_var"] = model["bn.running_mean"] = Array(np.ones(300, np.float32))
    model["double"] = Array(np.linspace(0, 1, 300))
    packed = wire.packed(ArrayRecord(model), 4)
    assert {n for n, a in packed.items() if a.stype in wire.STYPES} == {"w", "half", "double"}
    whole = wire.unpacked(packed)
    for name, array in model.items():
        assert (whole[name].dtype, tuple(whole[name].shape)) == (array.dtype, tuple(array.shape))
        np.testing.assert_allclose(whole[name].numpy(), array.numpy(), atol=0.5 * 1.01 / 7)
    for name in {*model} - {"w", "half", "double"}:
        assert packed[name].data == model[name].data
