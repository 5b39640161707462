r"""Models and updates in few bits, on NumPy arrays.

Blocks of 64 values share a scale, as in Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022. What a node's update loses is added to its next one: Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019. With q for a
quantised array, of a model w and a node that keeps e, at first 0::

    1: server:  send q(w)                              encode
    2: node:    v <- q(w);  train from v to w_i        decode
    3:          u <- w_i - v + e                       with_error
    4:          send q(u);  e <- u - q(u)              encode, decode
    5: server:  w_i <- w + q(u)                        wire.restored

Each q(x) decodes by itself. The server adds an update to the w that it knows, not to q(w), so that
what the model loses on its way to a node is no part of the update.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

Floats = NDArray[np.float32]
BITS = (2, 3, 4, 8)
"""Widths of a code."""
BLOCK = 64
"""Values that share a scale."""
SCALE_BYTES = 2
"""A scale is the upper half of a float32: its range, and 8 bits of its mantissa."""
TINY = 1e-30
"""Blocks with no larger value are 0: steps of smaller ones are no normal float32."""
ROUNDING = 1e-6
"""What a scale and a value in float32 are wrong by at most, as a part."""


def highest_code(bits: int) -> int:
    """Return the code of a block's largest value; that of its negative is 0.

    >>> [highest_code(bits) for bits in BITS]
    [2, 6, 14, 254]
    """
    return 2 * ((1 << (bits - 1)) - 1)


def encoded_size(count: int, bits: int) -> int:
    """Return the bytes of so many values: 4.25 bits each for codes of 4 bits.

    >>> encoded_size(20_000, 4)
    10626
    """
    return SCALE_BYTES * -(-count // BLOCK) + bits * -(-count // 8)


def encode(values: NDArray[np.floating], bits: int, *, no_longer: bool = False) -> bytes:
    r"""Quantise an array, block by block, to multiples of a step of its own.

    .. math:: q_j = \mathrm{round}(x_j / s), \qquad s = \max_j |x_j| \, / \, (2^{b-1} - 1)

    Parameters
    ----------
    values : array of float
        Any shape; ValueError if it holds NaN, infinity, or what float32 cannot hold.
    bits : int
        One of ``BITS``: b, the width of a code.
    no_longer : bool
        Choose the steps so that no block becomes longer, in the Euclidean norm, than it was.

    Examples
    --------
    >>> decode(encode(np.array([7.0, -3.2, 0.4]), 4), 3, 4)
    array([ 7., -3.,  0.], dtype=float32)
    """
    half = highest_code(bits) // 2
    blocks = in_blocks(values)
    # l. 1 and 4: the largest value of each block
    largest = np.maximum(blocks.max(axis=1, initial=0.0), -blocks.min(axis=1, initial=0.0))
    largest[largest <= TINY] = 0.0
    scales = upper_halves(largest, up=True)
    codes = rounded(blocks, scales, half)
    if no_longer:
        # Squares of float32 values may be too small or too large for float32.
        norms = np.sqrt(np.einsum("ij,ij->i", blocks, blocks, dtype=np.float64)) * (1 - ROUNDING)
        lengths = np.sqrt(np.einsum("ij,ij->i", codes, codes))
        most = half * np.divide(norms, lengths, out=np.zeros_like(norms), where=lengths > 0)
        most = np.minimum(most, as_floats(scales))
        scales = upper_halves(most.astype(np.float32), up=False)
    codes += half
    return scales.tobytes() + packed(codes.reshape(-1)[: values.size].astype(np.uint8), bits)


def decode(data: bytes, count: int, bits: int) -> Floats:
    """Return the values of ``encode``: (count,); ValueError for what it cannot have written."""
    if len(data) != (size := encoded_size(count, bits)):
        raise ValueError(f"holds {len(data)} bytes instead of {size}")
    num_blocks = -(-count // BLOCK)
    half = highest_code(bits) // 2
    scales = np.frombuffer(data, "<u2", num_blocks)
    # The sign is followed by an exponent of ones.
    if num_blocks and scales.max() >= INFINITE:
        raise ValueError("holds a scale of NaN, infinity or below 0")
    codes = unpacked(data[SCALE_BYTES * num_blocks :], count, bits)
    if count and codes.max() > 2 * half:
        raise ValueError(f"holds a code above {2 * half}")
    values = np.zeros((num_blocks, BLOCK), np.float32)
    values.reshape(-1)[:count] = codes
    values -= half
    # l. 2 and 5
    values *= (as_floats(scales) / np.float32(half))[:, np.newaxis]
    return values.reshape(-1)[:count]


def with_error(
    end: NDArray[np.floating], start: NDArray[np.floating], error: NDArray[np.floating] | None
) -> NDArray[np.floating]:
    """Return the update of a node, and what was lost of the ones before (l. 3).

    >>> with_error(np.array([3.0]), np.array([1.0]), np.array([0.5]))
    array([2.5])
    """
    wide = np.promote_types(start.dtype, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        # l. 3: u <- w_i - v + e
        update = end.astype(wide) - start
        return np.asarray(update if error is None else update + error)


# --- blocks and scales -------------------------------------------------------------------------
INFINITE = 0x7F80
"""The upper half of an infinite float32."""


def in_blocks(values: NDArray[np.floating]) -> Floats:
    """Return values in rows of a block each, the last one filled with 0."""
    flat = values.reshape(-1)
    rows = np.zeros((-(-flat.size // BLOCK), BLOCK), np.float32)
    with np.errstate(over="ignore"):
        rows.reshape(-1)[: flat.size] = flat
    return rows


def upper_halves(numbers: Floats, *, up: bool) -> NDArray[np.uint16]:
    """Round numbers of at least 0 to half of their bytes; ValueError if one is not finite."""
    whole = numbers.view(np.uint32)
    halves = (whole + np.uint32(0xFFFF if up else 0)) >> np.uint32(16)
    if halves.size and halves.max() >= INFINITE:
        raise invalid("values", float(numbers.max()), "be finite, and below 3.3e38")
    return halves.astype("<u2")


def as_floats(halves: NDArray[np.uint16]) -> Floats:
    """Return the numbers of :func:`upper_halves`."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(blocks: Floats, scales: NDArray[np.uint16], half: int) -> Floats:
    """Return each value in steps of its block, rounded: -half..half."""
    largest = as_floats(scales)
    steps = np.divide(half, largest, out=np.zeros_like(largest), where=largest > 0)
    codes = blocks * steps[:, np.newaxis]
    return np.rint(codes, out=codes)


# --- bits --------------------------------------------------------------------------------------
def packed(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Write codes one bit at a time: the lowest bits of all, then the next ones.

    >>> packed(np.array([1, 2, 3], np.uint8), 2).hex()
    'a060'
    """
    return b"".join(np.packbits(codes >> bit & 1).tobytes() for bit in range(bits))


def unpacked(data: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    """Read the codes that :func:`packed` wrote: (count,)."""
    planes = np.frombuffer(data, np.uint8).reshape(bits, -1)
    codes = np.zeros(count, np.uint8)
    for bit, plane in enumerate(planes):
        codes |= np.unpackbits(plane, count=count) << bit
    return codes
