"""Tiers of similar latency in seconds (section 4.2), and timing nodes while they train.

The paper's histogram is split into groups of equal size, and the median of a group stands for its
mean. ``speeds_differ`` and nodes that have not answered yet are our own.

A node is sent the instruction of a round like all others. The round goes on with the first replies;
a later one gives the node's latency and nothing else, and until it is here the node is not asked.
The paper's phase is the case of rounds of its own.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from logging import WARNING
from zlib import crc32

import numpy as np
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import ArrayLike, NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.exchange.checks import Expected, is_good, reported_partition
from flwr_hetero.exchange.context import EQUAL_S, TRUSTED, Exchange
from flwr_hetero.exchange.nodes import identity_key, is_simulated
from flwr_hetero.records import read_number
from flwr_hetero.server.loop import metric_of
from flwr_hetero.server.profiling import profile_message, profile_nodes
from flwr_hetero.server.selection import Selection
from flwr_hetero.state_dict import StateDict
from flwr_hetero.tifl.algorithm import Available, Floats

T_MAX = 600.0
"""Seconds after which a node that has not answered is given up, the paper's T_max."""
SAME = 2.0
"""Nodes timed once are equally fast if the slowest takes less than so many times the fastest's."""
MIN_REPEATS = 5
"""Repeated measurements that it takes to know how a node's latencies spread."""
PANEL = 10
"""Nodes of each tier that evaluate where the wrapped strategy does not."""
MEMORY = 5
"""Latencies of a node that are kept after its first; their median counts."""
MAX_FAILURES = 3
"""Failures in a row after which a node is left out until tiers are formed again."""
AT_ONCE = 1_000
"""Nodes that are timed at once, beside those of the rounds; the others follow."""
RENEW_EVERY = LOOK_EVERY = 10
"""Rounds after which tiers are formed again, and newcomers looked for among as many nodes."""
STATE = {"last_profile": int, "forming": int, "times": str, "failures": str}


def quantile_tiers(latency: Floats, num_tiers: int) -> tuple[Floats, Floats]:
    """Cut the sorted nodes into tiers of equal size; nodes of equal latency share a tier.

    latency: (num_nodes,), NaN for a dropout -> between min(num_tiers, different latencies) tiers,
    (num_tiers - 1,), and of each, (num_tiers,).

    >>> quantile_tiers(np.array([0.5, 8.0, 1.0, 7.0, np.nan]), num_tiers=2)
    (array([4.]), array([0.75, 7.5 ]))
    """
    ordered = np.sort(latency[~np.isnan(latency)])
    # These are positions that separate no equal latencies.
    changes = np.flatnonzero(np.diff(ordered)) + 1
    cuts: list[int] = []
    # The first change that is free, and the first node of the current tier.
    first = 0
    begin = 0
    for remaining in range(min(num_tiers - 1, len(changes)), 0, -1):
        ideal = begin + (len(ordered) - begin) / (remaining + 1)
        # This leaves one for each later cut.
        free = changes[first : len(changes) - remaining + 1]
        nearest = int(np.abs(free - ideal).argmin())
        first = first + nearest + 1
        begin = int(free[nearest])
        cuts.append(begin)
    at = np.array(cuts, np.int64)
    # A boundary lies midway between two nodes, unless they are neighbouring floats.
    slowest = ordered[at - 1]
    fastest = ordered[at]
    middle = slowest + (fastest - slowest) / 2
    median = np.array([np.median(part) for part in np.split(ordered, at)])
    return np.where(middle < fastest, middle, slowest), median


def place(latency: Floats, boundaries: Floats) -> NDArray[np.int64]:
    """Return the tiers of latencies: (any,), (num_tiers - 1,) -> (any,), -1 for NaN.

    >>> place(np.array([0.1, 4.0, 99.0, np.nan]), boundaries=np.array([4.0]))
    array([ 0,  0,  1, -1])
    """
    return np.where(np.isnan(latency), -1, np.searchsorted(boundaries, latency))


def speeds_differ(rounds: Floats) -> bool:
    r"""Return whether latencies differ more between nodes than from time to time on one node.

    .. math:: \hat\sigma^2_{between} > \hat\sigma^2_{within} \text{ of } \log l_{r,i}

    These are the variance components of a one-way analysis of variance. With fewer than
    ``MIN_REPEATS`` repeated measurements in all, the slowest node must take at least ``SAME``
    times as long as the fastest.

    rounds: (num_measurements, num_nodes), NaN for none.

    >>> noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((3, 10)))
    >>> speeds_differ(noise), speeds_differ(noise * np.linspace(1, 4, 10))
    (False, True)
    """
    # A clock may be too coarse to measure any time.
    logs = np.log(np.maximum(rounds, 1e-9))
    count = np.sum(~np.isnan(logs), axis=0)
    logs = logs[:, count > 0]
    count = count[count > 0]
    total = count.sum()
    groups = len(count)
    if groups < 2:
        return False
    mean = np.nansum(logs, axis=0) / count
    if total - groups < MIN_REPEATS:
        return bool(np.ptp(mean) >= np.log(SAME))
    within = np.nansum((logs - mean) ** 2) / (total - groups)
    around = mean - (count @ mean) / total
    typical = (total - (count**2).sum() / total) / (groups - 1)
    between = (count @ around**2 / (groups - 1) - within) / typical
    return bool(between > within)


def paper_estimate(tier_latency: Floats, tier_probs: Floats, num_rounds: int) -> float:
    r"""Estimate the training time from one latency per tier (Eq. 6).

    .. math:: L_{all} = \sum_i L_{tier_i} P_i R

    A round lasts as long as its slowest node, so that this is too low where latencies within a
    tier differ.
    """
    return float(np.dot(tier_latency, tier_probs)) * num_rounds


class Tiers:
    """Which node is in which tier, by stable identity; ``latency`` has the dropouts, too.

    ``seconds`` has the median of each tier.
    """

    why_so_few = ""

    def __init__(
        self,
        latency: dict[str, float],
        tier: dict[str, int],
        boundaries: ArrayLike = (),
        seconds: ArrayLike = (),
    ) -> None:
        self.latency = latency
        self.tier = tier
        self.boundaries = np.array(boundaries)
        self.seconds = np.array(seconds)
        self.members: list[list[str]] = [[] for _ in range(len(self.boundaries) + 1)]
        for identity, number in tier.items():
            self.members[number].append(identity)

    @property
    def sizes(self) -> Floats:
        """Number of nodes of each tier; at least 1, for some may be in flight."""
        return np.array([max(1.0, len(names)) for names in self.members])

    def add(self, identity: str, latency_s: float) -> int:
        """Place a late joiner by the boundaries between the tiers."""
        tier = int(place(np.array([latency_s]), self.boundaries)[0])
        self.latency[identity] = latency_s
        self.tier[identity] = tier
        self.members[tier].append(identity)
        return tier

    def moved(self, before: "Tiers") -> bool:
        """Return whether a twentieth of the nodes, at least one, has another tier than before."""
        others = sum(before.tier.get(name) != tier for name, tier in self.tier.items())
        others += len(before.tier.keys() - self.tier.keys())
        fewer = len(self.members) != len(before.members)
        return fewer or others >= max(1, 0.05 * len(self.tier))

    def panel(self, available: Available) -> list[int]:
        """Return up to ``PANEL`` available nodes of every tier, the same each time if they are."""
        chosen: list[int] = []
        for names in self.members:
            first = nsmallest(2 * PANEL, names, lambda name: crc32(name.encode()))
            chosen += [node for name in first if (node := available(name)) is not None][:PANEL]
        return chosen

    def accuracy(self, reported: Mapping[str, MetricRecord], weight_key: str) -> Floats:
        """Average the reported accuracy of each tier (Alg. 2, l. 22), weighted by examples.

        reported: by identity -> (num_tiers,), NaN where unknown.
        """
        total, weight = np.zeros((2, len(self.members)))
        for name, metrics in reported.items():
            accuracy = accuracy_of(metrics)
            examples = read_number(metrics, weight_key, 1)
            if name in self.tier and not np.isnan(accuracy):
                total[self.tier[name]] += accuracy * examples
                weight[self.tier[name]] += examples
        if reported and not weight.any():
            text = "TiFL: none of the evaluation's metrics %s has 'acc' or 'loss' in its name"
            log(WARNING, text, sorted(next(iter(reported.values()))))
        with np.errstate(invalid="ignore"):
            return np.asarray(total / weight)


def accuracy_of(metrics: MetricRecord) -> float:
    """Read the metric that says how good the model is, more is better; NaN if it says nothing."""
    name = metric_of(list(metrics))
    value = read_number(metrics, name)
    return value if "acc" in name.lower() else -value


def form_tiers(
    names: list[str], rounds: Floats, num_tiers: int, in_flight: Sequence[float] = ()
) -> Tiers | None:
    """Group nodes by latency (section 4.2); None if none has answered in time.

    rounds: (num_measurements, num_nodes), NaN for none; in_flight: for how long other nodes have
    not answered yet: they are slower than all that have, no two equally fast.

    >>> tiers = form_tiers(["a", "b"], np.array([[1.0, 4.0]]), 3, in_flight=[2.0])
    >>> tiers.tier, tiers.boundaries.round(3)
    ({'a': 0, 'b': 1}, array([2.5, 4. ]))
    """
    latency = np.nanmedian(np.minimum(rounds, T_MAX), axis=0)
    rounds = np.where(rounds < T_MAX, rounds, np.nan)
    # 4.2: dropouts have timed out in every round
    dropout = np.isnan(rounds).all(axis=0)
    if dropout.all():
        return None
    known = np.where(dropout, np.nan, latency)
    why = ""
    if not in_flight and num_tiers > 1 and not speeds_differ(rounds[:, ~dropout]):
        num_tiers = 1
        why = _why_one_tier(np.nanmin(known), np.nanmax(known))
    if in_flight:
        least = np.maximum(in_flight, latency.max())
        others = least * (1 + 1e-6 * np.arange(1, len(least) + 1))
        known = np.concatenate([known, others])
    boundaries, seconds = quantile_tiers(known, num_tiers)
    if len(seconds) < num_tiers:
        why = f"{len(seconds)} tiers instead of {num_tiers}: the latencies allow no more"
    tier = place(known, boundaries)
    own = {name: j for name, j in zip(names, tier.tolist(), strict=False) if j >= 0}
    tiers = Tiers(dict(zip(names, latency.tolist(), strict=True)), own, boundaries, seconds)
    tiers.why_so_few = why
    return tiers


def _why_one_tier(fastest: float, slowest: float) -> str:
    if fastest == slowest == EQUAL_S:
        return "one tier: in a simulation nodes must report their time, add the mod hetero"
    return f"one tier: latencies ({fastest:.3g} to {slowest:.3g} s) differ by noise only"


# --- timing nodes -----------------------------------------------------------------------------


@dataclass
class LateWork:
    """What a node does while rounds go on, by the fleet's clock."""

    node_id: int
    began_s: float
    over_s: float
    """When its node is asked again, even without a reply."""
    missing_s: float = 0.0
    """How long its reply was known not to be there."""


class Latencies:
    """Keep the last latencies of each node, by identity, and which nodes not to ask.

    ``last`` is when tiers were formed, ``first`` whether nodes got their first ones then,
    ``forming`` whether some have none. ``phase``: rounds that count, and those before.
    """

    def __init__(
        self, strategy: Selection, num_tiers: int, every: int | None, phase: tuple[int, int] | None
    ) -> None:
        self.strategy = strategy
        self.fleet = strategy.fleet
        self.nodes = strategy.fleet.nodes
        self._failures = self.nodes.failures["train"]
        self.num_tiers = num_tiers
        self.per_round = strategy.clients_per_round or 1
        self.every = every
        self.phase = phase
        self.last = 0
        self.first = False
        self.forming = phase is None
        # Nodes whose replies to the last round do not count, and work that no round waits for.
        self.left_out: list[int] = []
        self.late: dict[str, LateWork] = {}
        self._seconds: dict[str, list[float]] = {}
        # Nodes that were timed since the tiers were formed, and nodes that were asked.
        self._fresh: set[str] = set()
        self._known: set[int] = set()
        self._more = True
        self._num_online = 0

    # --- tiers -------------------------------------------------------------------------

    def update(self, context: Exchange, grid: Grid, online: Set[int], tiers: Tiers) -> Tiers | None:
        """Form tiers as first latencies come in, then every so many rounds of all latencies."""
        known = len(tiers.latency)
        since = context.round - self.last
        if self.phase and (not known or (self.every and since >= self.every)):
            return self._profile(context, grid, online, *self.phase, first=not known)
        if self.late:
            self._learn(context, grid, online)
        formed = None if self.phase else self._renew(context.round, tiers)
        if known and formed in (None, tiers):
            # Nodes that were timed for the first time get a place in the tiers.
            for name in sorted(self._fresh - tiers.tier.keys()):
                if (seconds := self._seconds[name][-1]) < T_MAX:
                    tiers.add(name, seconds)
        if known or formed:
            self._fresh.clear()
        return formed

    def _renew(self, server_round: int, tiers: Tiers) -> Tiers | None:
        """Form tiers of the latencies so far, if it is time."""
        # While tiers form, it is worth while for a tenth more nodes.
        last = not (self.late or self._more)
        more = 10 * len(self._fresh) >= len(tiers.latency)
        first = self.forming and (last or (bool(self._fresh) and more))
        if due := server_round - self.last >= (self.every or RENEW_EVERY):
            self.try_again()
        is_time = self._seconds and (due or first)
        formed = self._form(server_round, tiers, first) if is_time else None
        self.forming &= not (last and self._seconds)
        return formed

    def _form(self, server_round: int, before: Tiers, first: bool) -> Tiers | None:
        self.last = server_round
        self.first = first
        names = sorted(self._seconds, key=identity_key)
        # The first latency may contain a cold start.
        warm = [self._seconds[name][1:] or self._seconds[name] for name in names]
        rounds = np.array([(row + [math.nan] * MEMORY)[:MEMORY] for row in warm]).T
        # Nodes that have not answered are slower than those that have.
        in_flight = [self.fleet.clock.virtual_s - work.began_s for work in self.late.values()]
        tiers = form_tiers(names, rounds, self.num_tiers, in_flight)
        if tiers is None or first or tiers.moved(before):
            return tiers
        # The members stay, and their latencies are renewed.
        before.seconds = tiers.seconds
        return before

    def _note(self, node_id: int, seconds: float) -> None:
        """Keep a latency; without one the node has failed, and is asked again."""
        name = self.nodes.identity(node_id)
        if math.isnan(seconds):
            self.count([], [name])
        elif name not in self._seconds:
            self._fresh.add(name)
            self._seconds[name] = [seconds]
        else:
            first, *later = self._seconds[name]
            self._seconds[name] = [first, *[*later, seconds][-MEMORY:]]

    def _profile(
        self, context: Exchange, grid: Grid, online: Set[int], sync: int, warmup: int, first: bool
    ) -> Tiers | None:
        """Time all nodes in rounds of their own, and wait for them."""
        self.last = context.round
        self.first = first
        nodes = sorted(online)
        how = {"sync_rounds": sync, "warmup_rounds": warmup}
        _, rounds = profile_nodes(self.strategy, context, grid, nodes, **how, t_max=T_MAX)
        # 4.2: the ones that have timed out are incremented by T_max
        rounds = np.where(np.isnan(rounds), T_MAX, rounds)
        column = sorted(range(len(nodes)), key=lambda i: self.nodes.sort_key(nodes[i]))
        names = [self.nodes.identity(nodes[i]) for i in column]
        tiers = form_tiers(names, rounds[:, column], self.num_tiers)
        if tiers is None:
            what = f"TiFL: no node answered the profiling within {T_MAX:g} s"
            if first:
                raise RuntimeError(f"{what}: check the ClientApp's log.")
            log(WARNING, "%s: the tiers stay as they are", what)
            return None
        self.try_again()
        self._known = set(online)
        self._num_online = len(online)
        self._more = False
        self._seconds = {name: [seconds] for name, seconds in tiers.latency.items()}
        return tiers

    # --- nodes that have not been timed --------------------------------------------------

    def newcomers(
        self, context: Exchange, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Return nodes to be timed in this round; none with a phase, which asks them beside it."""
        new = self._unknown(context.round, grid, online, rng)
        if not (self.phase and new):
            return new
        kind = self.nodes.profile_kind or keys.PROFILE_MESSAGE
        messages = [profile_message(self.strategy, context, n, kind, 0) for n in new]
        queue = self.fleet.queue_on(grid)
        queue.resume()
        # A node that is gone is sent nothing.
        sent = queue.send(messages, T_MAX)
        for message in (each for each in messages if each.metadata.message_id in sent):
            self._leave(message, self.fleet.clock.virtual_s)
        queue.forget({*queue.pending})
        return []

    def _unknown(
        self, server_round: int, grid: Grid, online: Set[int], rng: np.random.Generator
    ) -> list[int]:
        """Return nodes without a latency that are not asked for one yet, some at a time."""
        # To look at all nodes takes time in proportion to their number.
        if not self._more and len(online) == self._num_online and server_round % LOOK_EVERY:
            return []
        self._num_online = len(online)
        new = sorted(online - self._known)
        self.nodes.learn(grid, new)
        name = self.nodes.identity
        blocked = self.blocked
        self._known.update(node for node in new if name(node) in self._seconds)
        new = [n for n in new if n not in self._known and name(n) not in blocked]
        room = max(0, max(AT_ONCE, self.per_round) - len(self.late))
        self._more = len(new) > room
        if self._more:
            new = sorted(rng.choice(new, size=room, replace=False).tolist())
        self._known.update(new)
        return new

    def take(
        self, context: Exchange, replies: list[Message], enough: int | None, online: Set[int]
    ) -> list[Message]:
        """Learn from the good replies of a round; return those that count: the first ``enough``."""
        if self.phase:
            return replies
        began_s = self.fleet.clock.virtual_s - context.virtual_s
        self.left_out = [message.metadata.dst_node_id for message in context.surplus]
        for message in context.surplus:
            self._leave(message, began_s).missing_s = context.virtual_s
        seconds = {id(reply): self._latency_of(context, reply, online) for reply in replies}
        counting = set(sorted(seconds, key=lambda i: seconds[i])[:enough])
        for reply in replies:
            node_id = reply.metadata.src_node_id
            self._note(node_id, seconds[id(reply)])
            if id(reply) not in counting:
                context.latency.pop(reply.metadata.reply_to_message_id, None)
                self.left_out.append(node_id)
        return [reply for reply in replies if id(reply) in counting]

    def _latency_of(self, context: Exchange, reply: Message, online: Set[int]) -> float:
        """Return how long a node took; one that has rejoined gets its old name."""
        node_id = reply.metadata.src_node_id
        partition = reported_partition(reply)
        if partition is not None and not self.nodes.knows(node_id):
            self.nodes.rejoin(node_id, partition, online)
        return context.comparable_s(reply)

    # --- replies that no round waits for -----------------------------------------------------

    def _leave(self, message: Message, began_s: float) -> LateWork:
        """Leave a node alone until its reply is here, or T_max is over."""
        message_id = message.metadata.message_id
        work = LateWork(message.metadata.dst_node_id, began_s, over_s=began_s + T_MAX)
        self.late[message_id] = work
        if self.fleet.queue is not None:
            self.fleet.queue.leave([message_id], work.over_s)
        return work

    def _learn(
        self, context: Exchange, grid: Grid, online: Set[int], *, waits: bool = False
    ) -> None:
        """Learn from the replies that have come; if wanted, wait for one while there may be any."""
        queue = self.fleet.queue_on(grid)
        left_s = min(work.over_s for work in self.late.values()) - self.fleet.clock.virtual_s
        replies = queue.late(self.late.keys(), left_s if waits else 0.0)
        found = {reply.metadata.reply_to_message_id: reply for reply in replies}
        now_s = self.fleet.clock.virtual_s
        for message_id, work in list(self.late.items()):
            seconds = math.nan
            if message_id in found:
                seconds = self._seconds_of(context, grid, found[message_id], work, online)
            elif work.over_s > now_s:
                work.missing_s = now_s - work.began_s
                continue
            del self.late[message_id]
            queue.forget([message_id])
            self._note(work.node_id, seconds)

    def _seconds_of(
        self, context: Exchange, grid: Grid, reply: Message, work: LateWork, online: Set[int]
    ) -> float:
        """Return how long a node took, by its reply; NaN if that is bad."""
        late = context.beside(T_MAX)
        late.simulated = is_simulated(grid)
        if not late.simulated:
            took_s = self.fleet.clock.virtual_s - work.began_s
            late.round_trip_s[reply.metadata.reply_to_message_id] = took_s
        if not is_good(late, reply, work.node_id, Expected(metrics=False)):
            return math.nan
        seconds = self._latency_of(late, reply, online)
        for wrapper in self.strategy.top.wrappers():
            wrapper.on_profile_replies(late, [reply])
        # A node may claim less time than it can have taken, as its reply was not there before.
        # Where nodes share workers, its message may just have waited for one.
        shares_workers = self.fleet.queue is not None and self.fleet.queue.shares_workers
        return seconds if shares_workers else max(seconds, TRUSTED * work.missing_s)

    def wait(self, context: Exchange, grid: Grid, online: Set[int]) -> bool:
        """Wait for late work, else ask again who kept failing: no round may go by idle."""
        if self.late:
            self._learn(context, grid, online, waits=True)
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
        return self.nodes.failed_often(MAX_FAILURES, "train")

    def count(self, good: Sequence[str], failed: Sequence[str]) -> None:
        """Count failures in a row; success ends the row."""
        for name in sorted(failed):
            if (node_id := self.nodes.find(name)) is None:
                continue
            # It must be timed again.
            if name not in self._seconds:
                self._known.discard(node_id)
                self._more |= self.phase is None
            if self.nodes.fail(node_id) == MAX_FAILURES:
                text = f"failed {MAX_FAILURES} times in a row, left out until tiers form again"
                self.nodes.warn(node_id, text)
        for name in good:
            self._failures.pop(name, None)

    def try_again(self) -> None:
        """Let nodes that kept failing try once more: another failure, and they are left out."""
        for name, count in self._failures.items():
            self._failures[name] = min(count, MAX_FAILURES - 1)

    def state_dict(self) -> StateDict:
        """Return latencies and failures; nodes at their first work are asked again on a resume."""
        own: StateDict = {"last_profile": self.last, "forming": int(self.forming)}
        return own | {"times": json.dumps(self._seconds), "failures": json.dumps(self._failures)}

    def load_state_dict(self, state: StateDict, tiers: Tiers) -> None:
        """Continue from ``state_dict``."""
        self.last = int(str(state["last_profile"]))
        self.forming = bool(state["forming"])
        self._seconds = json.loads(str(state["times"]))
        self._fresh = set(self._seconds) - set(tiers.latency)
        self._failures.update(json.loads(str(state["failures"])))
