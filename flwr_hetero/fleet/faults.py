"""Faults to inject into an emulated fleet: what nodes do wrong, when, and which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from flwr_hetero.errors import invalid

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
        that ``corrupt`` has spoilt.
    first_round, last_round : int
        Range of ``server-round`` in which it happens, both ends included.
    delay_s : float
        For "late", in seconds.
    corrupt : str
        For "garbage": a name in ``CORRUPTIONS``.
    message_type : str
        Only messages whose type starts with this.

    Examples
    --------
    >>> Fault(3, "garbage", corrupt="nan").hits(3, 7, "train")
    True
    >>> Fault(3, "garbage", corrupt="gone")
    Traceback (most recent call last):
    ...
    ValueError: corrupt must be one of ..., got 'gone': ...
    """

    partition_id: int
    kind: Kind
    first_round: int = 0
    last_round: float = float("inf")
    delay_s: float = 0.0
    corrupt: str = "nan"
    message_type: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("dies", "errs", "late", "garbage"):
            raise invalid("kind", self.kind, "be dies, errs, late or garbage", "choose one")
        if self.corrupt not in CORRUPTIONS:
            raise invalid("corrupt", self.corrupt, f"be one of {sorted(CORRUPTIONS)}", "choose one")

    def hits(self, partition_id: int, server_round: int, message_type: str) -> bool:
        """Tell whether this fault strikes a message.

        Parameters
        ----------
        partition_id, server_round, message_type
            Of the message's destination and of the message.

        Returns
        -------
        bool
            True if it does.
        """
        return (
            partition_id == self.partition_id
            and self.first_round <= server_round <= self.last_round
            and message_type.startswith(self.message_type)
        )


def _arrays(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))


def _with_nan(content: RecordDict) -> None:
    arrays = _arrays(content)
    key = next(iter(arrays))
    spoilt = arrays[key].numpy().astype(np.float32).copy()
    spoilt.flat[0] = np.nan
    arrays[key] = Array(spoilt)


def _with_shape(content: RecordDict) -> None:
    arrays = _arrays(content)
    key = next(iter(arrays))
    arrays[key] = Array(np.zeros((2, 3, 1), dtype=np.float32))


def _with_bytes(content: RecordDict) -> None:
    arrays = _arrays(content)
    key = next(iter(arrays))
    whole = arrays[key]
    arrays[key] = Array(whole.dtype, whole.shape, whole.stype, b"not an array")


def _without_key(content: RecordDict) -> None:
    arrays = _arrays(content)
    del arrays[next(iter(arrays))]


def _with_key(content: RecordDict) -> None:
    _arrays(content)["unheard-of"] = Array(np.zeros(1, dtype=np.float32))


def _without_arrays(content: RecordDict) -> None:
    del content[next(iter(content.array_records))]


def _without_metrics(content: RecordDict) -> None:
    del content[next(iter(content.metric_records))]


def _with_metric(content: RecordDict) -> None:
    _metrics(content)["unheard-of"] = 1.0


def _with_weight(value: float) -> Callable[[RecordDict], None]:
    def spoil(content: RecordDict) -> None:
        _metrics(content)["num-examples"] = value

    return spoil


CORRUPTIONS: dict[str, Callable[[RecordDict], None]] = {
    "nan": _with_nan,
    "shape": _with_shape,
    "bytes": _with_bytes,
    "missing-array": _without_key,
    "extra-array": _with_key,
    "no-arrays": _without_arrays,
    "no-metrics": _without_metrics,
    "extra-metric": _with_metric,
    "nan-weight": _with_weight(float("nan")),
    "negative-weight": _with_weight(-1.0),
}
"""Name to a function that spoils a reply in place; StopIteration: there is nothing to spoil."""
