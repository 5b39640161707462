"""What a node learns of its own pace: how fast it computes, how long it waits for the network."""

from math import isfinite, nan

from flwr.app import ConfigRecord, Context, Message, MessageType

from flwr_hetero import keys
from flwr_hetero.core.bandwidth import Pace, smooth
from flwr_hetero.core.device import FORWARD_SHARE


def read_pace(context: Context) -> Pace | None:
    """Read how long this node waits per round, and how long it scores an example.

    Parameters
    ----------
    context : Context
        The context handed to the ClientApp.

    Returns
    -------
    Pace or None
        None until a mod of ours (``timing``, ``emulated_device``) has seen a training round.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> context = Context(1, 1, {}, RecordDict(), {})
    >>> read_pace(context)
    >>> note_pace(context, idle_s=2.0, example_s=3.0)
    >>> read_pace(context)
    Pace(idle_s=2.0, score_s=1.0)
    """
    record = context.state.config_records.get(keys.PACE)
    if record is None or keys.IDLE_TIME not in record:
        return None
    idle_s, example_s = (_number(record, key) for key in (keys.IDLE_TIME, keys.EXAMPLE_TIME))
    return Pace(idle_s, FORWARD_SHARE * example_s)


def note_pace(context: Context, idle_s: float, example_s: float) -> None:
    """Take in a round's observation; NaN stands for "not observed".

    Parameters
    ----------
    context : Context
        The context handed to the ClientApp.
    idle_s : float
        Seconds that the node waited for the network.
    example_s : float
        Seconds per example, forward and backward.
    """
    record = context.state.config_records.setdefault(keys.PACE, ConfigRecord())
    before = None
    if keys.IDLE_TIME in record:
        before = Pace(_number(record, keys.IDLE_TIME), _number(record, keys.EXAMPLE_TIME))
    record[keys.IDLE_TIME], record[keys.EXAMPLE_TIME] = smooth(before, Pace(idle_s, example_s))


def note_reply(context: Context, message: Message, start_s: float, end_s: float) -> None:
    """Take in a real round: the wait before it, and when it was answered.

    An emulated node's pace comes from its profile, and this does nothing.

    Parameters
    ----------
    context : Context
        The context handed to the ClientApp.
    message : Message
        The instruction; only training counts.
    start_s, end_s : float
        Readings of the monotonic clock; it goes on from process to process until a restart.
    """
    if context.node_config.get(keys.EMULATED) is True:
        return
    record = context.state.config_records.setdefault(keys.PACE, ConfigRecord())
    replied_s = record.pop(keys.REPLIED_AT, None)
    if isinstance(replied_s, float) and start_s > replied_s:
        note_pace(context, start_s - replied_s, nan)
    if message.metadata.message_type == MessageType.TRAIN:
        record[keys.REPLIED_AT] = end_s


def _number(record: ConfigRecord, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else 0.0
