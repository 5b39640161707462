"""A mod that says how long a node took, by its own monotonic clock."""

import time

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from flwr_hetero import keys
from flwr_hetero.mod.device_facts import device_facts
from flwr_hetero.mod.pace import note_reply


def timing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report how long the ClientApp worked on a message, by the monotonic clock.

    Use as ``ClientApp(mods=[timing])``. The time goes into a ``ConfigRecord`` of its own,
    which every Flower strategy passes over. A profiling reply gets facts of the board as well,
    where there are any (:func:`~flwr_hetero.mod.device_facts.device_facts`).

    Parameters
    ----------
    message, context, call_next
        As for any Flower mod.

    Returns
    -------
    Message
        The reply with a ``flwr-hetero.timing`` record, unless it is an error.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[timing])
    """
    start_s = time.monotonic()
    reply = call_next(message, context)
    end_s = time.monotonic()
    note_reply(context, message, start_s, end_s)
    if reply.has_content():
        reply.content[keys.TIMING] = timing_record(context, end_s - start_s, 0.0, emulated=False)
        if message.metadata.message_type == keys.PROFILE_MESSAGE and (facts := device_facts()):
            reply.content[keys.DEVICE] = ConfigRecord(dict(facts.items()))
    return reply


def timing_record(
    context: Context, train_s: float, transfer_s: float, *, emulated: bool
) -> ConfigRecord:
    """Make the record that a timing mod puts beside a reply.

    Parameters
    ----------
    context : Context
        For the node's ``partition-id``, if it has one.
    train_s, transfer_s : float
        Seconds of work and of transfer.
    emulated : bool
        Whether the times come from a device profile.

    Returns
    -------
    ConfigRecord
        To be stored as ``flwr-hetero.timing``.
    """
    record = ConfigRecord(
        {
            keys.TRAIN_TIME: train_s,
            keys.TRANSFER_TIME: transfer_s,
            keys.EMULATED: emulated,
        }
    )
    if keys.PARTITION_ID in context.node_config:
        record[keys.PARTITION_ID] = int(context.node_config[keys.PARTITION_ID])
    return record
