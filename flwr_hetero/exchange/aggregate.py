"""Models of replies: checked and averaged in their own precision, one array at a time."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import ERROR
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY, log
from flwr_hetero.errors import invalid, last_line
from flwr_hetero.exchange.context import QUORUM, Exchange
from flwr_hetero.records import (
    BUFFERS,
    MovedArray,
    Read,
    array_of,
    arrays_in,
    blocks_of,
    limit_metrics,
    metrics_of,
    model_of,
    read_number,
    reader_of,
    step_between,
    view_array,
)

LINEAR = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""Strategies of which we know that replies enter by their weighted mean and by nothing else."""
WEIGHT = keys.PREFIX + "weight"
"""Metric by which a strategy weights models where that is not its own key."""
MAX_VALUE, MAX_COUNT_STEP = 1e15, 2**31
"""Above this values are nonsense; integers are counters, and differ at most so from those sent."""
MAX_SQUARE = 1e40
"""What stands for a sum of squares that is too large for its type."""


def aggregate(
    inner: Strategy, leaf: Strategy, context: Exchange, replies: list[Message], weights: list[float]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate models by these weights, and metrics by its own.

    It sees whole models, and so does all else, where nodes return a part.
    """
    if context.left_out:
        replies = [_whole(context, reply) for reply in replies]
    arrays, metrics = _aggregate_whole(inner, leaf, context, replies, weights)
    return arrays and with_left_out(arrays, context), metrics


def with_left_out(arrays: ArrayRecord, context: Exchange) -> ArrayRecord:
    """Give arrays that nodes leave out the server's value: a mean of equal ones may round it."""
    for name, array in context.left_out.items():
        arrays[name] = array
    return arrays


def _whole(context: Exchange, reply: Message) -> Message:
    """Complete a reply with the server's arrays, which are not copied, in their order."""
    whole = context.arrays.copy()
    whole.update(context.left_out)
    whole.update(model_of(reply))
    return with_model(reply, whole)


def _aggregate_whole(
    inner: Strategy, leaf: Strategy, context: Exchange, replies: list[Message], weights: list[float]
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    drop_partial_metrics(replies)
    number = context.round
    like = context.arrays
    if not like or not replies or not isinstance(leaf, FedAvg):
        return inner.aggregate_train(number, replies)
    weigh = leaf.train_metrics_aggr_fn
    own_key = leaf.weighted_by_key
    contents = [reply.content for reply in replies]
    limited = limited_metrics(context, replies, own_key, "train")
    counts = {id(content): other for content, other in zip(contents, limited, strict=True)}

    def weigh_metrics(chosen: Sequence[RecordDict], _key: str = "") -> MetricRecord:
        metrics = weigh([counts.get(id(content), content) for content in chosen], own_key)
        # What Flower's `metric_records` returns refers to itself, and so do the records that it is
        # of: without this, all models would wait for the garbage collector.
        for content in limited:
            for name in arrays_in(content):
                del content[name]
        return metrics

    # Where only the mean matters, it is made here. FedAvg adds nothing to it.
    method = type(leaf).aggregate_train
    if inner is leaf and method in [strategy.aggregate_train for strategy in LINEAR]:
        models = [model_of(reply) for reply in replies]
        mean = mean_arrays(models, weights, like)
        if method is FedAvg.aggregate_train:
            return mean, weigh_metrics(contents)
        # Flower divides the weight by itself, and it may be 0 in some replies.
        heaviest = max(replies, key=lambda reply: weight_of(reply, own_key))
        with replaced(leaf, train_metrics_aggr_fn=lambda *_: weigh_metrics(contents)):
            return leaf.aggregate_train(number, [with_model(heaviest, mean)])
    if weights == [weight_of(reply, own_key) for reply in replies]:
        with replaced(leaf, train_metrics_aggr_fn=weigh_metrics):
            return inner.aggregate_train(number, replies)

    # Krum needs each reply, and its mean of the chosen ones is then by these weights
    for reply, weight in zip(replies, weights, strict=True):
        metrics_of(reply)[WEIGHT] = weight
    with replaced(leaf, weighted_by_key=WEIGHT, train_metrics_aggr_fn=weigh_metrics):
        return inner.aggregate_train(number, replies)


def limited_metrics(
    context: Exchange, replies: Sequence[Message], weight_key: str | None, kind: str
) -> list[RecordDict]:
    """Return what replies hold, metrics as they count beside those of others in the round."""
    if not replies:
        return []
    fleet = context.fleet
    skipped = {weight_key or "", *keys.PROTOCOL}
    contents = [reply.content for reply in replies]
    reported = fleet.reported.setdefault(kind, {})
    nodes = {context.identity(reply.metadata.src_node_id) for reply in replies}
    known = fleet.metrics.get(kind, {}).items() if len(nodes) < QUORUM else ()
    others = [own for node, own in known if node not in nodes]
    limited, cut = limit_metrics(contents, skipped, reported, others)
    for place, text in cut.items():
        node_id = replies[place].metadata.src_node_id
        node = context.identity(node_id)
        # The data of a node may be odd in every round.
        if fleet.is_first(f"metrics of {node}"):
            fleet.nodes.warn(node_id, text)
            fleet.reported.setdefault("limited", {})[node] = text
    return limited


def settle_evaluations(context: Exchange, replies: Sequence[Message], key: str | None) -> None:
    """Bring metrics of replies to evaluation within what most of them report, of equal names."""
    drop_partial_metrics(replies)
    context.fleet.reported["evaluate"] = {}
    limited = limited_metrics(context, replies, key, "evaluate")
    for reply, content in zip(replies, limited, strict=True):
        reply.content.update(content)


def weight_of(reply: Message, weight_key: str) -> float:
    """Read the weight of a good reply."""
    return float(metrics_of(reply)[weight_key])  # type: ignore[arg-type]


def drop_partial_metrics(replies: Sequence[Message]) -> None:
    """Take out metrics of the protocol that some reply lacks: Flower wants equal names."""
    records = [metrics_of(reply) for reply in replies]
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
    scale_of_buffers: float | None = None,
) -> Message:
    r"""Return a reply whose model is :math:`x_{base} + s \, (x_i - x_{start})`.

    Buffers have a scale of their own; None: they stay as they are.
    """
    moved = model_of(reply).copy()
    for name, after in list(moved.items()):
        own_scale = scale_of_buffers if name.endswith(buffers) else scale
        # Integers are averaged and not optimised.
        if own_scale is not None and np.dtype(start[name].dtype).kind == "f":
            moved[name] = MovedArray(base[name], start[name], after, own_scale)
    return with_model(reply, moved)


def with_model(message: Message, model: ArrayRecord) -> Message:
    """Return a message with another model and the same other records."""
    ((name, _),) = arrays_in(message.content).items()
    content = message.content.copy()
    content[name] = model
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload,no-any-return]


class Norms(NamedTuple):
    """Euclidean norms of an update's parameters and of its running statistics."""

    parameters: float
    statistics: float


def model_norms(arrays: Mapping[str, Array], start: Mapping[str, Array] | None = None) -> Norms:
    """Return how large a good model is, or how far from its start; integers are left out."""
    squares = [0.0, 0.0]
    for name, array in arrays.items():
        before = (start or arrays)[name]
        if np.dtype(before.dtype).kind != "f":
            continue
        read_before = reader_of(before)
        read = reader_of(array)
        square = 0.0
        for block in blocks_of(math.prod(before.shape)):
            step = read(block)
            if start:
                step = step_between(read_before(block), step)
            step = step.astype(np.result_type(step, np.float32), copy=False)
            with np.errstate(over="ignore"):
                square += float(np.dot(step, step))
        # The square may be too large for single precision.
        squares[name.endswith(BUFFERS)] += min(square, MAX_SQUARE)
    return Norms(*map(math.sqrt, squares))


# --- means -------------------------------------------------------------------------------
def mean_arrays(
    records: Sequence[ArrayRecord], weights: ArrayLike, like: ArrayRecord
) -> ArrayRecord:
    """Average ArrayRecords of one model without unpacking them, in the types of ``like``."""
    mean = like.copy()
    for name, array in like.items():
        # What nodes have left out is the server's own array.
        if any(record[name] is not array for record in records):
            readers = [reader_of(record[name]) for record in records]
            total = weighted_mean(readers, weights, np.dtype(array.dtype), math.prod(array.shape))
            mean[name] = array_of(total.reshape(array.shape))
    return mean


def weighted_mean(
    readers: Sequence[Read], weights: ArrayLike, dtype: np.dtype[Any], size: int
) -> NDArray[Any]:
    """Average arrays of ``size`` numbers in blocks, so that no whole array is copied.

    ``dtype``: the type of the mean, of shape (size,).
    """
    # Half precision is added up in single precision, and integers in double precision.
    wide = np.promote_types(dtype, np.float32) if dtype.kind in "fc" else np.dtype(np.float64)
    factors = normalised(weights).astype(wide)
    mean = np.empty(size, dtype)
    for block in blocks_of(size):
        total: Any = None
        for read, factor in zip(readers, factors, strict=True):
            part = np.multiply(read(block).astype(dtype, copy=False), factor, dtype=wide)
            total = part if total is None else np.add(total, part, out=total)
        # For masks, the majority counts.
        if dtype.kind == "b":
            mean[block] = total >= 0.5
        else:
            mean[block] = np.rint(total) if dtype.kind in "iu" else total
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
        log(ERROR, "the model stays as it was: that of this round %s", reason)
        return like
    # Averaging makes floats of integers.
    for name, array in arrays.items():
        if name in like and array.dtype != like[name].dtype:
            dtype = np.dtype(like[name].dtype)
            values = view_array(array)
            whole = dtype.kind in "iub" and values.dtype.kind == "f"
            arrays[name] = array_of(np.asarray(np.rint(values) if whole else values, dtype))
    return arrays


# --- reading and checking ----------------------------------------------------------------
def check_arrays(arrays: Mapping[str, Array], sent: Mapping[str, Array]) -> None:
    """Check a model; ValueError says why it cannot be averaged with others of those sent."""
    unknown = arrays.keys() - sent.keys()
    missing = sent.keys() - arrays.keys()
    # The names of a list are positions, which do not say what is left out.
    if unknown or not arrays or (missing and all(map(str.isdecimal, sent))):
        raise ValueError(f"arrays {sorted(unknown or missing)[:3]} missing or unknown")
    for name, array in arrays.items():
        try:
            _check_array(array, sent[name])
        except ValueError as error:
            raise ValueError(f"array {name!r} {error}") from error


def _check_array(array: Array, sent: Array) -> None:
    """Check that an array is as good as the one sent."""
    if array.stype != NUMPY:
        raise ValueError(f"is written as {array.stype!r}, not as {NUMPY!r}")
    try:
        values = view_array(array)
    # The parser of its header may raise anything.
    except Exception as error:
        raise ValueError(f"cannot be read ({last_line(str(error))})") from error
    if values.shape != tuple(sent.shape):
        raise ValueError(f"has shape {values.shape} instead of {sent.shape}")
    # Averaging may have made floats of integers.
    if values.dtype.kind not in "fiub":
        raise ValueError(f"has type {values.dtype}, which cannot be averaged")
    check_values(values)
    model = np.dtype(sent.dtype)
    if values.dtype not in (model, bool) and model.kind in "fiu":
        limit = (np.finfo if model.kind == "f" else np.iinfo)(model).max
        if _largest(values) > float(limit):
            raise ValueError(f"holds figures too large for {sent.dtype}")
    if model.kind in "iu":
        steps = values.astype(np.float64) - view_array(sent).astype(np.float64)
        if _largest(steps) > MAX_COUNT_STEP:
            raise ValueError(f"holds integers more than {MAX_COUNT_STEP} from those sent")


def check_values(values: NDArray[Any]) -> None:
    """Check an array; ValueError if a model cannot hold such values."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "f" or flat.dtype == np.float16:
        flat = flat.astype(np.float32)
    with np.errstate(all="ignore"):
        square = float(np.dot(flat, flat))
    # Nothing bad can hide in a small sum of squares.
    if not square <= MAX_VALUE**2:
        if not np.isfinite(flat).all():
            raise ValueError("holds NaN or infinity")
        if _largest(flat) > MAX_VALUE:
            raise ValueError(f"holds values above {MAX_VALUE:g}")


def why_no_model(arrays: ArrayRecord) -> str | None:
    """Return what makes arrays useless as a global model; None if nothing does."""
    try:
        for array in arrays.values():
            check_values(view_array(array))
    except ValueError as error:
        return str(error)
    return None


def _largest(values: NDArray[Any]) -> float:
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def holds_trees(arrays: ArrayRecord, form: str) -> bool:
    """Return whether arrays are a model of XGBoost, as far as Flower looks into it."""
    try:
        values = view_array(arrays["0"])
        if len(arrays) > 1 or arrays["0"].stype != NUMPY or values.dtype != np.uint8:
            return False
        model = values.tobytes()
        if form == "any":
            return model[:1] == b"{"
        learner = json.loads(model)["learner"]["gradient_booster"]["model"]
        numbers = learner["gbtree_model_param"]
        trees = learner["trees"]
        new = int(numbers["num_parallel_tree"])
        whole = int(numbers["num_trees"])
        good = 1 <= new <= len(trees) == whole and all(isinstance(tree, dict) for tree in trees)
        return good and isinstance(learner["iteration_indptr"][-1] + learner["tree_info"][-1], int)
    # A node may send anything.
    except Exception:
        return False
