"""BACC: as much importance work as the network hides (Mercury, section 4.3)."""

import time
from collections.abc import Callable
from contextlib import suppress
from math import isfinite, nan
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType

from flwr_hetero import keys
from flwr_hetero._flwr import ClientAppCallable
from flwr_hetero.client.device import FORWARD_SHARE
from flwr_hetero.errors import invalid


class Pace(NamedTuple):
    """What a node knows of its own round, smoothed."""

    idle_s: float
    score_s: float


def smooth(old: Pace | None, new: Pace, weight: float = 0.5) -> Pace:
    r"""Follow a changing link without following every flicker.

    .. math:: \bar x \leftarrow (1 - w) \bar x + w x
    """
    if not 0.0 < weight <= 1.0:
        raise invalid("weight", weight, "lie in (0, 1]", "0.5 follows a change in a few rounds")
    if old is None:
        return Pace(*(value if _usable(value) else 0.0 for value in new))
    return Pace(
        *(
            (1.0 - weight) * before + weight * now if _usable(now) else before
            for before, now in zip(old, new, strict=True)
        )
    )


def exposed_s(score_s: float, idle_s: float) -> float:
    """Time by which scoring lengthens a round when it overlaps with the network."""
    return max(0.0, score_s - idle_s)


Facts = dict[str, str | float]


def device_facts() -> Facts:
    """Ask jetson-stats for the facts that change a Jetson's speed.

    Notes
    -----
    Tried with a stand-in for jetson-stats 4 only; no Jetson was at hand.
    """
    try:
        from jtop import jtop  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return {}
    facts: Facts = {}
    with suppress(Exception), jtop() as board:  # whatever is amiss there, training goes on
        for name, read in _READERS.items():
            with suppress(Exception):
                facts[name] = read(board)
    return facts


def _temperature_c(board: Any) -> float:
    sensors = [float(sensor["temp"]) for sensor in board.temperature.values()]
    return max(celsius for celsius in sensors if isfinite(celsius) and celsius > -100)  # -256: off


_READERS: dict[str, Callable[[Any], str | float]] = {
    "model": lambda board: str(board.board["hardware"]["Model"]),
    "power-mode": lambda board: str(board.nvpmodel),
    "temperature-c": _temperature_c,
}


def read_pace(context: Context) -> Pace | None:
    """Read how long this node waits per round, and how long it scores an example."""
    record = context.state.config_records.get(keys.PACE)
    if record is None or keys.IDLE_TIME not in record:
        return None
    idle_s, example_s = (_number(record, key) for key in (keys.IDLE_TIME, keys.EXAMPLE_TIME))
    return Pace(idle_s, FORWARD_SHARE * example_s)


def note_pace(context: Context, idle_s: float, example_s: float) -> None:
    """Take in a round's observation; NaN stands for "not observed"."""
    record = context.state.config_records.setdefault(keys.PACE, ConfigRecord())
    before = None
    if keys.IDLE_TIME in record:
        before = Pace(_number(record, keys.IDLE_TIME), _number(record, keys.EXAMPLE_TIME))
    record[keys.IDLE_TIME], record[keys.EXAMPLE_TIME] = smooth(before, Pace(idle_s, example_s))


def note_reply(context: Context, message: Message, start_s: float, end_s: float) -> None:
    """Take in a real round: the wait before it, and when it was answered.

    An emulated node's pace comes from its profile, and this does nothing.
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


def timing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report how long the ClientApp worked on a message, by the monotonic clock.

    Use as ``ClientApp(mods=[timing])``. The time goes into a ``ConfigRecord`` of its own,
    which every Flower strategy passes over. A profiling reply gets facts of the board as well,
    where there are any (:func:`~flwr_hetero.client.timing.device_facts`).

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
    """Make the record that a timing mod puts beside a reply."""
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


def _usable(value: float) -> bool:
    return isfinite(value) and value >= 0.0
