"""Timing nodes while they train: no rounds of their own, and no waiting for the slow ones.

A node is sent the instruction of a round like all others. The round goes on with the first
replies; a later one gives the node's latency and nothing else, and until it is here the node is
not asked again.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from logging import DEBUG, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero._flwr import log
from flwr_hetero.server.checks import judge_latency, reported_partition
from flwr_hetero.server.context import POLL_S, TRUSTED, Exchange
from flwr_hetero.server.nodes import identity_key, is_simulated, whole_grid
from flwr_hetero.server.selection import Selection
from flwr_hetero.tifl.failures import FailureCounter
from flwr_hetero.tifl.grouping import Found, TierRule, group
from flwr_hetero.tifl.tiers import Tiers

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
"""Entries of a saved TrainingTimes."""


@dataclass
class Job:
    """A node's first work: when it began and will be over, by the fleet's clock, and how long.

    ``missing_s`` is for how long the reply was not there yet.
    """

    node_id: int
    began_s: float
    pushed_s: float
    over_s: float = math.inf
    seconds: float = math.nan
    missing_s: float = 0.0


class TrainingTimes:
    """Keep the last latencies of each node, by identity, and which nodes not to wait for.

    ``last`` is the round in which tiers were formed, ``forming`` whether some nodes have never
    been placed, ``left_out`` are nodes whose replies to the last round do not count.
    """

    in_training: ClassVar[bool] = True
    """Whether rounds go on before all nodes have answered."""

    def __init__(
        self, strategy: Selection, rule: TierRule, every: int | None, failures: FailureCounter
    ) -> None:
        self.strategy, self.fleet = strategy, strategy.fleet
        self.rule, self.every, self.failures = rule, every, failures
        self.last, self.forming = 0, True
        self.left_out: list[int] = []
        self._seconds: dict[str, list[float]] = {}
        self._fresh: set[str] = set()  # timed since the tiers were formed
        self._jobs: dict[str, Job] = {}
        self._known: set[int] = set()
        self._more = True
        self._num_online = self._rounds_since = 0
        self._registry = self.fleet.nodes

    # --- tiers -------------------------------------------------------------------------

    def start(self, context: Exchange, grid: Grid, online: Set[int]) -> Found | None:
        """Begin a run without tiers."""

    def update(self, context: Exchange, grid: Grid, online: Set[int], tiers: Tiers) -> Found | None:
        """Form tiers as first latencies come in, then every so many rounds of all latencies.

        While they form, a tenth more nodes make it worth while; one that has not answered is
        slower than those that have.
        """
        self.failures.record_late(set(self._collect(context, grid, online)))
        every = self.every or RENEW_EVERY * (1 + len(online) // LARGE_FLEET)
        due, known = context.round - self.last >= every, len(tiers.latency)
        if due:
            self._begin_again(tiers) if self.every else self.failures.try_again()
        last = not (self._jobs or self._more)
        first = self.forming and (last or (bool(self._fresh) and 10 * len(self._fresh) >= known))
        found = (
            self._form(context.round, tiers, first) if self._seconds and (due or first) else None
        )
        self.forming &= not (last and self._seconds)
        if known and (found is None or found.tiers is tiers):
            self._place(tiers)
        if known or found:
            self._fresh.clear()
        return found

    def _place(self, tiers: Tiers) -> None:
        """Give nodes that were timed for the first time a place in the tiers."""
        for name in sorted(self._fresh - tiers.tier.keys()):
            if (seconds := self._seconds[name][-1]) < self.rule.t_max:
                tier = tiers.add(name, seconds)
                log(DEBUG, "TiFL: %s joins tier %d (%.3g s)", name, tier, seconds)
        self._fresh.clear()

    def _begin_again(self, tiers: Tiers) -> None:
        """Ask nodes again that kept failing or were too slow for any tier."""
        self.failures.clear()
        dropouts = tiers.latency.keys() - tiers.tier.keys()
        for name in dropouts:
            self._seconds.pop(name, None)
        self.retry(sorted(dropouts))

    def _form(self, server_round: int, before: Tiers, first: bool) -> Found | None:
        self.last = server_round
        names = sorted(self._seconds, key=identity_key)
        warm = [self._seconds[name][1:] or self._seconds[name] for name in names]
        rounds = np.array([(row + [math.nan] * MEMORY)[:MEMORY] for row in warm]).T
        now_s = self.fleet.clock.virtual_s
        latency = np.nanmedian(rounds, axis=0)
        at_work = [now_s - job.began_s for job in self._jobs.values()]
        found = group(names, latency, latency >= self.rule.t_max, rounds, self.rule, at_work)
        if found is None:
            return None
        if not first and not found.tiers.moved(before):
            return found._replace(tiers=before)
        found.log(len(at_work))
        return found._replace(first=first)

    def _note(self, node_id: int, seconds: float) -> None:
        name = self._registry.identity(node_id)
        if name not in self._seconds:
            self._fresh.add(name)
            self._seconds[name] = [seconds]
        else:
            first, *later = self._seconds[name]
            self._seconds[name] = [first, *[*later, seconds][-MEMORY:]]

    # --- nodes that have not been timed --------------------------------------------------

    def newcomers(
        self, context: Exchange, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Return nodes that have no latency and are not at work."""
        size, self._rounds_since = 1 + len(online) // LARGE_FLEET, self._rounds_since + 1
        changed = len(online) != self._num_online
        if not self._more and self._rounds_since < (size if changed else LOOK_EVERY * size):
            return []
        self._num_online, self._rounds_since, self._more = len(online), 0, False
        new = sorted(online - self._known)
        if new:
            self._registry.learn(grid)
        name, blocked = self._registry.identity, self.failures.blocked
        self._known.update(node for node in new if name(node) in self._seconds)
        new = [n for n in new if n not in self._known and name(n) not in blocked]
        at_once = max(AT_ONCE, self.strategy.clients_per_round or 0)
        room = max(0, at_once - len(self._jobs))
        if len(new) > room:
            new = sorted(rng.choice(new, size=room, replace=False).tolist())
            self._more = True
        self._known.update(new)
        return new

    def retry(self, names: Sequence[str]) -> None:
        """Ask nodes without a latency again."""
        for name in names:
            if name not in self._seconds and (node_id := self._registry.find(name)) is not None:
                self._known.discard(node_id)
                self._more = True

    # --- a round's replies -----------------------------------------------------------------

    def take(
        self, context: Exchange, replies: list[Message], enough: int | None, online: Set[int]
    ) -> Sequence[Message]:
        """Learn from the good replies of a round; return those that count: the first ``enough``.

        The others are at work until their time is over by the fleet's clock: Flower's simulation
        waits for all, and the clock is then set back to where the round could go on.
        """
        now, clock, waited = context, self.fleet.clock, context.enough is None
        began_s, pushed_s = clock.virtual_s - now.virtual_s, time.monotonic() - now.virtual_s
        self.left_out = [message.metadata.dst_node_id for message in now.surplus]
        for message in now.surplus:
            job = Job(message.metadata.dst_node_id, began_s, pushed_s, missing_s=now.virtual_s)
            self._add(message, job)
        seconds = {id(reply): self._latency_of(context, reply, online) for reply in replies}
        first = sorted(replies, key=lambda reply: seconds[id(reply)])[:enough]
        kept = {id(reply) for reply in first}
        end_s = max((seconds[i] for i in kept), default=0.0)
        early = len(replies) > len(first) and waited and clock.emulated and now.virtual_s > end_s
        if early:
            now.virtual_s, clock.virtual_s = end_s, began_s + end_s
        for reply in replies:
            node_id, took_s = reply.metadata.src_node_id, seconds[id(reply)]
            if id(reply) not in kept:
                now.latency.pop(reply.metadata.reply_to_message_id, None)
                self.left_out.append(node_id)
            if early and took_s > end_s:
                self._add(reply, Job(node_id, began_s, pushed_s, began_s + took_s, took_s))
            else:
                self._note(node_id, took_s)
        return [reply for reply in replies if id(reply) in kept]

    def _latency_of(self, context: Exchange, reply: Message, online: Set[int]) -> float:
        """Return a reply's latency; a node that is back gets its old name."""
        node_id, partition = reply.metadata.src_node_id, reported_partition(reply)
        if partition is not None and not self._registry.knows(node_id):
            self._registry.rejoin(node_id, partition, online)
        return context.comparable_s(reply)

    def _add(self, message: Message, job: Job) -> None:
        self._jobs[message.metadata.message_id] = job
        self._registry.in_flight[job.node_id] = job.began_s

    # --- late replies ------------------------------------------------------------------

    def _collect(self, context: Exchange, grid: Grid, online: Set[int]) -> list[str]:
        """Take in the first work that is over; return the nodes that have failed at it."""
        self._pull(context, grid, online, enough=None)
        failed, now_s = [], self.fleet.clock.virtual_s
        for message_id, job in list(self._jobs.items()):
            if min(job.over_s, job.began_s + self.rule.t_max) > now_s:
                continue
            del self._jobs[message_id]
            self._registry.in_flight.pop(job.node_id, None)
            if job.over_s <= now_s and math.isfinite(job.seconds):
                self._note(job.node_id, job.seconds)
            else:
                failed.append(self._registry.identity(job.node_id))
        self.retry(failed)
        return failed

    def wait(self, context: Exchange, grid: Grid, online: Set[int]) -> bool:
        """Wait until some first work is over, for there is no other node to train.

        Without any such work nodes that kept failing are asked again: no round may go by idle.
        """
        clock = self.fleet.clock
        if not self._jobs:
            if blocked := self.failures.blocked:
                log(WARNING, "TiFL: no other node is left, %d that failed are back", len(blocked))
                self.failures.clear()
                self._more = True
            return bool(blocked)
        self._pull(context, grid, online, enough=1)
        if self._jobs and not hasattr(whole_grid(grid), "virtual_time_s") and not clock.emulated:
            time.sleep(POLL_S)
            clock.virtual_s += POLL_S
        else:
            over_s = min(
                min(job.over_s, job.began_s + self.rule.t_max) for job in self._jobs.values()
            )
            clock.virtual_s = max(clock.virtual_s, over_s)
        return True

    def _pull(self, context: Exchange, grid: Grid, online: Set[int], enough: int | None) -> None:
        """Look for replies; on an emulated fleet ``enough`` of them are waited for."""
        waiting = [i for i, job in self._jobs.items() if job.over_s == math.inf]
        fleet: Any = whole_grid(grid)
        if not waiting:
            return
        if hasattr(fleet, "virtual_time_s"):  # its pull_messages would take time
            replies: Sequence[Message] = fleet.wait_for(
                waiting, 0.0 if enough is None else self.rule.t_max, enough
            )
        else:
            replies = list(grid.pull_messages(waiting))
        clock, simulated = self.fleet.clock, is_simulated(grid)
        self.fleet.costs.answered(replies, clock.virtual_s)
        for reply in replies:
            if (job := self._jobs.get(reply.metadata.reply_to_message_id)) is None:
                continue
            job.over_s = clock.virtual_s
            if not reply.has_content():
                continue
            seen_s = time.monotonic() - job.pushed_s
            bound_s = None if simulated else seen_s
            latency, complaint = judge_latency(reply, bound_s, simulated=simulated)
            if complaint:
                self._registry.warn(job.node_id, f"latency not believed: {complaint}")
            partition = reported_partition(reply)
            if partition is not None and not self._registry.knows(job.node_id):
                self._registry.rejoin(job.node_id, partition, online)
            least_s = TRUSTED * job.missing_s
            job.seconds = max(latency.seconds, least_s) if latency else seen_s
            if latency and latency.emulated:
                job.over_s = max(clock.virtual_s, job.began_s + job.seconds)
            if latency:
                context.latency[reply.metadata.reply_to_message_id] = latency
                for wrapper in self.strategy.top.wrappers():
                    wrapper.on_profile_replies(context, [reply])
        for message_id in waiting:
            if (job := self._jobs[message_id]).over_s == math.inf:
                job.missing_s = clock.virtual_s - job.began_s

    # --- state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, str | int]:
        """Return the latencies; nodes at their first work are asked again after a resume."""
        times = json.dumps(self._seconds)
        return {"last_profile": self.last, "forming": int(self.forming), "times": times}

    def load_state_dict(self, state: Mapping[str, object], tiers: Tiers) -> None:
        """Continue from ``state_dict``."""
        self.last, self.forming = int(str(state["last_profile"])), bool(state["forming"])
        self._seconds = json.loads(str(state["times"]))
        self._fresh = set(self._seconds) - set(tiers.latency)
