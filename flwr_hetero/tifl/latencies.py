"""Timing nodes while they train; the paper's phase (section 4.2) is the case of rounds of its own.

A node is sent the instruction of a round like all others. The round goes on with the first replies;
a later one gives the node's latency and nothing else, and until it is here the node is not asked
again. A phase waits for all, and later joiners are sent a message that no round waits for.
"""

import json
import math
import time
from collections.abc import Sequence, Set
from logging import DEBUG, INFO, WARNING

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.errors import with_cure
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import identity_key
from flwr_hetero.server.profiling import profile_message, profile_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict
from flwr_hetero.tifl.late_replies import LateReplies, latency_of
from flwr_hetero.tifl.tiers import T_MAX, Tiers, form_tiers

MEMORY = 5
"""Latencies of a node that are kept after its first, which may be a cold start and counts only
until there is another; their median counts."""
MAX_FAILURES = 3
"""Failures in a row after which a node is left out until tiers are formed again."""
AT_ONCE = 1_000
"""Nodes that are timed at once, beside those of the rounds; the others follow."""
LARGE_FLEET = 10_000
"""Nodes from which on looking is rarer, in proportion, so that its mean cost does not grow."""
RENEW_EVERY = LOOK_EVERY = 10
"""Rounds after which tiers are formed again, and newcomers are looked for even if the number of
nodes has not changed; more on a fleet above ``LARGE_FLEET``."""
KINDS = ("train", "evaluate")
"""Rows of failures; a node that has trained begins both again."""
STATE = {"last_profile": int, "forming": int, "times": str, "failures": str}
"""Entries of a saved Latencies."""


class Latencies:
    """Keep the last latencies of each node, by identity, and which nodes not to ask.

    ``last`` is the round in which tiers were formed, ``first`` whether nodes got their first ones
    then, ``forming`` whether some have none, ``left_out`` are nodes whose replies to the last round
    do not count. ``phase``: rounds that count, and those before; None: nodes are timed in training.
    """

    def __init__(
        self, strategy: Selection, num_tiers: int, every: int | None, phase: tuple[int, int] | None
    ) -> None:
        self.strategy, self.fleet, self.nodes = strategy, strategy.fleet, strategy.fleet.nodes
        self.num_tiers, self.per_round = num_tiers, strategy.clients_per_round or 1
        self.every, self.phase = every, phase
        self.last, self.first, self.forming = 0, False, phase is None
        self.left_out: list[int] = []
        self.late = LateReplies(strategy)
        self._seconds: dict[str, list[float]] = {}
        self._fresh: set[str] = set()  # timed since the tiers were formed
        self._known: set[int] = set()
        self._more = True
        self._num_online = self._rounds_since = 0

    # --- tiers -------------------------------------------------------------------------

    def update(self, context: Exchange, grid: Grid, online: Set[int], tiers: Tiers) -> Tiers | None:
        """Form tiers as first latencies come in, then every so many rounds of all latencies."""
        known, since = len(tiers.latency), context.round - self.last
        if self.phase and (not known or (self.every and since >= self.every)):
            return self._profile(context, grid, online, *self.phase, first=not known)
        for work in self.late.collect(context, grid, online) if self.late.open else ():
            self._note(work.node_id, work.seconds)
        # while they form, a tenth more nodes make it worth while
        formed, last = None, not (self.late.open or self._more)
        first = self.forming and (last or (bool(self._fresh) and 10 * len(self._fresh) >= known))
        due = since >= (self.every or RENEW_EVERY * (1 + len(online) // LARGE_FLEET))
        if due and not self.phase:
            self.try_again()
        if self._seconds and not self.phase and (due or first):
            formed = self._form(context.round, tiers, first)
        self.forming &= not (last and self._seconds)
        if known and (formed is None or formed is tiers):
            self._place(tiers)
        if known or formed:
            self._fresh.clear()
        return formed

    def _form(self, server_round: int, before: Tiers, first: bool) -> Tiers | None:
        self.last, self.first = server_round, first
        names = sorted(self._seconds, key=identity_key)
        # the first latency may be a cold start
        warm = [self._seconds[name][1:] or self._seconds[name] for name in names]
        rounds = np.array([(row + [math.nan] * MEMORY)[:MEMORY] for row in warm]).T
        # who has not answered is slower than those that have
        now_s = self.fleet.clock.virtual_s
        in_flight = [now_s - work.began_s for work in self.late.open.values()]
        formed = form_tiers(names, rounds, self.num_tiers, self.per_round, in_flight)
        if formed is None:
            return None
        tiers, why = formed
        if first or tiers.moved(before):
            log_tiers(tiers, why, len(in_flight))
            return tiers
        # members stay, and their latencies are renewed
        before.seconds = tiers.seconds
        before.slowest_s, before.slowest_s2 = tiers.slowest_s, tiers.slowest_s2
        return before

    def _place(self, tiers: Tiers) -> None:
        """Give nodes that were timed for the first time a place in the tiers."""
        for name in sorted(self._fresh - tiers.tier.keys()):
            if (seconds := self._seconds[name][-1]) < T_MAX:
                tier = tiers.add(name, seconds)
                log(DEBUG, "TiFL: %s joins tier %d (%.3g s)", name, tier, seconds)

    def _note(self, node_id: int, seconds: float) -> None:
        """Keep a latency; without one the node has failed, and is asked again."""
        name = self.nodes.identity(node_id)
        if math.isnan(seconds):
            self.count("train", [], [name])
            self.retry([name])
        elif name not in self._seconds:
            self._fresh.add(name)
            self._seconds[name] = [seconds]
        else:
            first, *later = self._seconds[name]
            self._seconds[name] = [first, *[*later, seconds][-MEMORY:]]

    # --- the paper's phase ---------------------------------------------------------------

    def _profile(
        self, context: Exchange, grid: Grid, online: Set[int], sync: int, warmup: int, first: bool
    ) -> Tiers | None:
        """Time all nodes in rounds of their own, and wait for them."""
        self.last, self.first = context.round, first
        self.nodes.learn(grid)
        nodes, how = sorted(online), {"sync_rounds": sync, "warmup_rounds": warmup}
        _, rounds = profile_nodes(self.strategy, context, grid, nodes, **how, t_max=T_MAX)
        # 4.2: the ones that have timed out are incremented by T_max
        rounds = np.where(np.isnan(rounds), T_MAX, rounds)
        column = sorted(range(len(nodes)), key=lambda i: self.nodes.sort_key(nodes[i]))
        names = [self.nodes.identity(nodes[i]) for i in column]
        formed = form_tiers(names, rounds[:, column], self.num_tiers, self.per_round)
        if formed is None:
            what = f"TiFL: no node answered the profiling within {T_MAX:g} s"
            if first:
                why = "".join(f" ({failure['reason']})" for failure in self.fleet.failures[-1:])
                raise RuntimeError(with_cure(f"{what}{why}: check the ClientApp's log."))
            log(WARNING, "%s: the tiers stay as they are", what)
            return None
        tiers, why = formed
        log_tiers(tiers, why, 0)
        self.try_again()
        self.set_known(online)
        self._seconds = {name: [seconds] for name, seconds in tiers.latency.items()}
        return tiers

    def set_known(self, online: Set[int]) -> None:
        """Take these nodes, and no others, as profiled."""
        self._known, self._num_online = set(online), len(online)
        self._rounds_since, self._more = 0, False

    # --- nodes that have not been timed --------------------------------------------------

    def newcomers(
        self, context: Exchange, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Return nodes to be timed in this round; none with a phase, which asks them beside it."""
        new = self._unknown(grid, online, rng)
        if not (self.phase and new):
            return new
        kind, now_s = self.nodes.profile_kind or keys.PROFILE_MESSAGE, self.fleet.clock.virtual_s
        messages = [profile_message(self.strategy, context, n, kind, 0) for n in new]
        log(INFO, "TiFL: %d new nodes are profiled alongside training", len(new))
        list(grid.push_messages(messages))
        self.fleet.costs.sent(messages, now_s, T_MAX)
        for message in messages:
            # there is no id if the node is gone
            if message.metadata.message_id:
                self.late.add(message, message.metadata.dst_node_id, now_s, time.monotonic())
        return []

    def _unknown(self, grid: Grid, online: Set[int], rng: np.random.Generator) -> list[int]:
        # to look at all nodes takes time in proportion to their number
        size, self._rounds_since = 1 + len(online) // LARGE_FLEET, self._rounds_since + 1
        changed = len(online) != self._num_online
        if not self._more and self._rounds_since < (size if changed else LOOK_EVERY * size):
            return []
        self._num_online, self._rounds_since, self._more = len(online), 0, False
        new = sorted(online - self._known)
        if new:
            self.nodes.learn(grid)
        name, blocked = self.nodes.identity, self.blocked
        self._known.update(node for node in new if name(node) in self._seconds)
        new = [n for n in new if n not in self._known and name(n) not in blocked]
        room = max(0, max(AT_ONCE, self.per_round) - len(self.late.open))
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
        """Learn from the good replies of a round; return those that count: the first ``enough``."""
        if self.phase:
            return replies
        clock, round_s = self.fleet.clock, context.virtual_s
        began_s, pushed_s = clock.virtual_s - round_s, time.monotonic() - round_s
        self.left_out = [message.metadata.dst_node_id for message in context.surplus]
        for message in context.surplus:
            work = self.late.add(message, message.metadata.dst_node_id, began_s, pushed_s)
            work.missing_s = round_s
        seconds = {id(reply): latency_of(context, reply, online) for reply in replies}
        counting = set(sorted(seconds, key=lambda i: seconds[i])[:enough])
        end_s = max((seconds[i] for i in counting), default=0.0)
        # Flower's simulation waits for all: the clock goes back to where the round could go on
        waited = context.enough is None and len(replies) > len(counting)
        if early := waited and clock.emulated and round_s > end_s:
            context.virtual_s, clock.virtual_s = end_s, began_s + end_s
        for reply in replies:
            node_id, took_s = reply.metadata.src_node_id, seconds[id(reply)]
            if id(reply) not in counting:
                context.latency.pop(reply.metadata.reply_to_message_id, None)
                self.left_out.append(node_id)
            if early and took_s > end_s:
                # it is in flight until its time is over by the fleet's clock
                work = self.late.add(reply, node_id, began_s, pushed_s)
                work.over_s, work.seconds, work.is_here = began_s + took_s, took_s, True
            else:
                self._note(node_id, took_s)
        return [reply for reply in replies if id(reply) in counting]

    def wait(self, context: Exchange, grid: Grid, online: Set[int]) -> bool:
        """Wait for first work, else ask again who kept failing: no round may go by idle."""
        if self.late.open:
            self.late.wait(context, grid, online)
            return True
        if blocked := self.blocked:
            log(WARNING, "TiFL: no other node is left, %d that failed are back", len(blocked))
            self.try_again()
            self._more = True
        return bool(blocked)

    # --- nodes that keep failing -----------------------------------------------------------

    @property
    def blocked(self) -> set[str]:
        """Identities that are not asked."""
        return self.nodes.failed_often(MAX_FAILURES, *KINDS)

    def count(self, kind: str, good: Sequence[str], failed: Sequence[str]) -> None:
        """Count failures in a row; success ends the row."""
        for name in sorted(failed):
            node_id = self.nodes.find(name)
            if node_id is not None and self.nodes.fail(node_id, kind) == MAX_FAILURES:
                text = f"failed {MAX_FAILURES} times in a row, left out until tiers form again"
                self.nodes.warn(node_id, text)
        for name in good:
            for ended in KINDS if kind == "train" else (kind,):
                self.nodes.failures[ended].pop(name, None)

    def try_again(self) -> None:
        """Let nodes that kept failing try once more: another failure, and they are left out."""
        for row in (self.nodes.failures[kind] for kind in KINDS):
            for name, count in row.items():
                row[name] = min(count, MAX_FAILURES - 1)

    # --- state -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return latencies and failures; nodes at their first work are asked again on a resume."""
        return {
            "last_profile": self.last,
            "forming": int(self.forming),
            "times": json.dumps(self._seconds),
            "failures": json.dumps({kind: self.nodes.failures[kind] for kind in KINDS}),
        }

    def load_state_dict(self, state: StateDict, tiers: Tiers) -> None:
        """Continue from ``state_dict``."""
        self.last, self.forming = int(str(state["last_profile"])), bool(state["forming"])
        self._seconds = json.loads(str(state["times"]))
        self._fresh = set(self._seconds) - set(tiers.latency)
        for kind, row in json.loads(str(state["failures"])).items():
            self.nodes.failures[kind].update(row)


def log_tiers(tiers: Tiers, why: str, num_in_flight: int) -> None:
    """Log the size of the tiers, and why there are so few."""
    if why:
        log(WARNING, "TiFL: %s", why)
    sizes = [len(members) for members in tiers.members]
    text = "TiFL: tiers of %s nodes, fastest first; %d nodes dropped out%s"
    late = f", {num_in_flight} have not answered yet" if num_in_flight else ""
    log(DEBUG if num_in_flight else INFO, text, sizes, len(tiers.latency) - sum(sizes), late)
