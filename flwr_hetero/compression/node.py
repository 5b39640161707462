"""The client's part of compression: the app sees whole models, the server gets packed updates."""

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
from flwr_hetero.compression import wire
from flwr_hetero.compression.algorithm import BITS, with_error
from flwr_hetero.records import array_of, arrays_in, configs_in, view_array


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
            content[name] = wire.unpacked(arrays)
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
        if before is None or not (wire.is_packable(name, before) and _is_like(array, before)):
            continue
        error = None if context is None else _residual(context, name, before)
        # l. 3: u
        update = with_error(view_array(array), view_array(before), error)
        # A model that is not finite is left to the checks of the server.
        with suppress(ValueError):
            # l. 4: q(u)
            packed[name] = wire.pack(before, update, bits, no_longer=context is None)
            # e <- u - q(u)
            rest = update - wire.unpack(packed[name], before)
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
    return array.stype == NUMPY and array.dtype in wire.FLOATS and shapes[0] == shapes[1]


def _residual(context: Context, name: str, like: Array) -> NDArray[np.floating] | None:
    """Return what the last update of an array has lost; None if that is not known."""
    record = arrays_in(context.state).get(keys.RESIDUAL)
    if record is None or name not in record or tuple(record[name].shape) != tuple(like.shape):
        return None
    # A damaged state is as good as a lost one.
    with suppress(ValueError, TypeError, EOFError):
        values = record[name].numpy()
        if values.shape == tuple(like.shape) and np.isfinite(values).all():
            return values
    return None
