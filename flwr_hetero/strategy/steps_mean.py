"""Weight the models of an inner strategy by steps, while its metrics stay weighted as before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Strategy,
)
from numpy.typing import ArrayLike

from flwr_hetero import keys
from flwr_hetero.strategy.mean_arrays import keep_dtypes, mean_arrays
from flwr_hetero.strategy.reply_checks import weight_of

LINEAR = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""Strategies of which we know that replies enter by their weighted mean and by nothing else."""


def aggregate_by_steps(
    inner: Strategy, leaf: FedAvg, server_round: int, replies: list[Message], like: ArrayRecord
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate with ``num-steps`` as the weight of the models (Eq. 4).

    Parameters
    ----------
    inner : Strategy
        The strategy to call.
    leaf : FedAvg
        The innermost strategy in it, which averages.
    server_round : int
        Current round.
    replies : list of Message
        Good replies, each with ``num-steps`` in its MetricRecord.
    like : ArrayRecord
        The global model: names, shapes and dtypes of the result.

    Returns
    -------
    tuple
        As from ``aggregate_train``: arrays in the dtypes of ``like``, metrics weighted by the
        leaf's own key.

    Notes
    -----
    Where only the mean matters it is made in place and goes in as a single reply. Any other
    strategy, or one with another wrapper around it, gets all replies and another weight key:
    Krum needs each one, and its mean of the chosen ones is then by steps.
    """
    weigh, own_key = leaf.train_metrics_aggr_fn, leaf.weighted_by_key
    contents = [reply.content for reply in replies]
    if inner is leaf and replies and is_linear(leaf):
        mean = mean_reply(replies, [steps_of(reply) for reply in replies], like, own_key)
        with _replaced(leaf, train_metrics_aggr_fn=lambda *_: weigh(contents, own_key)):
            arrays, metrics = leaf.aggregate_train(server_round, [mean])
    else:
        by_own_key = {"train_metrics_aggr_fn": lambda chosen, _key: weigh(chosen, own_key)}
        with _replaced(leaf, weighted_by_key=keys.NUM_STEPS, **by_own_key):
            arrays, metrics = inner.aggregate_train(server_round, replies)
    return arrays if arrays is None else keep_dtypes(arrays, like), metrics


def aggregate_in_place(
    inner: Strategy, server_round: int, replies: list[Message], like: ArrayRecord | None
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Let a strategy aggregate with its own weights, made in place where only the mean matters.

    Parameters
    ----------
    inner : Strategy
        The strategy to call.
    server_round : int
        Current round.
    replies : list of Message
        Good replies, whose weights are not all 0.
    like : ArrayRecord or None
        The global model; None: nothing is known of it and the strategy does all by itself.

    Returns
    -------
    tuple
        As from ``aggregate_train``; integers keep their dtype where the mean is ours.
    """
    if like is None or not replies or not isinstance(inner, FedAvg) or not is_linear(inner):
        return inner.aggregate_train(server_round, replies)
    weigh, own_key = inner.train_metrics_aggr_fn, inner.weighted_by_key
    contents = [reply.content for reply in replies]
    weights = [weight_of(reply, own_key) for reply in replies]
    mean = mean_reply(replies, weights, like, own_key)
    with _replaced(inner, train_metrics_aggr_fn=lambda *_: weigh(contents, own_key)):
        return inner.aggregate_train(server_round, [mean])


def is_linear(strategy: Strategy) -> bool:
    """Tell whether a strategy is known to need the weighted mean of its replies only.

    Parameters
    ----------
    strategy : Strategy
        An innermost strategy.

    Returns
    -------
    bool
        False for subclasses with an ``aggregate_train`` of their own.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedMedian, FedProx
    >>> is_linear(FedProx()), is_linear(FedMedian())
    (True, False)
    """
    return type(strategy).aggregate_train in [known.aggregate_train for known in LINEAR]


def steps_of(reply: Message) -> int:
    """Read ``num-steps`` from a reply that was checked before.

    Parameters
    ----------
    reply : Message
        With one MetricRecord.

    Returns
    -------
    int
        Steps.
    """
    return int(weight_of(reply, keys.NUM_STEPS))


def mean_reply(
    replies: Sequence[Message], weights: ArrayLike, like: ArrayRecord, weight_key: str
) -> Message:
    """Make one reply that holds the weighted mean of the models of several.

    Parameters
    ----------
    replies : sequence of Message
        With one ArrayRecord each.
    weights : array_like of float, shape (num_replies,)
        One per reply.
    like : ArrayRecord
        The global model.
    weight_key : str
        Metric by which the strategy will weigh this single reply: it becomes 1, for the first
        reply's own may be 0.

    Returns
    -------
    Message
        The first reply's metadata and other metrics, and the mean of the arrays.
    """
    ((name, _),) = replies[0].content.array_records.items()
    records = [next(iter(reply.content.array_records.values())) for reply in replies]
    content = RecordDict(dict(replies[0].content))
    content[name] = mean_arrays(records, weights, like)
    for metrics_name, metrics in replies[0].content.metric_records.items():
        content[metrics_name] = MetricRecord({**metrics, weight_key: 1})
    return Message(content, metadata=replies[0].metadata)  # type: ignore[call-overload,no-any-return]


@contextmanager
def _replaced(strategy: Strategy, **attributes: Any) -> Iterator[None]:
    """Give a strategy other attributes for a while."""
    before = {name: getattr(strategy, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(strategy, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(strategy, name, value)
