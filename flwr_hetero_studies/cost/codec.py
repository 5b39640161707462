"""CPU time of the codec of ``Compressed`` for a MB of float32, beside the standard zlib."""

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flwr_hetero.compression import algorithm
from flwr_hetero.compression.algorithm import Floats
from flwr_hetero_studies.core.plan import Data, Trial
from flwr_hetero_studies.core.record import Case

VALUES, REPEATS = 2_500_000, 30
"""Of an array of 10 MB, too large for most caches; the least of so many times counts."""
BITS = (4, 8)
LEVEL = 1
"""zlib's quickest."""
Pack, Unpack = Callable[[Floats], bytes], Callable[[bytes], Any]


def packing(bits: int) -> tuple[Pack, Unpack]:
    how = algorithm.encode, algorithm.decode
    return lambda x: how[0](x, bits), lambda data: how[1](data, VALUES, bits)


def feeding(bits: int) -> tuple[Pack, Unpack]:
    """Pack as a node does, which keeps what is lost."""
    start, error = np.zeros(VALUES, np.float32), np.full(VALUES, 1e-3, np.float32)

    def pack(values: Floats) -> bytes:
        update = algorithm.with_error(values, start, error)
        data = algorithm.encode(update, bits)
        np.subtract(update, algorithm.decode(data, VALUES, bits)).astype(np.float32)
        return data

    return pack, packing(bits)[1]


def deflating(bits: int) -> tuple[Pack, Unpack]:
    """Pack a code a byte, as zlib finds what is frequent among bytes."""
    half = algorithm.highest_code(bits) // 2

    def pack(values: Floats) -> bytes:
        blocks = algorithm.in_blocks(values)
        scales = algorithm.upper_halves(np.abs(blocks).max(axis=1), up=True)
        codes = algorithm.rounded(blocks, scales, half).astype(np.int8)
        return scales.tobytes() + zlib.compress(codes.tobytes(), LEVEL)

    def unpack(data: bytes) -> Any:
        cut = algorithm.SCALE_BYTES * -(-VALUES // algorithm.BLOCK)
        codes = np.frombuffer(zlib.decompress(data[cut:]), np.int8).reshape(-1, algorithm.BLOCK)
        scales = algorithm.as_floats(np.frombuffer(data[:cut], "<u2"))
        return codes * (scales / np.float32(half))[:, np.newaxis]

    return pack, unpack


CODECS: dict[str, tuple[Pack, Unpack]] = {
    **{f"{bits} bits": packing(bits) for bits in BITS},
    **{f"{bits} bits, with feedback": feeding(bits) for bits in BITS},
    **{f"{bits} bits, zlib": deflating(bits) for bits in BITS},
    "float32, zlib": (lambda x: zlib.compress(x.tobytes(), LEVEL), zlib.decompress),
}


def plan() -> Iterator[Trial]:
    yield from (Trial({"experiment": "codec", "name": name}, alone=True) for name in CODECS)


def run(case: Case, data: Data) -> dict[str, Any]:
    pack, unpack = CODECS[case["name"]]
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32)
    packed = pack(values)
    times_s = least_s(lambda: pack(values)), least_s(lambda: unpack(packed))
    encode_ms, decode_ms = (round(1e9 * time_s / values.nbytes, 3) for time_s in times_s)
    share = round(len(packed) / values.nbytes, 4)
    return {"encode_ms": encode_ms, "decode_ms": decode_ms, "share": share}


def least_s(work: Callable[[], Any]) -> float:
    """Return the least CPU time: anything else on the machine only adds."""
    found = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        work()
        found.append(time.process_time() - start_s)
    return min(found)
