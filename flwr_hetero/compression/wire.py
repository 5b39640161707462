"""Packed arrays in Flower's records, and the client's part: the app sees whole models."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import NUMPY, ClientAppCallable
from flwr_hetero.client import warn_once
from flwr_hetero.client.carried import MOST_BYTES
from flwr_hetero.compression import algorithm
from flwr_hetero.compression.algorithm import BITS, with_error
from flwr_hetero.records import BUFFERS, array_of, arrays_in, configs_in, view_array

LEAST = 256
"""Values below which an array is sent as it is: a scale and few values, with much to lose."""
FLOATS = ("float16", "float32", "float64")
STYPES = {keys.PACKED + str(bits): bits for bits in BITS}
"""Serialisation of packed arrays, and their bits."""


def is_packable(name: str, array: Array) -> bool:
    """Return whether an array is worth packing, and bears it: variances must not become negative.

    >>> is_packable("weight", Array(np.zeros(256))), is_packable("weight", Array(np.zeros(255)))
    (True, False)
    """
    is_float = array.stype == NUMPY and array.dtype in FLOATS
    return is_float and math.prod(array.shape) >= LEAST and not name.endswith(BUFFERS)


def pack(like: Array, values: NDArray[np.floating], bits: int, *, no_longer: bool = False) -> Array:
    """Pack values for an array; ValueError if they are not finite."""
    data = algorithm.encode(values, bits, no_longer=no_longer)
    return Array(like.dtype, tuple(like.shape), f"{keys.PACKED}{bits}", data)


def unpack(array: Array, like: Array) -> NDArray[np.float32]:
    """Read a packed array, in the shape of another one; ValueError if it cannot be."""
    shape = tuple(like.shape)
    return algorithm.decode(array.data, math.prod(shape), STYPES[array.stype]).reshape(shape)


def packed(arrays: ArrayRecord, bits: int) -> ArrayRecord:
    """Pack a model (l. 1)."""
    written = arrays.copy()
    for name, array in arrays.items():
        if is_packable(name, array):
            # l. 1: q(w)
            written[name] = pack(array, view_array(array), bits)
    return written


def unpacked(arrays: ArrayRecord) -> ArrayRecord:
    """Read a model that may be packed (l. 2)."""
    read = arrays.copy()
    for name, array in arrays.items():
        if array.stype in STYPES:
            # l. 2: v
            read[name] = array_of(np.asarray(unpack(array, array), array.dtype))
    return read


def restored(arrays: ArrayRecord, sent: Mapping[str, Array], bits: int | None) -> ArrayRecord:
    """Add packed updates to the model that was sent (l. 5); ValueError if one cannot be read."""
    whole = arrays.copy()
    for name, array in arrays.items():
        if array.stype not in STYPES:
            continue
        # What was not asked for might be larger than what was.
        if name not in sent or not is_packable(name, sent[name]) or STYPES[array.stype] != bits:
            raise ValueError(f"array {name!r} is packed in a form that was not asked for")
        try:
            update = unpack(array, sent[name])
            start = view_array(sent[name])
        except ValueError as error:
            raise ValueError(f"packed array {name!r} {error}") from error
        with np.errstate(over="ignore"):
            # l. 5: w_i <- w + q(u)
            whole[name] = array_of(np.asarray(start + update, start.dtype))
    return whole


# --- the client's part -----------------------------------------------------------------------


def unpacking(call_next: ClientAppCallable) -> ClientAppCallable:
    """Wrap an app: it is given whole models, and its own is packed if the server asks for it."""

    def call(message: Message, context: Context) -> Message:
        asked = configs_in(message.content).get(keys.COMPRESSION)
        if asked is None:
            return call_next(message, context)
        content = RecordDict({**message.content})
        # Mods of Flower's look for the only ConfigRecord.
        del content[keys.COMPRESSION]
        for name, arrays in arrays_in(content).items():
            content[name] = unpacked(arrays)
        whole = Message(content, metadata=message.metadata)  # type: ignore[call-overload]
        return _answer(whole, call_next(whole, context), context, asked)

    return call


def _answer(
    message: Message, reply: Message, context: Context, asked: Mapping[str, Any]
) -> Message:
    """Pack the model of a reply (l. 3 and 4), and say that this node can."""
    if not isinstance(reply, Message) or not reply.has_content():
        return reply
    bits = asked.get(keys.BITS_UP)
    trained = message.metadata.message_type == MessageType.TRAIN
    content = RecordDict({**reply.content})
    starts = arrays_in(message.content)
    ends = arrays_in(content)
    if trained and bits in BITS and len(starts) == len(ends) == 1:
        ((_, start),) = starts.items()
        ((name, end),) = ends.items()
        feedback = asked.get(keys.FEEDBACK) is True
        content[name] = _packed_update(start, end, int(bits), context if feedback else None)
    content[keys.COMPRESSION] = ConfigRecord({keys.BITS_UP: int(bits or 0)})
    return Message(content, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]


def _packed_update(
    start: ArrayRecord, end: ArrayRecord, bits: int, context: Context | None
) -> ArrayRecord:
    """Pack what changed (l. 3 and 4); with a context, keep in its state what is lost by that."""
    packed = end.copy()
    lost = ArrayRecord()
    lost_bytes = 0
    for name, array in end.items():
        before = start.get(name)
        if before is None or not (is_packable(name, before) and _is_like(array, before)):
            continue
        error = None if context is None else _residual(context, name, before)
        # l. 3: u
        update = with_error(view_array(array), view_array(before), error)
        # A model that is not finite is left to the checks of the server.
        with suppress(ValueError):
            # l. 4: q(u)
            packed[name] = pack(before, update, bits, no_longer=context is None)
            # e <- u - q(u)
            rest = update - unpack(packed[name], before)
            lost_bytes += 4 * rest.size
            if context is not None and lost_bytes <= MOST_BYTES:
                lost[name] = array_of(np.asarray(rest, np.float32))
    if lost_bytes > MOST_BYTES:
        warn_once("no error feedback: what the update has lost is too much to keep", topic="lost")
        lost = ArrayRecord()
    if context is not None:
        context.state[keys.RESIDUAL] = lost
    return packed


def _is_like(array: Array, before: Array) -> bool:
    shapes = tuple(array.shape), tuple(before.shape)
    return array.stype == NUMPY and array.dtype in FLOATS and shapes[0] == shapes[1]


def _residual(context: Context, name: str, like: Array) -> NDArray[np.floating] | None:
    """Return what the last update of an array has lost; None if that is not known."""
    record = arrays_in(context.state).get(keys.RESIDUAL)
    # The node may have trained another model before.
    if record is None or name not in record or tuple(record[name].shape) != tuple(like.shape):
        return None
    return view_array(record[name])
