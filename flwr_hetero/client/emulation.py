"""Emulated devices: a reply reports the time that a device profile would have taken."""

import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, MessageType
from numpy.random import Generator, SeedSequence, default_rng

from flwr_hetero import keys
from flwr_hetero._flwr import NODE_UNAVAILABLE, ClientAppCallable, older_metrics, set_entries
from flwr_hetero.client.device import (
    REAL,
    DeviceProfile,
    compute_time_s,
    message_time_s,
    named_fleet,
    transfer_time_s,
)
from flwr_hetero.client.timing import call_app, in_simulation, note_pace, timing, timing_record
from flwr_hetero.records import configs_in, metrics_in, payload_bytes, read_number


def emulated_device(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report the time that this node's emulated device would have taken; nothing sleeps.

    The device comes from the run-config keys ``fleet`` (see :func:`~flwr_hetero.fleet.named_fleet`)
    and ``seed`` and from the node's ``partition-id``; one that is away answers with an error.
    Outside a simulation, or with ``fleet = "real"``, this is :func:`timing`. Put it around an app:
    ``ClientApp(mods=[emulated_device])``.
    """
    fleet = str(context.run_config.get("fleet", REAL))
    if fleet == REAL or not in_simulation():
        return timing(message, context, call_next)
    partition = int(context.node_config[keys.PARTITION_ID])
    profile = _profiles(fleet, int(context.node_config["num-partitions"]))[partition]
    rng = device_rng(int(context.run_config.get("seed", 0)), partition, message)
    away = reply_if_away(message, profile, rng)
    if away is not None:
        return away
    reply = call_app(message, context, call_next)
    # A simulation has no round trip by the device's clock, so the cost of a message is added here.
    stamp(message, reply, context, profile, rng, fixed_s=message_time_s(profile, rng))
    return reply


_profiles = lru_cache(maxsize=8)(named_fleet)


def is_emulated(context: Context) -> bool:
    """Return whether a node's times come from a device profile, so that it need not be timed."""
    in_emulation = str(context.run_config.get("fleet", REAL)) != REAL and in_simulation()
    return in_emulation or context.node_config.get(keys.EMULATED) is True


def device_seed(seed: int, partition: int, message: Message) -> SeedSequence:
    """Make the seed for one message to one device: independent of the order of messages."""
    kind = zlib.crc32(message.metadata.message_type.encode())
    configs = configs_in(message.content).values()
    rounds = [whole_number(configs, key) for key in (keys.SERVER_ROUND, keys.PROFILE_ROUND)]
    repeat = whole_number(configs, keys.REPEAT)
    entropy: Any = [seed, partition, kind, *rounds, *([repeat] if repeat else [])]
    # NumPy reads an array of words faster than a list, with the same result.
    if max(entropy) < 2**32:
        entropy = np.array(entropy, dtype=np.uint32)
    return SeedSequence(entropy)


def device_rng(seed: int, partition: int, message: Message) -> Generator:
    """Make the generator for one message to one device."""
    return default_rng(device_seed(seed, partition, message))


def in_config(message: Message, key: str) -> int:
    """Read a whole number, such as the round, from an instruction; 0 if there is none."""
    return whole_number(configs_in(message.content).values(), key)


def whole_number(configs: Iterable[Mapping[str, Any]], key: str) -> int:
    """Read a whole number from the first config that has one; 0 if there is none."""
    for config in configs:
        value = config.get(key)
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def reply_if_away(message: Message, profile: DeviceProfile, rng: Generator) -> Message | None:
    """Draw whether a device is away; if so, return the error that it answers with."""
    if float(rng.random()) < profile.availability:
        return None
    return Message(Error(NODE_UNAVAILABLE, "the emulated device is away"), reply_to=message)


def stamp(
    message: Message,
    reply: Message,
    context: Context,
    profile: DeviceProfile,
    rng: Generator | None,
    *,
    fixed_s: float = 0.0,
) -> None:
    """Write the emulated times into a reply, with ``fixed_s`` of transfer; no error is changed."""
    if not reply.has_content():
        return
    # The clock reading of a mod is no payload.
    if keys.TIMING in reply.content:
        del reply.content[keys.TIMING]
    processed, scored, hidden = work(reply)
    train_s = compute_time_s(profile, processed, scored, rng)
    record = configs_in(reply.content).get(keys.WORK)
    if record:
        # The time of a step is by the device's clock too.
        step_s = train_s / max(1.0, read_number(record, keys.NUM_STEPS, 1.0))
        set_entries(record, {keys.STEP_TIME: step_s})
    bytes_down = payload_bytes(message.content)
    transfer_s = transfer_time_s(profile, bytes_down, payload_bytes(reply.content))
    if message.metadata.message_type == MessageType.TRAIN:
        note_pace(context, transfer_s, compute_time_s(profile, 1.0))
        # Scoring during the transfer lengthens the round only if it takes longer than that.
        train_s += max(0.0, compute_time_s(profile, 0.0, hidden) - transfer_s)
    record = timing_record(context, train_s, transfer_s + fixed_s, emulated=True)
    set_entries(reply.content, {keys.TIMING: record})


def work(reply: Message) -> tuple[float, float, float]:
    """Read how many examples a node trained on, scored, and scores during the transfer."""
    reported: dict[str, object] = {}
    for record in metrics_in(reply.content).values():
        reported.update(record)
    reported |= older_metrics(reply.content)
    metrics: dict[str, Any] = {**configs_in(reply.content).get(keys.WORK, {}), **reported}
    stated = keys.EXAMPLES_PROCESSED if keys.EXAMPLES_PROCESSED in metrics else keys.NUM_EXAMPLES
    if stated not in metrics:
        # A node does not know the strategy's weighted_by_key. If there is only one count, it is
        # that.
        counts = [key for key in reported.keys() - keys.PROTOCOL if type(reported[key]) is int]
        if len(counts) == 1:
            stated = counts[0]
    processed = read_number(metrics, stated, 1.0)
    if processed < 0:
        processed = 1.0
    scored = max(0.0, read_number(metrics, keys.EXAMPLES_SCORED, 0.0))
    hidden = max(0.0, read_number(metrics, keys.EXAMPLES_HIDDEN, 0.0))
    # An evaluation has forward passes only.
    if reply.metadata.message_type.startswith(MessageType.EVALUATE):
        return 0.0, processed + scored, hidden
    return processed, scored, hidden
