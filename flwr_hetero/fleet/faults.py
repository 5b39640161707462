"""Faults to inject into an emulated fleet: which node fails, when, and how."""

from dataclasses import dataclass
from math import inf, nan
from typing import Literal, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from flwr_hetero._flwr import NUMPY
from flwr_hetero.errors import check_choice
from flwr_hetero.records import arrays_in, metrics_in

Kind = Literal["dies", "errs", "late", "garbage"]
BAD_METRICS = {
    "extra-metric": {"unknown": 1.0},
    "nan-weight": {"num-examples": nan},
    "negative-weight": {"num-examples": -1.0},
}
CORRUPTIONS = (
    *("nan", "shape", "bytes", "missing-array", "extra-array", "no-arrays", "no-metrics"),
    *BAD_METRICS,
)
NAN_SCALE = b"\xff\xff"


@dataclass(frozen=True)
class Fault:
    """One node fails in one way in a range of rounds.

    Parameters
    ----------
    partition_id : int
        The node.
    kind : {"dies", "errs", "late", "garbage"}
        The node never answers; answers with an error; answers ``delay_s`` seconds later; answers
        with a reply corrupted as ``corrupt`` says, one of ``CORRUPTIONS``. Else ValueError.
    first_round, last_round : int
        The values of ``server-round`` for which the node fails, both ends included.
    message_type : str
        The fault affects only messages whose type starts with this.

    Examples
    --------
    >>> Fault(3, "garbage", corrupt="nan").hits(3, 7, "train")
    True
    """

    partition_id: int
    kind: Kind
    first_round: int = 0
    last_round: float = inf
    delay_s: float = 0.0
    corrupt: str = "nan"
    message_type: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("corrupt", self.corrupt, CORRUPTIONS)

    def hits(self, partition_id: int, server_round: int, message_type: str) -> bool:
        """Return whether this fault affects a message to a node."""
        return (
            partition_id == self.partition_id
            and self.first_round <= server_round <= self.last_round
            and message_type.startswith(self.message_type)
        )


def corrupt(content: RecordDict, corruption: str) -> None:
    """Corrupt a reply in place. A reply without the record in question stays as it is."""
    for name, arrays in list(arrays_in(content).items())[:1]:
        if arrays:
            _corrupt_array(arrays, next(iter(arrays)), corruption)
        if corruption == "no-arrays":
            del content[name]
    for name, metrics in list(metrics_in(content).items())[:1]:
        metrics.update(BAD_METRICS.get(corruption, {}))
        if corruption == "no-metrics":
            del content[name]


def _corrupt_array(arrays: ArrayRecord, name: str, corruption: str) -> None:
    array = arrays[name]
    match corruption:
        case "nan" if array.stype != NUMPY:
            # A packed array begins with its scale.
            data = NAN_SCALE + array.data[len(NAN_SCALE) :]
            arrays[name] = Array(array.dtype, array.shape, array.stype, data)
        case "nan":
            values = array.numpy().astype(np.float32)
            values.flat[0] = nan
            arrays[name] = Array(values)
        case "shape":
            arrays[name] = Array(np.zeros((2, 3, 1), dtype=np.float32))
        case "bytes":
            arrays[name] = Array(array.dtype, array.shape, array.stype, b"not an array")
        case "missing-array":
            del arrays[name]
        case "extra-array":
            arrays["unknown"] = Array(np.zeros(1, dtype=np.float32))
