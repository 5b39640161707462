"""Ask every node how long its local training takes (TiFL, section 4.2)."""

import math
from collections.abc import Sequence
from logging import INFO
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import CLIENT_APP_RAISED, log
from flwr_hetero.server.reply_checks import Expected
from flwr_hetero.server.rounds import timed_exchange

if TYPE_CHECKING:
    from flwr_hetero.server.wrapper import Wrapper


MAX_FACTS, MAX_TEXT = 8, 80
"""Facts of a board that are kept, and characters of each."""


class Measured(NamedTuple):
    """Latencies of a profiling."""

    node_ids: list[int]
    rounds: NDArray[np.float64]


def profile_nodes(
    strategy: "Wrapper",
    grid: Grid,
    node_ids: Sequence[int],
    *,
    server_round: int,
    sync_rounds: int,
    warmup_rounds: int,
    t_max: float,
) -> Measured:
    """Measure the latency of nodes in some rounds of their own.

    The instruction has the message type ``train.profile``, which the ClientApp answers with
    the time its training takes and no arrays. A ClientApp without a handler for it is sent an
    ordinary training message instead, the result of which is thrown away.
    """
    nodes = list(node_ids)
    column = {node_id: i for i, node_id in enumerate(nodes)}
    kind = dict.fromkeys(nodes, keys.PROFILE_MESSAGE)
    rounds = np.full((sync_rounds, len(nodes)), np.nan)
    log(INFO, "Profiling %d nodes: %d + %d rounds", len(nodes), warmup_rounds, sync_rounds)
    for number in range(warmup_rounds + sync_rounds):
        messages = [
            profile_message(strategy, node_id, kind[node_id], server_round, number)
            for node_id in nodes
        ]
        good = _ask(strategy, grid, messages, t_max, kind)
        if number >= warmup_rounds:
            for wrapper in strategy.wrappers():
                wrapper.on_profile_replies(good)
            for node_id, latency in strategy.session.latency.items():
                rounds[number - warmup_rounds, column[node_id]] = latency.seconds
    return Measured(nodes, rounds)


def identify_nodes(strategy: "Wrapper", grid: Grid, t_max: float) -> None:
    """Find out who is who after a resume; its time and its failures are no part of the run.

    Nodes whose ClientApp does not know ``train.profile`` are sent an ordinary training message,
    the result of which is thrown away.
    """
    session = strategy.session
    session.registry.learn(grid)
    unknown = sorted(node for node in grid.get_node_ids() if not session.registry.knows(node))
    virtual_s, wall_s = session.virtual_s, session.wall_s
    if unknown:
        log(INFO, "Asking %d nodes who they are", len(unknown))
        kind: dict[int, str] = {}
        _ask(strategy, grid, [_question(strategy, n) for n in unknown], t_max, kind)
        again = [_question(strategy, node_id, kind[node_id]) for node_id in sorted(kind)]
        if again:
            _ask(strategy, grid, again, t_max, {})
    session.virtual_s, session.wall_s = virtual_s, wall_s


def _question(strategy: "Wrapper", node_id: int, kind: str = keys.PROFILE_MESSAGE) -> Message:
    return profile_message(strategy, node_id, kind, server_round=0, number=0)


def profile_message(
    strategy: "Wrapper", node_id: int, kind: str, server_round: int, number: int
) -> Message:
    """Make the instruction that asks a node for its latency."""
    session, leaf = strategy.session, strategy.leaf
    config = ConfigRecord(dict((session.config or ConfigRecord()).items()))
    config[keys.SERVER_ROUND] = server_round
    config[keys.PROFILE_ROUND] = number
    content = RecordDict(
        {
            getattr(leaf, "arrayrecord_key", "arrays"): session.arrays or ArrayRecord(),
            getattr(leaf, "configrecord_key", "config"): config,
        }
    )
    return Message(content, dst_node_id=node_id, message_type=kind)


def has_raised(reply: Message) -> bool:
    """Tell whether the ClientApp raised, as one does that does not know the message."""
    return reply.has_error() and reply.error.code == CLIENT_APP_RAISED


def _ask(
    strategy: "Wrapper", grid: Grid, messages: list[Message], t_max: float, kind: dict[int, str]
) -> list[Message]:
    """Return the good replies; nodes whose ClientApp raised get an ordinary message next time."""
    strategy.session.ask(messages, grid)
    replies = timed_exchange(strategy, grid, messages, t_max).replies
    asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    for reply in replies:
        node_id = asked.get(reply.metadata.reply_to_message_id)
        if node_id is not None and has_raised(reply):
            kind[node_id] = MessageType.TRAIN
    good = strategy.session.take_in(replies, Expected(metrics=False))
    for reply in good:
        _note_device(strategy, reply)
    return good


def _note_device(strategy: "Wrapper", reply: Message) -> None:
    """Keep what a board says of itself, for the log and the history; it decides nothing."""
    record = reply.content.config_records.get(keys.DEVICE)
    if record is None:
        return
    facts = {
        str(name)[:MAX_TEXT]: value[:MAX_TEXT] if isinstance(value, str) else float(value)
        for name, value in list(record.items())[:MAX_FACTS]
        if isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value))
    }
    identity = strategy.identity(reply.metadata.src_node_id)
    strategy.session.devices[identity] = facts
    log(INFO, "%s: %s", identity, ", ".join(f"{name} {value}" for name, value in facts.items()))
