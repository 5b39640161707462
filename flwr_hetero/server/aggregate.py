"""Weighted mean of the replies' models, in place and in their own precision."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY, attributes_of, log
from flwr_hetero.errors import invalid
from flwr_hetero.records import read_number
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.reply_checks import (
    BUFFERS,
    drop_partial_metrics,
    view_array,
    weight_of,
    why_no_model,
)

CHUNK = 65_536
"""Elements per pass: small enough that the running sum stays in the processor's cache."""
LINEAR = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""Strategies of which we know that replies enter by their weighted mean and by nothing else."""
WEIGHT = keys.PREFIX + "weight"
"""Metric by which a strategy weights models where that is not its own key."""


def aggregate(
    inner: Strategy,
    leaf: Strategy,
    context: Exchange,
    replies: list[Message],
    weights: list[float],
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate models by these weights, and metrics by its own.

    Where only the mean matters it is made in place and goes in as a single reply. Any other
    strategy gets all replies and, where the weights are not its own, another weight key: Krum
    needs each reply, and its mean of the chosen ones is then by these weights.
    """
    drop_partial_metrics(replies)
    server_round, like = context.round, context.arrays
    if not like or not replies or not isinstance(leaf, FedAvg):
        return inner.aggregate_train(server_round, replies)
    weigh, own_key = leaf.train_metrics_aggr_fn, leaf.weighted_by_key
    if inner is leaf and type(leaf).aggregate_train in [s.aggregate_train for s in LINEAR]:
        contents = [reply.content for reply in replies]
        mean = mean_reply(replies, weights, like, own_key)
        with replaced(leaf, train_metrics_aggr_fn=lambda *_: weigh(contents, own_key)):
            return leaf.aggregate_train(server_round, [mean])
    if weights == [weight_of(reply, own_key) for reply in replies]:
        return inner.aggregate_train(server_round, replies)

    def weigh_metrics(chosen: list[RecordDict], _key: str) -> MetricRecord:
        for content in chosen:
            for metrics in content.metric_records.values():
                metrics.pop(WEIGHT, None)
        return weigh(chosen, own_key)

    for reply, weight in zip(replies, weights, strict=True):
        for metrics in reply.content.metric_records.values():
            metrics[WEIGHT] = weight
    with replaced(leaf, weighted_by_key=WEIGHT, train_metrics_aggr_fn=weigh_metrics):
        return inner.aggregate_train(server_round, replies)


def with_update(
    reply: Message,
    start: ArrayRecord,
    base: ArrayRecord,
    scale: float,
    buffers: tuple[str, ...] = BUFFERS,
) -> Message:
    r"""Return a reply whose model is a base plus the node's scaled update.

    .. math:: x = x_{base} + s \, (x_i - x_{start})

    Integers and buffers are left as they are: they are averaged, not optimised.
    """
    ((name, arrays),) = reply.content.array_records.items()
    moved = ArrayRecord(dict(arrays.items()))
    for key, end in arrays.items():
        before, after = view_array(start[key]), view_array(end)
        if after.dtype.kind == before.dtype.kind == "f" and not key.endswith(buffers):
            onto = before if base is start else view_array(base[key])
            moved[key] = Array(np.asarray(onto + scale * (after - before), after.dtype))
    content = RecordDict({**reply.content, name: moved})
    return Message(content, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]


@contextmanager
def replaced(strategy: Strategy, **attributes: Any) -> Iterator[None]:
    """Give a strategy other attributes for a while."""
    before = {name: getattr(strategy, name) for name in attributes}
    try:
        attributes_of(strategy).update(attributes)
        yield
    finally:
        attributes_of(strategy).update(before)


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
            del out  # or the buffer could not be closed, and getvalue would copy it
    return stream.getvalue()


def weighted_mean(
    arrays: Sequence[NDArray[Any]], weights: ArrayLike, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    r"""Average arrays of one shape and type, into ``out`` (contiguous) if it is given.

    .. math:: x = \sum_i \frac{w_i}{\sum_k w_k} x_i

    Notes
    -----
    All nodes are added up chunk by chunk: every input is read once, and two buffers of ``CHUNK``
    elements are needed. Half precision is added up in single, integers in double.
    """
    dtype = arrays[0].dtype.newbyteorder("=")
    mean = np.empty(arrays[0].shape, dtype) if out is None else out
    wide = np.promote_types(dtype, np.float32) if dtype.kind in "fc" else np.float64
    factors = normalised(weights).astype(wide)
    flat, flat_mean = [array.reshape(-1) for array in arrays], mean.reshape(-1)
    total = np.empty(min(CHUNK, mean.size), factors.dtype)
    term = np.empty_like(total)
    for start in range(0, mean.size, CHUNK):
        part = slice(start, min(start + CHUNK, mean.size))
        chunk, term_chunk = total[: part.stop - start], term[: part.stop - start]
        np.multiply(flat[0][part], factors[0], out=chunk)
        for array, factor in zip(flat[1:], factors[1:], strict=True):
            np.multiply(array[part], factor, out=term_chunk)
            np.add(chunk, term_chunk, out=chunk)
        flat_mean[part] = _rounded(chunk, dtype)
    return mean


def normalised(weights: ArrayLike) -> NDArray[np.float64]:
    """Scale weights so that they sum to 1."""
    share = np.asarray(weights, dtype=np.float64)
    if share.ndim != 1 or not (np.isfinite(share) & (share >= 0)).all() or not share.sum() > 0:
        raise invalid("weights", share.tolist(), "be finite, at least 0 and of positive sum")
    return np.asarray(share / share.sum())


def keep_dtypes(arrays: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """Bring a new model back to the dtypes of the last one; averaging makes floats of integers.

    One with values that no node could train from is logged and replaced by the last one.
    """
    if reason := why_no_model(arrays):
        log(ERROR, "the model stays as it was: that of this round holds %s", reason)
        return like
    for name, array in arrays.items():
        if name in like and array.dtype != like[name].dtype:
            dtype, values = np.dtype(like[name].dtype), array.numpy()
            whole = dtype.kind in "iub" and values.dtype.kind == "f"
            arrays[name] = Array(np.asarray(np.rint(values) if whole else values, dtype))
    return arrays


def _rounded(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round means of integers; a mean of truth values is the majority."""
    if dtype.kind == "b":
        return values >= 0.5
    return np.rint(values) if dtype.kind in "iu" else values


# --- evaluation ------------------------------------------------------------------------------

MAX_NODES = 100
"""Nodes in the table of an evaluation: those on which the model is worst."""


def by_node(replies: Sequence[Message], identity: Callable[[int], str]) -> dict[str, Any]:
    """Sum up how good a model is on each node: mean, mean of the worst tenth, and a table.

    By the first metric with "acc" in its name, else the first with "loss"; empty without one.
    """
    metrics = {
        identity(reply.metadata.src_node_id): record
        for reply in replies
        for record in reply.content.metric_records.values()
    }
    names = [name for record in metrics.values() for name in record]
    metric = next((n for part in ("acc", "loss") for n in names if part in n.lower()), "")
    read = {node: read_number(record, metric) for node, record in metrics.items()}
    values = {node: value for node, value in read.items() if not np.isnan(value)}
    if not values:
        return {}
    worst_first = sorted(values, key=lambda node: values[node], reverse="acc" not in metric.lower())
    ordered = [values[node] for node in worst_first]
    with np.errstate(over="ignore"):
        means = [float(np.mean(part)) for part in (ordered, ordered[: -(-len(ordered) // 10)])]
    return {
        "metric": metric,
        "nodes": len(values),
        "mean": means[0],
        "worst-tenth": means[1],
        "by-node": {node: values[node] for node in worst_first[:MAX_NODES]},
    }
