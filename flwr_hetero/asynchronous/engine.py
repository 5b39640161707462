"""A run without rounds: nodes stay at work, and their replies are folded in as they come."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Result

from flwr_hetero import keys
from flwr_hetero.asynchronous.evaluation import Evaluations
from flwr_hetero.asynchronous.mail import Mail, Sent, on_clock
from flwr_hetero.asynchronous.rule import Arrival, Rule
from flwr_hetero.records import config_of
from flwr_hetero.server.checks import Expected, check_progress, is_good
from flwr_hetero.server.context import QUORUM, Exchange, RoundInfo
from flwr_hetero.server.nodes import WAIT_S, online_nodes, wait_for_nodes, whole_grid
from flwr_hetero.server.rounds import (
    Record,
    Run,
    aggregate,
    evaluate_centrally,
    fairness,
    finish_round,
    joined_rounds,
    keep_infos,
    opened,
    record_start,
)

REST_S = 10.0
"""Seconds that a node is left alone after a failure, doubled with each one in a row."""
AWAY_GROWTH = 4
"""Factor of the rest of a node that is away; its first rest is as long as its last job was."""
MAX_FAILURES = 6
"""Failures in a row of every node that end a run; 2 if no reply has counted yet."""
FRUITLESS = 2
"""Bad replies in a row, in nodes at work and from as many nodes, that end a run."""
LOOK_S = 10.0
"""Seconds between two looks at which nodes of a real fleet are online."""


def run_asynchronously(run: Run, rule: Rule) -> Result:
    """Keep nodes at work and merge until ``num_rounds`` rounds are over.

    On the same grid, from the arrays that the last run returned, what is in flight goes on.
    """
    paused: Paused | None = rule.paused
    rule.paused = None
    if paused is None or not _goes_on(run, paused):
        paused = None
    else:
        run.continues, run.arrays = True, paused.newest
    with opened(run, rule.unit):
        if run.round < 0:
            record_start(run)
        work = paused.work.take_up(run) if paused else Work(run, rule)
        while run.round < run.num_rounds and run.fleet.stop_reason is None:
            record = work.train_round()
            finish_round(run, record)
        newest = run.arrays
    run.result.arrays = run.arrays
    rule.paused = Paused(work, newest, run.arrays)
    return run.result


def _goes_on(run: Run, paused: "Paused") -> bool:
    """Return whether a run begins where another one has ended."""
    here, there = run.arrays, paused.returned
    is_same = here is there or (
        here.keys() == there.keys() and all(here[k].data == there[k].data for k in here)
    )
    return is_same and run.round < 0 and paused.work.mail.fleet is whole_grid(run.grid)


class Work:
    """Nodes at work, replies that wait to be merged, and an evaluation beside them."""

    def __init__(self, run: Run, rule: Rule) -> None:
        self.run, self.rule, self.fleet = run, rule, run.fleet
        self.mail = Mail(run.grid, self.fleet.clock, self.fleet.costs, run.timeout_s)
        self.version = 0  # merges made
        self.busy: dict[int, int] = {}  # node at work: version that it started from
        self.team = 0  # nodes at work once all that are to start have started
        self.buffer: list[Arrival] = []
        self.asked: dict[int, tuple[int, int]] = {}  # node: round, and how often in it
        self.failures: dict[int, int] = {}
        self.took_s: dict[int, float] = {}  # each node's last good job
        self.rests_until_s: dict[int, float] = {}
        self.bad: list[int] = []  # nodes whose replies were bad since the last good one
        self.lost: list[Message] = []  # instructions to train that came to nothing since a merge
        self.evaluation = Evaluations(run, rule.evaluates_each_round)
        self.exchange = self._new_exchange([])
        self.merged_s = self.now_s

    def take_up(self, run: Run) -> "Work":
        """Go on in another run on the same grid."""
        self.run, self.evaluation.run, self.mail.timeout_s = run, run, run.timeout_s
        return self

    @property
    def now_s(self) -> float:
        """Seconds on the fleet's clock."""
        return self.fleet.clock.virtual_s

    # --- nodes start and answer ------------------------------------------------------------

    def collect(self) -> list[Arrival]:
        """Keep nodes at work until replies are due to be merged; return these."""
        while not (due := self.rule.due(self.buffer, self.team)):
            self._start()
            for sent, reply in self._next(self.rule.wake_s):
                self._receive(sent, reply)
        return due

    def _start(self) -> None:
        """Send instructions to idle nodes: first to those that are asked to evaluate."""
        idle = self._idle()
        self.evaluation.keep(self.busy.keys() | idle)
        messages = self.evaluation.messages_for(idle)
        evaluating = {message.metadata.dst_node_id for message in messages}
        free = [node for node in idle if node not in evaluating]
        training = len(self.busy) + len(messages) - self.evaluation.num_open
        if free and self.rule.next_nodes(free, training, self.buffer):
            messages += self._instructions()
        if messages:
            self._send(messages)
        elif not self.mail.open and not self.rests_until_s:
            wait_for_nodes(self.run.grid, 1, WAIT_S)
            if idle:
                raise RuntimeError(f"none of the {len(idle)} idle nodes is asked to train.")
        self.team = len(self.busy)

    def _idle(self) -> list[int]:
        """Return the nodes online that are not at work and may be asked, sorted."""
        if self.rests_until_s:
            now_s, rests = self.now_s, self.rests_until_s.items()
            self.rests_until_s = {node: until_s for node, until_s in rests if until_s > now_s}
        idle = online_nodes(self.run.grid) - self.busy.keys() - self.rests_until_s.keys()
        return sorted(idle)  # by id: what is known of identities differs after a resume

    def _instructions(self) -> list[Message]:
        run, number = self.run, self.run.round + 1
        how = number, run.arrays, run.train_config, run.grid
        messages: list[Message] = run.strategy.configure_train(*how, run.exchange(number))
        sort_key = self.fleet.nodes.sort_key  # Flower's samples come in any order
        messages.sort(key=lambda message: sort_key(message.metadata.dst_node_id))
        for message in messages:
            self._count_repeat(message)
        return messages

    def _count_repeat(self, message: Message) -> None:
        """Let a node draw other samples that is asked again within one round."""
        node_id, number = message.metadata.dst_node_id, self.run.round
        before, count = self.asked.get(node_id, (number, 0))
        self.asked[node_id] = number, (count if before == number else 0) + 1
        if repeat := self.asked[node_id][1] - 1:
            config_of(message)[keys.REPEAT] = repeat

    def _send(self, messages: Sequence[Message]) -> None:
        self.mail.send(messages)
        for message in messages:
            self.busy[message.metadata.dst_node_id] = self.version

    def _next(self, wake_s: float = inf) -> list[tuple[Sent, Message | None]]:
        """Wait for replies, until a node has rested, or as long as the rule wants to merge them."""
        look_s = inf if self.mail.is_simulated else self.now_s + LOOK_S
        rested_s = min(self.rests_until_s.values(), default=look_s)
        return self.mail.next(min(rested_s, wake_s))

    def _receive(self, sent: Sent, reply: Message | None) -> None:
        """Check a reply when it arrives: a bad one fills no place in the buffer."""
        node_id = sent.node_id
        version = self.busy.pop(node_id)
        now = self.exchange
        if self.evaluation.receive(sent, reply):
            return None
        if reply is None:
            now.fail(node_id, f"no reply within {self.run.timeout_s:g} s")
            self.lost.append(sent.instruction)
            return self._rest(node_id, self.run.timeout_s)
        message_id = sent.instruction.metadata.message_id
        if self.mail.is_local or not self.fleet.clock.emulated:
            now.round_trip_s[message_id] = self.now_s - sent.sent_s
        if not is_good(now, reply, node_id, self._expected()):
            self.bad += [] if reply.has_error() else [node_id]
            self.lost.append(sent.instruction)
            return self._rest(node_id, is_away=reply.has_error())
        self.bad.clear()
        self.took_s[node_id] = self.now_s - sent.sent_s
        self.failures.pop(node_id, None)
        now.messages.append(sent.instruction)
        self.buffer.append(Arrival(sent, reply, version, self.now_s))
        return None

    def _expected(self) -> Expected:
        weight_key = getattr(self.run.strategy.chain()[-1], "weighted_by_key", None)
        return Expected(self.run.arrays, weight_key)

    def _rest(self, node_id: int, at_least_s: float = 0.0, is_away: bool = False) -> None:
        """Leave a node alone after a failure; give up if no node answers any more.

        A node that was too slow is still at work: it rests as long again. One that is away now
        and then, and whose jobs are short, would rest most of the time: it is tried again soon.
        """
        self.rule.failed(node_id)
        count = self.failures[node_id] = self.failures.get(node_id, 0) + 1
        before = min(count, MAX_FAILURES) - 1
        rest_s = max(REST_S, at_least_s) * 2**before
        if is_away and node_id in self.took_s:
            rest_s = min(rest_s, self.took_s[node_id] * AWAY_GROWTH**before)
        self.rests_until_s[node_id] = on_clock(self.now_s + rest_s)
        at_least = max(self.team, self.exchange.quorum)
        enough = len(self.bad) >= FRUITLESS * at_least and len(set(self.bad)) >= at_least
        if enough and self.fleet.begun:
            raise RuntimeError(f"{len(self.bad)} bad replies in a row: {self._reasons()}.")
        if self.busy:
            return
        begun, refused = self.fleet.begun or bool(self.buffer), self.exchange.refused
        if not begun and len(refused) == len(self.failures):
            check_progress(self.exchange)
        tries, online = MAX_FAILURES if begun else 2, online_nodes(self.run.grid)
        if all(self.failures.get(node, 0) >= tries for node in online):
            raise RuntimeError(f"every node has failed {tries} times in a row: {self._reasons()}.")

    def _reasons(self) -> str:
        return "; ".join(sorted({failure.reason for failure in self.fleet.info.failures})[:3])

    # --- merging -------------------------------------------------------------------------

    def train_round(self) -> Record:
        """Merge until a round is over; return its line for the history."""
        record, count = self._merge(self.collect()), 1
        while not self.rule.ends_round(self.team):
            keep_infos(self.run, record)
            record, count = joined_rounds(record, self._merge(self.collect()), count), count + 1
        return self._evaluate(record)

    def _merge(self, due: list[Arrival]) -> Record:
        """Make the next version of the model; return what there is of the history's line."""
        run, number = self.run, self.run.round + 1
        due.sort(key=lambda arrival: arrival.arrived_s)
        messages = [arrival.sent.instruction for arrival in due]
        merged = {message.metadata.message_id for message in messages}
        rest = [a for a in self.buffer if a.sent.instruction.metadata.message_id not in merged]
        now, self.buffer = self.exchange, rest
        now.messages, now.virtual_s = messages, self.now_s - self.merged_s
        self.exchange = self._new_exchange([a.sent.instruction for a in rest])
        self.exchange.latency, self.exchange.checked = now.latency, now.checked - merged
        now.latency = {i: latency for i, latency in now.latency.items() if i in merged}
        now.round, now.arrays = number, run.arrays
        self.rule.merging(now, due, self.version)
        before = set(now.refused)
        asked, self.lost = [*messages, *self.lost], []
        record = aggregate(run, now, asked, [arrival.reply for arrival in due])
        self.version += 1
        for node_id in now.refused.keys() - before:  # or it would fill the buffer again
            self._rest(node_id)
        self.merged_s = self.now_s
        return record

    def _evaluate(self, record: Record) -> Record:
        """Evaluate the model of a round, and complete its line."""
        number = record["round"]
        record["global"] = evaluate_centrally(self.run, number)
        record["evaluate"] = self._evaluated(number)
        record |= fairness(self.fleet)
        record["virtual_s"] = self.fleet.clock.virtual_s
        record["failures"] = [failure._asdict() for failure in self.fleet.info.failures]
        self.merged_s = self.now_s
        self.fleet.info = RoundInfo()
        return record

    def _new_exchange(self, messages: list[Message]) -> Exchange:
        exchange = self.run.exchange(self.run.round + 1)
        exchange.messages, exchange.simulated = messages, self.mail.is_simulated
        exchange.same_clock = self.mail.is_local or not self.mail.is_simulated
        exchange.quorum = min(QUORUM, max(1, len(online_nodes(self.run.grid))))
        return exchange

    def _evaluated(self, number: int) -> dict[str, Any]:
        """Return what an evaluation has found that is over now, and begin one if it is time."""
        found = self.evaluation.results()
        if number == self.run.num_rounds:  # nodes evaluate the last model as they come back
            self.evaluation.begin(number, is_last=True)
            while not self.evaluation.is_over():
                self._evaluate_when_idle()
            found = self.evaluation.results() or found
        elif self.evaluation.is_due():
            self.evaluation.begin(number)
        return found

    def _evaluate_when_idle(self) -> None:
        """Wait for the last evaluation; others train on if more runs are likely to follow."""
        idle = self._idle()
        self.evaluation.keep(self.busy.keys() | idle)
        if self.run.continues:
            self._start()
        elif messages := self.evaluation.messages_for(idle):
            self._send(messages)
        if not self.mail.open:
            return
        for sent, reply in self._next():
            if self.run.continues:
                self._receive(sent, reply)
            else:
                self.busy.pop(sent.node_id)
                self.evaluation.receive(sent, reply)


class Paused(NamedTuple):
    """A run that has ended: its work in flight, the newest model, and the arrays returned."""

    work: Work
    newest: ArrayRecord
    returned: ArrayRecord
