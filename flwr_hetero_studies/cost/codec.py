"""CPU time of the codec of ``Compressed`` for a MB of float32."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flwr_hetero.compression import algorithm
from flwr_hetero.compression.algorithm import Floats
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case

VALUES = 2_500_000
"""An array of 10 MB, which is too large for most caches."""
REPEATS = 30
BITS = (4, 8)
FEEDBACK = ", with feedback"


def packing(bits: int, *, with_feedback: bool) -> Callable[[Floats], bytes]:
    """Return a function that packs; with feedback it keeps what rounding lost, as a node does."""
    if not with_feedback:
        return lambda values: algorithm.encode(values, bits)
    start = np.zeros(VALUES, np.float32)
    error = np.full(VALUES, 1e-3, np.float32)

    def pack(values: Floats) -> bytes:
        update = algorithm.with_error(values, start, error)
        packed = algorithm.encode(update, bits)
        np.subtract(update, algorithm.decode(packed, VALUES, bits)).astype(np.float32)
        return packed

    return pack


def plan(options: Options) -> Iterator[Trial]:
    for suffix in ("", FEEDBACK):
        for bits in BITS:
            yield Trial({"experiment": "codec", "name": f"{bits} bits{suffix}"}, alone=True)


def run(case: Case, data: Data) -> dict[str, Any]:
    name = case["name"]
    bits = int(name.partition(" ")[0])
    encode = packing(bits, with_feedback=name.endswith(FEEDBACK))
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32)
    packed = encode(values)
    per_mb = 1e9 / values.nbytes
    return {
        "encode_ms": round(per_mb * least_s(lambda: encode(values)), 3),
        "decode_ms": round(per_mb * least_s(lambda: algorithm.decode(packed, VALUES, bits)), 3),
        "share": round(len(packed) / values.nbytes, 4),
    }


def least_s(work: Callable[[], Any]) -> float:
    """Return the least CPU time of all repeats, because other work can only add to it."""
    times_s = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        work()
        times_s.append(time.process_time() - start_s)
    return min(times_s)
