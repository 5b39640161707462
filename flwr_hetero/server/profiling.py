"""What nodes report of themselves: latency on request, device, and what their samplers do."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import islice
from logging import INFO
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import CLIENT_APP_RAISED, log
from flwr_hetero.errors import hint_for, with_hint
from flwr_hetero.exchange.checks import Expected, Verdicts, accept, reported_partition
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.records import config_in, read_number
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict

MAX_TEXT, MAX_METRICS = 80, 100
"""Characters of the name of a sampler's statistic, and statistics of a node that are read."""


def profile_nodes(
    strategy: Wrapper,
    context: Exchange,
    grid: Grid,
    node_ids: Sequence[int],
    *,
    sync_rounds: int,
    warmup_rounds: int,
    t_max: float,
) -> tuple[list[int], NDArray[np.float64]]:
    """Measure the latency of nodes in some rounds of their own (TiFL, section 4.2).

    Returns the nodes, and seconds by round and node, NaN where a node did not answer. A ClientApp
    answers ``train.profile`` with the time that its training takes and no arrays. One without a
    handler for it is sent an ordinary training message, the result of which is dropped.
    """
    nodes = list(node_ids)
    column = {node_id: i for i, node_id in enumerate(nodes)}
    kind = dict.fromkeys(nodes, profile_kind(strategy, context, grid, nodes, t_max))
    rounds = np.full((sync_rounds, len(nodes)), np.nan)
    log(INFO, "Profiling %d nodes: %d + %d rounds", len(nodes), warmup_rounds, sync_rounds)
    for number in range(warmup_rounds + sync_rounds):
        now = context.beside(t_max)
        good = _ask(strategy, now, grid, kind, number)
        # A node that is late beside the others would be late in each round.
        for node_id in () if now.late_s == inf else now.failed.keys() - now.refused:
            del kind[node_id]
        # 4.2: the first rounds warm up and do not count
        if number >= warmup_rounds:
            for wrapper in strategy.wrappers():
                wrapper.on_profile_replies(now, good)
            for reply in good:
                node_id = reply.metadata.src_node_id
                row = number - warmup_rounds
                rounds[row, column[node_id]] = now.comparable_s(reply)
        # If something keeps all nodes from training, further rounds would not help.
        known = next(filter(hint_for, now.failed.values()), "")
        if known and not good:
            raise RuntimeError(with_hint(f"no node can be profiled: {known}"))
    return nodes, rounds


def identify_nodes(strategy: Wrapper, context: Exchange, grid: Grid, t_max: float) -> None:
    """Find out the identities of unknown nodes after a resume."""
    fleet = context.fleet
    fleet.nodes.learn(grid, grid.get_node_ids())
    if not (unknown := _unknown(fleet, grid)):
        return
    # It takes no time of the fleet's clock and costs nothing, so that the run goes on as before.
    virtual_s = fleet.clock.virtual_s
    costs = deepcopy(vars(fleet.costs))
    log(INFO, "Asking %d nodes for their identity", len(unknown))
    usual = profile_kind(strategy, context, grid, unknown, t_max)
    # The node that was asked first has a name by now.
    kind = dict.fromkeys(_unknown(fleet, grid), usual)
    _ask(strategy, context.beside(t_max), grid, kind)
    fleet.queue_on(grid).set_clock(virtual_s)
    vars(fleet.costs).update(costs)


def _unknown(fleet: Fleet, grid: Grid) -> list[int]:
    free = set(grid.get_node_ids()) - fleet.queue_on(grid).busy.keys()
    return sorted(node for node in free if not fleet.nodes.knows(node))


def profile_kind(
    strategy: Wrapper, context: Exchange, grid: Grid, node_ids: Sequence[int], t_max: float
) -> str:
    """Find out once, by asking one node, which message it takes to time a node."""
    nodes = context.fleet.nodes
    if nodes.profile_kind or not node_ids:
        return nodes.profile_kind or keys.PROFILE_MESSAGE
    node_id = node_ids[0]
    now = context.beside(t_max)
    now.ask([profile_message(strategy, context, node_id, keys.PROFILE_MESSAGE, 0)], grid)
    for reply in now.send(grid):
        if has_raised(reply):
            nodes.profile_kind = MessageType.TRAIN
            text = "The ClientApp has no handler for %s: ordinary training is timed instead"
            log(INFO, text, keys.PROFILE_MESSAGE)
        elif reply.has_content():
            nodes.profile_kind = keys.PROFILE_MESSAGE
            if (partition := reported_partition(reply)) is not None:
                nodes.set_partition_id(node_id, partition)
    return nodes.profile_kind or keys.PROFILE_MESSAGE


def profile_message(
    strategy: Wrapper, context: Exchange, node_id: int, kind: str, number: int
) -> Message:
    """Make the instruction that asks a node for its latency."""
    leaf = strategy.leaf
    config = ConfigRecord(dict(context.config))
    # This is the round that is about to begin.
    config[keys.SERVER_ROUND] = max(context.round, 1)
    config[keys.PROFILE_ROUND] = number
    content = RecordDict()
    content[getattr(leaf, "arrayrecord_key", "arrays")] = context.arrays
    content[getattr(leaf, "configrecord_key", "config")] = config
    return Message(content, dst_node_id=node_id, message_type=kind)


def has_raised(reply: Message) -> bool:
    """Return whether the ClientApp raised, as one does that has no handler for the message."""
    return reply.has_error() and reply.error.code == CLIENT_APP_RAISED


def _ask(
    strategy: Wrapper, context: Exchange, grid: Grid, kind: dict[int, str], number: int = 0
) -> list[Message]:
    """Return the good replies; a node whose ClientApp raised gets another kind next time."""
    messages = [profile_message(strategy, context, n, kind[n], number) for n in kind]
    judge = Verdicts(context, Expected(metrics=False))
    context.ask(messages, grid, judge)
    replies = context.send(grid)
    for reply in filter(has_raised, replies):
        kind[context.instruction_of(reply).metadata.dst_node_id] = MessageType.TRAIN
    return accept(context, replies, judge)


class SamplerMetrics(Wrapper):
    """Put the mean of the nodes' sampler statistics into each round of the history.

    A node sends them as numbers in a ``flwr-hetero.sampler`` record, which the wrapped strategy
    does not see. Entries called ``group.name`` become one plot per group with a line per name.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.

    Examples
    --------
    >>> strategy = SamplerMetrics()
    """

    name: ClassVar[str] = "sampler"
    decides = frozenset({"sampler statistics"})

    def __init__(self, strategy: Strategy | None = None) -> None:
        super().__init__(strategy)
        self._info: dict[str, Any] = {}

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Take the records out and average them over the nodes that sent one."""
        found: dict[str, list[float]] = {}
        for reply in replies:
            record: Any = config_in(reply.content, keys.SAMPLER) or {}
            reply.content.pop(keys.SAMPLER, None)
            for name in islice(record, MAX_METRICS):
                shows = len(name) <= MAX_TEXT and name.isprintable()
                if shows and isfinite(value := read_number(record, name)):
                    found.setdefault(name, []).append(value)
        plain: dict[str, float] = {}
        groups: dict[str, dict[str, float]] = {}
        for name, values in sorted(found.items()):
            group, _, part = name.partition(".")
            table = groups.setdefault(group, {}) if part else plain
            table[part or group] = float(np.mean(values))
        # A node may send a number under a name that is a group for others.
        self._info = plain | groups
        return replies

    def round_info(self) -> dict[str, Any]:
        """Return the means of this round."""
        return self._info

    def state_dict(self) -> StateDict:
        """Return nothing, because the means belong to a single round."""
        return {}
