"""Faults to inject into an emulated fleet: what nodes do wrong, when, and which."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from flwr_hetero._flwr import NUMPY
from flwr_hetero.errors import check_choice
from flwr_hetero.records import arrays_in, metrics_in

Kind = Literal["dies", "errs", "late", "garbage"]
CORRUPTIONS = (
    *("nan", "shape", "bytes", "missing-array", "extra-array", "no-arrays"),
    *("no-metrics", "extra-metric", "nan-weight", "negative-weight"),
)
LIES = {
    "extra-metric": {"unknown": 1.0},
    "nan-weight": {"num-examples": float("nan")},
    "negative-weight": {"num-examples": -1.0},
}
NAN_SCALE = b"\xff\xff"


@dataclass(frozen=True)
class Fault:
    """One node does one thing wrong in a range of rounds.

    Parameters
    ----------
    partition_id : int
        The node.
    kind : {"dies", "errs", "late", "garbage"}
        Never answers; answers with an error; answers ``delay_s`` seconds later; answers with a
        reply corrupted as ``corrupt`` says, one of ``CORRUPTIONS``. Else ValueError.
    first_round, last_round : int
        Range of ``server-round`` in which it happens, both ends included.
    message_type : str
        Only messages whose type starts with this.

    Examples
    --------
    >>> Fault(3, "garbage", corrupt="nan").hits(3, 7, "train")
    True
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


def corrupt(content: RecordDict, how: str) -> None:
    """Corrupt a reply in place; one that lacks what is to be corrupted stays as it is."""
    for name, arrays in [*arrays_in(content).items()][:1]:
        if first := next(iter(arrays), None):
            _corrupt_arrays(arrays, first, how)
        if how == "no-arrays":
            del content[name]
    for name, metrics in [*metrics_in(content).items()][:1]:
        metrics.update(LIES.get(how, {}))
        if how == "no-metrics":
            del content[name]


def _corrupt_arrays(arrays: ArrayRecord, first: str, how: str) -> None:
    match how:
        case "nan" if arrays[first].stype != NUMPY:
            old = arrays[first]
            # a packed array begins with a scale
            data = NAN_SCALE + old.data[len(NAN_SCALE) :]
            arrays[first] = Array(old.dtype, old.shape, old.stype, data)
        case "nan":
            values = arrays[first].numpy().astype(np.float32)
            values.flat[0] = np.nan
            arrays[first] = Array(values)
        case "shape":
            arrays[first] = Array(np.zeros((2, 3, 1), dtype=np.float32))
        case "bytes":
            old = arrays[first]
            arrays[first] = Array(old.dtype, old.shape, old.stype, b"not an array")
        case "missing-array":
            del arrays[first]
        case "extra-array":
            arrays["unknown"] = Array(np.zeros(1, dtype=np.float32))
