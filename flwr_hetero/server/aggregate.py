"""Models of replies: read, checked and averaged in place and in their own precision."""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from logging import ERROR
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY, log
from flwr_hetero.errors import invalid, last_line
from flwr_hetero.records import read_number
from flwr_hetero.server.context import Exchange

CHUNK = 65_536
"""Elements per pass: small enough that the running sum stays in the processor's cache."""
LINEAR = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""Strategies of which we know that replies enter by their weighted mean and by nothing else."""
WEIGHT = keys.PREFIX + "weight"
"""Metric by which a strategy weights models where that is not its own key."""
MAX_VALUE = 1e15
"""Values above this are nonsense, and a mean with them would spoil the next round of all."""
MAX_COUNT_STEP = 2**31
"""Most by which integers may differ from those sent: they are counters."""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How names end of arrays that are no parameters, in torch's batch normalisation."""


def aggregate(
    inner: Strategy,
    leaf: Strategy,
    context: Exchange,
    replies: list[Message],
    weights: list[float],
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate models by these weights, and metrics by its own."""
    drop_partial_metrics(replies)
    number, like = context.round, context.arrays
    if not like or not replies or not isinstance(leaf, FedAvg):
        return inner.aggregate_train(number, replies)
    weigh, own_key = leaf.train_metrics_aggr_fn, leaf.weighted_by_key
    # where only the mean matters it is made in place and goes in as a single reply
    if inner is leaf and type(leaf).aggregate_train in [s.aggregate_train for s in LINEAR]:
        contents = [reply.content for reply in replies]
        mean = mean_reply(replies, weights, like, own_key)
        with replaced(leaf, train_metrics_aggr_fn=lambda *_: weigh(contents, own_key)):
            return leaf.aggregate_train(number, [mean])
    if weights == [weight_of(reply, own_key) for reply in replies]:
        return inner.aggregate_train(number, replies)

    def weigh_metrics(chosen: list[RecordDict], _key: str) -> MetricRecord:
        for content in chosen:
            for metrics in content.metric_records.values():
                metrics.pop(WEIGHT, None)
        return weigh(chosen, own_key)

    # Krum needs each reply, and its mean of the chosen ones is then by these weights
    for reply, weight in zip(replies, weights, strict=True):
        for metrics in reply.content.metric_records.values():
            metrics[WEIGHT] = weight
    with replaced(leaf, weighted_by_key=WEIGHT, train_metrics_aggr_fn=weigh_metrics):
        return inner.aggregate_train(number, replies)


def weight_of(reply: Message, weight_key: str) -> float:
    """Read the weight of a good reply."""
    (metrics,) = reply.content.metric_records.values()
    return float(metrics[weight_key])  # type: ignore[arg-type]


def drop_partial_metrics(replies: Sequence[Message]) -> None:
    """Take out metrics of the protocol that some reply lacks: Flower wants equal names."""
    records = [record for reply in replies for record in reply.content.metric_records.values()]
    for key in keys.PROTOCOL:
        if not all(math.isfinite(read_number(record, key)) for record in records):
            for record in records:
                record.pop(key, None)


@contextmanager
def replaced(strategy: Strategy, **attributes: Any) -> Iterator[None]:
    """Give a strategy other attributes for a while."""
    before = {name: getattr(strategy, name) for name in attributes}
    try:
        vars(strategy).update(attributes)
        yield
    finally:
        vars(strategy).update(before)


def with_update(
    reply: Message,
    start: ArrayRecord,
    base: ArrayRecord,
    scale: float,
    buffers: tuple[str, ...] = BUFFERS,
) -> Message:
    r"""Return a reply whose model is :math:`x_{base} + s \, (x_i - x_{start})`."""
    ((name, arrays),) = reply.content.array_records.items()
    moved = ArrayRecord(dict(arrays.items()))
    for key, end in arrays.items():
        before, after = view_array(start[key]), view_array(end)
        # integers and buffers are averaged, not optimised
        if after.dtype.kind == before.dtype.kind == "f" and not key.endswith(buffers):
            onto = before if base is start else view_array(base[key])
            moved[key] = Array(np.asarray(onto + scale * (after - before), after.dtype))
    content = RecordDict({**reply.content, name: moved})
    return Message(content, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]


# --- means -------------------------------------------------------------------------------


def mean_reply(
    replies: Sequence[Message], weights: ArrayLike, like: ArrayRecord, weight_key: str
) -> Message:
    """Make one reply that holds the weighted mean of the models of several."""
    ((name, _),) = replies[0].content.array_records.items()
    records = [next(iter(reply.content.array_records.values())) for reply in replies]
    content = RecordDict(dict(replies[0].content))
    content[name] = mean_arrays(records, weights, like)
    for metrics_name, metrics in replies[0].content.metric_records.items():
        content[metrics_name] = MetricRecord({**metrics, weight_key: 1})
    return Message(content, metadata=replies[0].metadata)  # type: ignore[call-overload,no-any-return]


def mean_arrays(
    records: Sequence[ArrayRecord], weights: ArrayLike, like: ArrayRecord
) -> ArrayRecord:
    """Average ArrayRecords without unpacking them: read and written where they lie."""
    mean = ArrayRecord()
    for name, array in like.items():
        dtype = np.dtype(array.dtype)
        views = [view_array(record[name]).astype(dtype, copy=False) for record in records]
        mean[name] = Array(str(dtype), views[0].shape, NUMPY, _mean_npy(views, weights))
    return mean


def _mean_npy(views: list[NDArray[Any]], weights: ArrayLike) -> bytes:
    """Write the mean straight into the bytes of an npy file, so that it exists only once."""
    stream, shape, dtype = io.BytesIO(), views[0].shape, views[0].dtype
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    start = stream.tell()
    if views[0].nbytes:
        stream.seek(start + views[0].nbytes - 1)
        stream.write(b"\0")
        with stream.getbuffer() as memory:
            out = np.frombuffer(memory, dtype, offset=start).reshape(shape)
            weighted_mean(views, weights, out=out)
            # or the buffer could not be closed, and getvalue would copy it
            del out
    return stream.getvalue()


def weighted_mean(
    arrays: Sequence[NDArray[Any]], weights: ArrayLike, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Average arrays of one shape and type, into ``out`` (contiguous) if it is given."""
    dtype = arrays[0].dtype.newbyteorder("=")
    mean = np.empty(arrays[0].shape, dtype) if out is None else out
    # half precision is added up in single, integers in double
    wide = np.promote_types(dtype, np.float32) if dtype.kind in "fc" else np.float64
    factors = normalised(weights).astype(wide)
    flat, flat_mean = [array.reshape(-1) for array in arrays], mean.reshape(-1)
    total = np.empty(min(CHUNK, mean.size), factors.dtype)
    term = np.empty_like(total)
    # all nodes chunk by chunk: every input is read once, and two buffers are needed
    for start in range(0, mean.size, CHUNK):
        part = slice(start, min(start + CHUNK, mean.size))
        chunk, term_chunk = total[: part.stop - start], term[: part.stop - start]
        np.multiply(flat[0][part], factors[0], out=chunk)
        for array, factor in zip(flat[1:], factors[1:], strict=True):
            np.multiply(array[part], factor, out=term_chunk)
            np.add(chunk, term_chunk, out=chunk)
        # of masks the majority
        if dtype.kind == "b":
            flat_mean[part] = chunk >= 0.5
        else:
            flat_mean[part] = np.rint(chunk) if dtype.kind in "iu" else chunk
    return mean


def normalised(weights: ArrayLike) -> NDArray[np.float64]:
    """Scale weights so that they sum to 1."""
    share = np.asarray(weights, dtype=np.float64)
    if share.ndim != 1 or not (np.isfinite(share) & (share >= 0)).all() or not share.sum() > 0:
        raise invalid("weights", share.tolist(), "be finite, at least 0 and of positive sum")
    return np.asarray(share / share.sum())


def keep_dtypes(arrays: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """Bring a new model back to the dtypes of the last one; one of no use is replaced by it."""
    if reason := why_no_model(arrays):
        log(ERROR, "the model stays as it was: that of this round holds %s", reason)
        return like
    # averaging makes floats of integers
    for name, array in arrays.items():
        if name in like and array.dtype != like[name].dtype:
            dtype, values = np.dtype(like[name].dtype), array.numpy()
            whole = dtype.kind in "iub" and values.dtype.kind == "f"
            arrays[name] = Array(np.asarray(np.rint(values) if whole else values, dtype))
    return arrays


# --- reading and checking ----------------------------------------------------------------


def view_array(array: Array) -> NDArray[Any]:
    """View an array of a reply without copying its payload and without pickle."""
    # others are for structured types only
    if array.data[6:7] != b"\1":
        raise ValueError("not an npy file of version 1")
    start = 10 + int.from_bytes(array.data[8:10], "little")
    shape, fortran, dtype = _parse_header(array.data[:start])
    if dtype.hasobject:
        raise ValueError("the array holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape is {shape}")
    flat = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return flat.reshape(shape, order="F" if fortran else "C")


# the same few headers come again and again
@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    return np.lib.format.read_array_header_1_0(stream)


def why_bad_arrays(arrays: ArrayRecord, sent: Mapping[str, Array]) -> str | None:
    """Return why a model cannot be averaged with others of those sent."""
    if arrays.keys() != sent.keys():
        return f"arrays {sorted(set(arrays) ^ set(sent))[:3]} missing or unknown"
    for name, array in arrays.items():
        if reason := _why_bad_array(array, sent[name]):
            return f"array {name!r} {reason}"
    return None


def _why_bad_array(array: Array, sent: Array) -> str | None:
    if array.stype != NUMPY:
        return f"is written as {array.stype!r}, not as {NUMPY!r}"
    try:
        values = view_array(array)
    # the parser of its header raises what it likes
    except Exception as error:
        return f"cannot be read ({last_line(str(error))})"
    model = np.dtype(sent.dtype)
    if values.shape != tuple(sent.shape):
        return f"has shape {values.shape} instead of {sent.shape}"
    # averaging may have made floats of integers
    if values.dtype.kind not in "fiub":
        return f"has type {values.dtype}, which cannot be averaged"
    if reason := _why_bad_values(values):
        return f"holds {reason}"
    if values.dtype not in (model, bool) and model.kind in "fiu":
        limit = (np.finfo if model.kind == "f" else np.iinfo)(model).max
        if _largest(values) > float(limit):
            return f"holds figures too large for {sent.dtype}"
    if model.kind in "iu":
        steps = values.astype(np.float64) - view_array(sent).astype(np.float64)
        if _largest(steps) > MAX_COUNT_STEP:
            return f"holds integers more than {MAX_COUNT_STEP} from those sent"
    return None


def why_no_model(arrays: ArrayRecord) -> str | None:
    """Return what makes arrays useless as a global model; None if nothing does."""
    return next(filter(None, (_why_bad_values(array.numpy()) for array in arrays.values())), None)


def _why_bad_values(values: NDArray[Any]) -> str | None:
    flat = values.reshape(-1)
    if values.dtype.kind != "f":
        far = values.dtype.kind in "iu" and _largest(flat) > MAX_VALUE
        return f"values above {MAX_VALUE:g}" if far else None
    with np.errstate(all="ignore"):
        # nothing bad can hide in a small sum of squares
        if flat.dtype != np.float16 and np.dot(flat, flat) <= MAX_VALUE**2:
            return None
    if not np.isfinite(flat).all():
        return "NaN or infinity"
    return f"values above {MAX_VALUE:g}" if _largest(flat) > MAX_VALUE else None


def _largest(values: NDArray[Any]) -> float:
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def holds_trees(arrays: ArrayRecord, form: str) -> bool:
    """Return whether arrays are a model of XGBoost, as far as Flower looks into it."""
    try:
        if arrays.keys() != {"0"} or arrays["0"].stype != NUMPY:
            return False
        values = view_array(arrays["0"])
        model = values.tobytes()
        if values.dtype != np.uint8 or form == "any":
            return values.dtype == np.uint8 and model[:1] == b"{"
        booster = json.loads(model)["learner"]["gradient_booster"]["model"]
        numbers, trees = booster["gbtree_model_param"], booster["trees"]
        new, whole = int(numbers["num_parallel_tree"]), int(numbers["num_trees"])
        good = 1 <= new <= len(trees) == whole and all(isinstance(tree, dict) for tree in trees)
        return good and isinstance(booster["iteration_indptr"][-1] + booster["tree_info"][-1], int)
    # whatever a node may send
    except Exception:
        return False


class Norms(NamedTuple):
    """Euclidean norms of a model's parameters and of its running statistics."""

    parameters: float
    statistics: float


def norms_of(arrays: Mapping[str, Array]) -> Norms:
    """Measure a model."""
    squares = [0.0, 0.0]
    for name, array in arrays.items():
        flat = view_array(array).reshape(-1)
        if flat.dtype.kind != "f" or flat.dtype == np.float16:
            flat = flat.astype(np.float32)
        squares[name.endswith(BUFFERS)] += float(np.dot(flat, flat))
    return Norms(*map(math.sqrt, squares))
