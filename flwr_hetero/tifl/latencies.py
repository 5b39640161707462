"""Timing nodes while they train (section 4.2); the paper's phase is the case of all in own rounds.

A node is sent the instruction of a round like all others. The round goes on with the first
replies; a later one gives the node's latency and nothing else, and until it is here the node is
not asked again. In a phase all nodes are timed and waited for before the first round, and those
that join later are sent a message that no round waits for.
"""

import json
import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from logging import DEBUG, INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import with_cure
from flwr_hetero.server.context import POLL_S, Exchange
from flwr_hetero.server.nodes import identity_key, is_simulated, whole_grid
from flwr_hetero.server.profiling import TRUSTED, comparable_s, profile_message, profile_nodes
from flwr_hetero.server.reply_checks import judge_latency, reported_partition
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict
from flwr_hetero.tifl.tiers import T_MAX, Formed, Tiers, form_tiers

MEMORY = 5
"""Latencies of a node that are kept after its first, which may be a cold start and counts only
until there is another; their median counts."""
AT_ONCE = 1_000
"""Nodes that are timed at once, beside those of the rounds; the others follow."""
LARGE_FLEET = 10_000
"""Nodes from which on looking is rarer, in proportion, so that its mean cost does not grow."""
RENEW_EVERY = LOOK_EVERY = 10
"""Rounds after which tiers are formed again, and newcomers are looked for even if the number of
nodes has not changed; more on a fleet above ``LARGE_FLEET``."""
STATE = {"last_profile": int, "forming": int, "times": str}
"""Entries of a saved Latencies."""


@dataclass
class FirstWork:
    """What a node does when it is timed first: when it began and is over, by the fleet's clock.

    ``missing_s`` is for how long the reply was not there yet.
    """

    node_id: int
    began_s: float
    pushed_s: float
    over_s: float = math.inf
    seconds: float = math.nan
    missing_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """When it is over, or given up."""
        return min(self.over_s, self.began_s + T_MAX)


class Latencies:
    """Keep the last latencies of each node, by identity, and which nodes not to wait for.

    ``last`` is the round in which tiers were formed, ``forming`` whether some nodes have never
    been placed, ``left_out`` are nodes whose replies to the last round do not count. ``phase`` has
    the rounds that count and those before them; None: nodes are timed while they train.
    """

    def __init__(
        self, strategy: Selection, num_tiers: int, every: int | None, phase: tuple[int, int] | None
    ) -> None:
        self.strategy, self.fleet, self.nodes = strategy, strategy.fleet, strategy.fleet.nodes
        self.num_tiers, self.every, self.phase = num_tiers, every, phase
        self.last, self.forming = 0, phase is None
        self.left_out: list[int] = []
        self._seconds: dict[str, list[float]] = {}
        self._fresh: set[str] = set()  # timed since the tiers were formed
        self._first: dict[str, FirstWork] = {}
        self._known: Set[int] = set()
        self._more = True
        self._num_online = self._rounds_since = 0

    # --- tiers -------------------------------------------------------------------------

    def update(
        self, context: Exchange, grid: Grid, online: Set[int], tiers: Tiers
    ) -> Formed | None:
        """Form tiers as first latencies come in, then every so many rounds of all latencies.

        While they form, a tenth more nodes make it worth while; one that has not answered is
        slower than those that have.
        """
        known, since = len(tiers.latency), context.round - self.last
        if self.phase and (not known or (self.every and since >= self.every)):
            return self._profile(context, grid, online, self.phase, first=not known)
        self._collect(context, grid, online)
        due = since >= (self.every or RENEW_EVERY * (1 + len(online) // LARGE_FLEET))
        if due and self.every:
            self._forget_dropouts(tiers)
        last = not (self._first or self._more)
        first = self.forming and (last or (bool(self._fresh) and 10 * len(self._fresh) >= known))
        formed = None
        if self._seconds and not self.phase and (due or first):
            formed = self._form(context.round, tiers, first)
        self.forming &= not (last and self._seconds)
        if known and (formed is None or formed.tiers is tiers):
            self._place(tiers)
        if known or formed:
            self._fresh.clear()
        return formed

    def _form(self, server_round: int, before: Tiers, first: bool) -> Formed | None:
        self.last = server_round
        names = sorted(self._seconds, key=identity_key)
        warm = [self._seconds[name][1:] or self._seconds[name] for name in names]
        rounds = np.array([(row + [math.nan] * MEMORY)[:MEMORY] for row in warm]).T
        now_s = self.fleet.clock.virtual_s
        in_flight = [now_s - work.began_s for work in self._first.values()]
        formed = form_tiers(names, rounds, self.num_tiers, in_flight)
        if formed is None:
            return None
        if not first and not formed.tiers.moved(before):
            before.seconds = formed.tiers.seconds
            return formed._replace(tiers=before)
        formed.log(len(in_flight))
        return formed._replace(first=first)

    def _place(self, tiers: Tiers) -> None:
        """Give nodes that were timed for the first time a place in the tiers."""
        for name in sorted(self._fresh - tiers.tier.keys()):
            if (seconds := self._seconds[name][-1]) < T_MAX:
                tier = tiers.add(name, seconds)
                log(DEBUG, "TiFL: %s joins tier %d (%.3g s)", name, tier, seconds)
        self._fresh.clear()

    def _forget_dropouts(self, tiers: Tiers) -> None:
        """Time nodes again that were too slow for any tier."""
        dropouts = tiers.latency.keys() - tiers.tier.keys()
        for name in dropouts:
            self._seconds.pop(name, None)
        self.retry(sorted(dropouts))

    def _note(self, node_id: int, seconds: float) -> None:
        name = self.nodes.identity(node_id)
        if name not in self._seconds:
            self._fresh.add(name)
            self._seconds[name] = [seconds]
        else:
            first, *later = self._seconds[name]
            self._seconds[name] = [first, *[*later, seconds][-MEMORY:]]

    # --- the paper's phase ---------------------------------------------------------------

    def _profile(
        self,
        context: Exchange,
        grid: Grid,
        online: Set[int],
        phase: tuple[int, int],
        *,
        first: bool,
    ) -> Formed | None:
        """Time all nodes in rounds of their own, and wait for them."""
        self.last = context.round
        self.nodes.learn(grid)
        sync, warmup = phase
        counts = {"sync_rounds": sync, "warmup_rounds": warmup}
        how = (self.strategy, context, grid, sorted(online))
        node_ids, rounds = profile_nodes(*how, **counts, t_max=T_MAX)
        # 4.2: those that have timed out are incremented by T_max
        rounds = np.where(np.isnan(rounds), T_MAX, rounds)
        column = sorted(range(len(node_ids)), key=lambda i: self.nodes.sort_key(node_ids[i]))
        names = [self.nodes.identity(node_ids[i]) for i in column]
        formed = form_tiers(names, rounds[:, column], self.num_tiers)
        if formed is None:
            what = f"TiFL: no node answered the profiling within {T_MAX:g} s"
            if first:
                why = "".join(f" ({failure.reason})" for failure in self.fleet.info.failures[-1:])
                raise RuntimeError(with_cure(f"{what}{why}: check the ClientApp's log."))
            log(WARNING, "%s: the tiers stay as they are", what)
            return None
        formed.log(0)
        self.set_known(online)
        self._seconds = {name: [seconds] for name, seconds in formed.tiers.latency.items()}
        return formed._replace(first=first)

    def set_known(self, online: Set[int]) -> None:
        """Take these nodes, and no others, as profiled."""
        self._known, self._num_online = set(online), len(online)
        self._rounds_since, self._more = 0, False

    # --- nodes that have not been timed --------------------------------------------------

    def newcomers(
        self, context: Exchange, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Return nodes to be timed in this round; none in a phase, which asks them beside it."""
        new = self._newcomers(grid, online, rng)
        if not (self.phase and new):
            return new
        kind = self.nodes.profile_kind or keys.PROFILE_MESSAGE
        messages = [profile_message(self.strategy, context, n, kind, 0) for n in new]
        log(INFO, "TiFL: %d new nodes are profiled alongside training", len(new))
        list(grid.push_messages(messages))
        now_s = self.fleet.clock.virtual_s
        self.fleet.costs.sent(messages, now_s, T_MAX)
        for node_id, message in zip(new, messages, strict=True):
            if message.metadata.message_id:  # none if the node is gone
                self._add(message, FirstWork(node_id, now_s, time.monotonic()))
        return []

    def _newcomers(self, grid: Grid, online: Set[int], rng: np.random.Generator) -> list[int]:
        size, self._rounds_since = 1 + len(online) // LARGE_FLEET, self._rounds_since + 1
        changed = len(online) != self._num_online
        if not self._more and self._rounds_since < (size if changed else LOOK_EVERY * size):
            return []
        self._num_online, self._rounds_since, self._more = len(online), 0, False
        new = sorted(online - self._known)
        if new:
            self.nodes.learn(grid)
        name = self.nodes.identity
        self._known.update(node for node in new if name(node) in self._seconds)
        new = [n for n in new if n not in self._known and n not in self.nodes.blocked]
        room = max(0, max(AT_ONCE, self.strategy.clients_per_round or 0) - len(self._first))
        if len(new) > room:
            new = sorted(rng.choice(new, size=room, replace=False).tolist())
            self._more = True
        self._known.update(new)
        return new

    def retry(self, names: Sequence[str]) -> None:
        """Ask nodes without a latency again."""
        for name in names:
            if name not in self._seconds and (node_id := self.nodes.find(name)) is not None:
                self._known.discard(node_id)
                self._more |= self.phase is None

    # --- a round's replies -----------------------------------------------------------------

    def take(
        self, context: Exchange, replies: list[Message], enough: int | None, online: Set[int]
    ) -> list[Message]:
        """Learn from the good replies of a round; return those that count: the first ``enough``.

        The others are in flight until their time is over by the fleet's clock: Flower's simulation
        waits for all, and the clock is then set back to where the round could go on.
        """
        if self.phase:
            return replies
        clock, round_s = self.fleet.clock, context.virtual_s
        began_s, pushed_s = clock.virtual_s - round_s, time.monotonic() - round_s
        self.left_out = [message.metadata.dst_node_id for message in context.surplus]
        for message in context.surplus:
            node_id = message.metadata.dst_node_id
            self._add(message, FirstWork(node_id, began_s, pushed_s, missing_s=round_s))
        seconds = {id(reply): self._latency_of(context, reply, online) for reply in replies}
        kept = sorted(replies, key=lambda reply: seconds[id(reply)])[:enough]
        end_s = max((seconds[id(reply)] for reply in kept), default=0.0)
        waited = context.enough is None and len(replies) > len(kept)
        early = waited and clock.emulated and round_s > end_s
        if early:
            context.virtual_s, clock.virtual_s = end_s, began_s + end_s
        counting = {id(reply) for reply in kept}
        for reply in replies:
            node_id, took_s = reply.metadata.src_node_id, seconds[id(reply)]
            if id(reply) not in counting:
                context.latency.pop(reply.metadata.reply_to_message_id, None)
                self.left_out.append(node_id)
            if early and took_s > end_s:
                self._add(reply, FirstWork(node_id, began_s, pushed_s, began_s + took_s, took_s))
            else:
                self._note(node_id, took_s)
        return [reply for reply in replies if id(reply) in counting]

    def _latency_of(self, context: Exchange, reply: Message, online: Set[int]) -> float:
        """Return a reply's latency; a node that has rejoined gets its old name."""
        node_id, partition = reply.metadata.src_node_id, reported_partition(reply)
        if partition is not None and not self.nodes.knows(node_id):
            self.nodes.come_back(node_id, partition, online)
        return comparable_s(context, reply)

    def _add(self, message: Message, work: FirstWork) -> None:
        self._first[message.metadata.message_id] = work
        self.nodes.busy.add(work.node_id)

    # --- late replies ------------------------------------------------------------------

    def _collect(self, context: Exchange, grid: Grid, online: Set[int]) -> None:
        """Take in the first work that is over; nodes that have failed at it are asked again."""
        self._pull(context, grid, online, enough=None)
        now_s = self.fleet.clock.virtual_s
        for message_id, work in list(self._first.items()):
            if work.ends_s > now_s:
                continue
            del self._first[message_id]
            self.nodes.busy.discard(work.node_id)
            if work.over_s <= now_s and math.isfinite(work.seconds):
                self._note(work.node_id, work.seconds)
            else:
                self.nodes.has_failed(work.node_id)
                self.retry([self.nodes.identity(work.node_id)])

    def wait(self, context: Exchange, grid: Grid, online: Set[int]) -> bool:
        """Wait until some first work is over, if there is any: no round may go by idle."""
        clock = self.fleet.clock
        if not self._first:
            return False
        self._pull(context, grid, online, enough=1)
        if self._first and not hasattr(whole_grid(grid), "virtual_time_s") and not clock.emulated:
            time.sleep(POLL_S)
            clock.virtual_s += POLL_S
        else:
            over_s = min(work.ends_s for work in self._first.values())
            clock.virtual_s = max(clock.virtual_s, over_s)
        return True

    def _pull(self, context: Exchange, grid: Grid, online: Set[int], enough: int | None) -> None:
        """Look for replies; on an emulated fleet ``enough`` of them are waited for."""
        waiting = [i for i, work in self._first.items() if work.over_s == math.inf]
        whole: Any = whole_grid(grid)
        if not waiting:
            return
        if hasattr(whole, "virtual_time_s"):  # its pull_messages would take time
            limit_s = 0.0 if enough is None else T_MAX
            replies: Sequence[Message] = whole.wait_for(waiting, limit_s, enough)
        else:
            replies = list(grid.pull_messages(waiting))
        self.fleet.costs.answered(replies, self.fleet.clock.virtual_s)
        for reply in replies:
            if (work := self._first.get(reply.metadata.reply_to_message_id)) is not None:
                self._time(context, reply, work, online, simulated=is_simulated(grid))
        now_s = self.fleet.clock.virtual_s
        for work in (self._first[message_id] for message_id in waiting):
            if work.over_s == math.inf:
                work.missing_s = now_s - work.began_s

    def _time(
        self, context: Exchange, reply: Message, work: FirstWork, online: Set[int], simulated: bool
    ) -> None:
        """Learn from a late reply how long its node took."""
        work.over_s = now_s = self.fleet.clock.virtual_s
        if not reply.has_content():
            return
        seen_s = time.monotonic() - work.pushed_s
        latency, complaint = judge_latency(
            reply, None if simulated else seen_s, simulated=simulated
        )
        if complaint:
            self.nodes.warn(work.node_id, f"latency not believed: {complaint}")
        partition = reported_partition(reply)
        if partition is not None and not self.nodes.knows(work.node_id):
            self.nodes.come_back(work.node_id, partition, online)
        if latency is None:
            work.seconds = seen_s
            return
        work.seconds = max(latency.seconds, TRUSTED * work.missing_s)
        if latency.emulated:
            work.over_s = max(now_s, work.began_s + work.seconds)
        context.latency[reply.metadata.reply_to_message_id] = latency
        for wrapper in self.strategy.top.wrappers():
            wrapper.on_profile_replies(context, [reply])

    # --- state -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the latencies; nodes at their first work are asked again after a resume."""
        times = json.dumps(self._seconds)
        return {"last_profile": self.last, "forming": int(self.forming), "times": times}

    def load_state_dict(self, state: StateDict, tiers: Tiers) -> None:
        """Continue from ``state_dict``."""
        self.last, self.forming = int(str(state["last_profile"])), bool(state["forming"])
        self._seconds = json.loads(str(state["times"]))
        self._fresh = set(self._seconds) - set(tiers.latency)
