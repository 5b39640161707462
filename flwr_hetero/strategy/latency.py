"""One figure per node and round: latency in seconds, and where it comes from."""

import math
from typing import NamedTuple

from flwr.app import Message

from flwr_hetero import keys


class Latency(NamedTuple):
    """How long a node took for a message.

    Parameters
    ----------
    seconds : float
        Compute and, where it is known, transfer.
    emulated : bool
        Whether it comes from a device profile.
    source : str
        ``emulated``, ``reported`` (the node's clock) or ``observed`` (the server's clock).
    """

    seconds: float
    emulated: bool
    source: str


def reported_latency(reply: Message) -> Latency | None:
    """Read what a reply says of its latency.

    Parameters
    ----------
    reply : Message
        A reply with content: the timing mod's record, or a ``train-time`` metric.

    Returns
    -------
    Latency or None
        None if it says nothing, or nonsense.
    """
    record = reply.content.config_records.get(keys.TIMING)
    if record is not None:
        seconds = _seconds(record.get(keys.TRAIN_TIME)) + _seconds(record.get(keys.TRANSFER_TIME))
        emulated = record.get(keys.EMULATED) is True
        return _latency(seconds, emulated)
    for metrics in reply.content.metric_records.values():
        if keys.TRAIN_TIME in metrics:
            return _latency(_seconds(metrics[keys.TRAIN_TIME]), emulated=False)
    return None


def reported_partition(reply: Message) -> int | None:
    """Read the partition that a reply says it comes from.

    Parameters
    ----------
    reply : Message
        A reply with content.

    Returns
    -------
    int or None
        The node's ``partition-id``; None if it does not say.
    """
    record = reply.content.config_records.get(keys.TIMING)
    value = None if record is None else record.get(keys.PARTITION_ID)
    return value if isinstance(value, int) and value >= 0 else None


def judge_latency(
    reply: Message, round_trip_s: float | None, *, simulated: bool
) -> tuple[Latency | None, str | None]:
    """Decide what a node's latency was.

    A report above the round trip that the server saw is wrong, and only a simulated node may
    say that its time is emulated; then, and where there is no report, the round trip counts.

    Parameters
    ----------
    reply : Message
        A reply with content.
    round_trip_s : float or None
        Seconds by the server's clock; None if it does not know.
    simulated : bool
        Whether the grid's nodes are simulated.

    Returns
    -------
    latency : Latency or None
        None if nothing is known.
    complaint : str or None
        Why the report was not believed.
    """
    reported = reported_latency(reply)
    observed = None if round_trip_s is None else Latency(round_trip_s, False, "observed")
    if reported is None:
        return observed, None
    if reported.emulated:
        if simulated:
            return reported, None
        return observed, "claims an emulated device outside a simulation"
    if round_trip_s is not None and reported.seconds > round_trip_s:
        complaint = f"claims {reported.seconds:.3g} s, its reply was here in {round_trip_s:.3g} s"
        return observed, complaint
    return reported, None


def _seconds(value: object) -> float:
    if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
        return float(value)
    return math.nan


def _latency(seconds: float, emulated: bool) -> Latency | None:
    if math.isnan(seconds):
        return None
    return Latency(seconds, emulated, "emulated" if emulated else "reported")
