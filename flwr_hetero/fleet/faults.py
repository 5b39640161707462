"""Faults to inject into an emulated fleet: what nodes do wrong, when, and which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from flwr_hetero.errors import check_choice

Kind = Literal["dies", "errs", "late", "garbage"]


@dataclass(frozen=True)
class Fault:
    """One node does one thing wrong in a range of rounds.

    Parameters
    ----------
    partition_id : int
        The node.
    kind : {"dies", "errs", "late", "garbage"}
        Never answers; answers with an error; answers ``delay_s`` later; answers with a reply
        corrupted as ``corrupt`` says.
    first_round, last_round : int
        Range of ``server-round`` in which it happens, both ends included.
    delay_s : float
        For "late", in seconds.
    corrupt : str
        For "garbage": a name in ``CORRUPTIONS``.
    message_type : str
        Only messages whose type starts with this.

    Raises
    ------
    ValueError
        If ``kind`` or ``corrupt`` is unknown.

    Examples
    --------
    >>> Fault(3, "garbage", corrupt="nan").hits(3, 7, "train")
    True
    >>> Fault(3, "sleeps")
    Traceback (most recent call last):
    ...
    ValueError: kind must be one of dies, errs, late, garbage, got 'sleeps'.
    """

    partition_id: int
    kind: Kind
    first_round: int = 0
    last_round: float = float("inf")
    delay_s: float = 0.0
    corrupt: str = "nan"
    message_type: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("corrupt", self.corrupt, CORRUPTIONS)

    def hits(self, partition_id: int, server_round: int, message_type: str) -> bool:
        """Return whether this fault concerns a message to a node."""
        return (
            partition_id == self.partition_id
            and self.first_round <= server_round <= self.last_round
            and message_type.startswith(self.message_type)
        )


def _arrays(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))


def _in_first_array(change: Callable[[Array], Array | None]) -> Callable[[RecordDict], None]:
    """Replace the first array of a reply, or remove it."""

    def corrupt(content: RecordDict) -> None:
        arrays = _arrays(content)
        key = next(iter(arrays))
        new = change(arrays[key])
        if new is None:
            del arrays[key]
        else:
            arrays[key] = new

    return corrupt


def _with_nan(array: Array) -> Array:
    values = array.numpy().astype(np.float32)
    values.flat[0] = np.nan
    return Array(values)


def _with_array(content: RecordDict) -> None:
    _arrays(content)["unknown"] = Array(np.zeros(1, dtype=np.float32))


def _without_arrays(content: RecordDict) -> None:
    del content[next(iter(content.array_records))]


def _without_metrics(content: RecordDict) -> None:
    del content[next(iter(content.metric_records))]


def _with_metric(name: str, value: float) -> Callable[[RecordDict], None]:
    def corrupt(content: RecordDict) -> None:
        _metrics(content)[name] = value

    return corrupt


CORRUPTIONS: dict[str, Callable[[RecordDict], None]] = {
    "nan": _in_first_array(_with_nan),
    "shape": _in_first_array(lambda array: Array(np.zeros((2, 3, 1), dtype=np.float32))),
    "bytes": _in_first_array(
        lambda array: Array(array.dtype, array.shape, array.stype, b"not an array")
    ),
    "missing-array": _in_first_array(lambda array: None),
    "extra-array": _with_array,
    "no-arrays": _without_arrays,
    "no-metrics": _without_metrics,
    "extra-metric": _with_metric("unknown", 1.0),
    "nan-weight": _with_metric("num-examples", float("nan")),
    "negative-weight": _with_metric("num-examples", -1.0),
}
"""Name to a function that corrupts a reply in place; StopIteration: there is nothing to corrupt."""
