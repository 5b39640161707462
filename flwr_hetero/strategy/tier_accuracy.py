"""How good the model is on each tier's own data."""

import math
from collections.abc import Sequence
from logging import WARNING

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.common.logger import log
from numpy.typing import NDArray

from flwr_hetero.strategy.tier_table import TierTable


def accuracy_per_tier(
    replies: Sequence[tuple[str, Message]],
    table: TierTable,
    accuracy_key: str | None,
    leaf: object,
) -> NDArray[np.float64]:
    """Average the accuracy that nodes report, by tier and weighted by examples.

    Parameters
    ----------
    replies : sequence of (str, Message)
        Identity and evaluation reply.
    table : TierTable
        Who is in which tier.
    accuracy_key : str or None
        Metric to read; None: see :func:`accuracy_of`.
    leaf : Strategy
        Its ``weighted_by_key`` names the weight.

    Returns
    -------
    ndarray of float64, shape (num_tiers,)
        NaN for tiers of which nobody answered.
    """
    weight_key = getattr(leaf, "weighted_by_key", "num-examples")
    total, weight = np.zeros(table.num_tiers), np.zeros(table.num_tiers)
    for identity, reply in replies:
        metrics: MetricRecord = next(iter(reply.content.metric_records.values()))
        accuracy, examples = accuracy_of(metrics, accuracy_key), metrics.get(weight_key, 1)
        tier = table.tier.get(identity)
        if tier is None or accuracy is None or not isinstance(examples, (int, float)):
            continue
        total[tier] += accuracy * examples
        weight[tier] += examples
    if replies and not weight.any():
        log(
            WARNING,
            "TiFL: no accuracy in the evaluation replies; set accuracy_key to one of %s",
            sorted(next(iter(replies[0][1].content.metric_records.values()))),
        )
    mean = np.full(table.num_tiers, np.nan)
    np.divide(total, weight, out=mean, where=weight > 0)
    return mean


def accuracy_of(metrics: MetricRecord, accuracy_key: str | None) -> float | None:
    """Read a figure of which more is better.

    Parameters
    ----------
    metrics : MetricRecord
        Of an evaluation reply.
    accuracy_key : str or None
        Metric to read. None: the first with "acc" in its name, else minus the first with
        "loss" in its name.

    Returns
    -------
    float or None
        None if there is no such finite number.

    Examples
    --------
    >>> accuracy_of(MetricRecord({"eval_loss": 0.4, "eval_acc": 0.9}), None)
    0.9
    >>> accuracy_of(MetricRecord({"eval_loss": 0.4}), None)
    -0.4
    """
    key, sign = accuracy_key, 1.0
    if key is None:
        key = next((name for name in metrics if "acc" in name.lower()), None)
    if key is None:
        key, sign = next((name for name in metrics if "loss" in name.lower()), None), -1.0
    value = metrics.get(key) if key is not None else None
    if isinstance(value, (int, float)) and math.isfinite(value):
        return sign * value
    return None
