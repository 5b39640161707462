"""How FedSlice draws nodes, makes server updates and ends rounds."""

import os
from collections.abc import Iterable, Set
from logging import INFO
from math import inf
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi

from flwr_hetero import keys
from flwr_hetero._flwr import is_private, log, updates_needed
from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.rates import Conditions
from flwr_hetero.asynchronous.strategy import FedBuff
from flwr_hetero.exchange.aggregate import replaced, with_update
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.nodes import Figure
from flwr_hetero.exchange.queue import on_clock
from flwr_hetero.records import arrays_in, configs_in, metrics_in, read_number
from flwr_hetero.server.composition import check_enough_updates
from flwr_hetero.server.loop import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import (
    ALIKE,
    ALIKE_SHARED,
    ENDING_FROM,
    FIXED_SHARE,
    FIXED_SHARE_SHARED,
    Ending,
    UsualJob,
    are_alike,
    believed_jobs,
    buffer_size,
    draw_chances,
    ending,
    largest_step,
    places_in_flight,
    usual_job,
)
from flwr_hetero.slices.steps import SliceSteps, Stage, Usual
from flwr_hetero.state_dict import StateDict

QUARTER = ", a server update has a quarter of these; FedBuff(buffer_size={}) needs fewer nodes"
"""Hint for a strategy such as Krum that gets too few updates."""
MOST_TRAIN = 0.75
"""If this part of the nodes trains at the same time, slices do not become equal in steps."""
ALL_TRAIN = (
    "FedSlice: nearly all nodes train at the same time, so that fast nodes, which take more steps, "
    "count more until the end. With a concurrency of at most a quarter of the nodes, the run ends "
    "at FedAvg's objective"
)
UNKNOWN_LENGTH = (
    "FedSlice: start goes on with an earlier run and does not say how long training is in all. "
    "Slices become equal in steps only with FedSlice(total_rounds=...)"
)
FIRST_PLACES = (os.cpu_count() or 1) + 1
"""Messages that are sent before any worker has answered: most simulations have one for each CPU."""
ADAPTIVE = (FedAdagrad, FedAdam, FedYogi)
"""Server optimisers of which the length of a step does not depend on that of the updates."""


class SliceRule(FedBuff):
    """FedBuff with small buffers, a bound on the server's step, and rounds of equal work."""

    called = "FedSlice"
    unit = "round"
    evaluates_each_round = True
    # Buffers are small, so that even equally fast nodes have unequal shares of the updates.
    node_limit: float | None = 2.0

    def __init__(
        self,
        strategy: SliceSteps,
        concurrency: int | None,
        rate_correction: float,
        total_rounds: int | None,
        seed: int,
    ) -> None:
        super().__init__(
            strategy,
            concurrency=concurrency,
            weighting="examples",
            rate_correction=rate_correction,
            seed=seed,
        )
        self.steps = strategy
        self.workers = Workers()
        # Nodes that train in a round, and messages in flight: fewer if nodes share workers.
        self._training = 1
        self._places = 1
        # Whether all nodes train and are equally fast, and until when their replies are awaited.
        self.alike = False
        self._wake_s = inf
        # By node: the number of instructions before its last one, and the time of its last one.
        self._last_turns: dict[int, int] = {}
        self._sent_s: dict[int, float] = {}
        # Examples trained on and server updates in this round.
        self.examples = 0.0
        self.count = 0
        self.round_facts: dict[str, Any] = {}
        self.progress = Progress(total_rounds)
        self._usual_jobs = Figure[tuple[UsualJob, float]]()

    def on_start(self, run: Run) -> None:
        """Learn the length of the run."""
        super().on_start(run)
        self.progress.begin(run)

    def _ending(self) -> Ending:
        """Return how equal slices are in steps by now; equally fast nodes need no change."""
        is_even = self.shares_workers and self._are_similar()
        if not self.progress.rounds or self.alike or is_even or self._is_private():
            return Ending()
        share = min(1.0, self._training / max(1, len(self._online())))
        is_late = self.progress.done >= ENDING_FROM
        # If nodes share workers, their speeds differ by chance.
        if share >= MOST_TRAIN and is_late and not self.shares_workers:
            self.progress.say_once(ALL_TRAIN)
        return ending(self.progress.done, self.progress.rounds * share, share)

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Return the nodes that start now; the first replies tell the number of workers."""
        if self.unsent and not self.shares_workers:
            # The devices are emulated, so that each node has a processor of its own.
            chosen = self.unsent
            self.unsent = []
            self.resting -= len(chosen)
            return chosen
        for node_id in self.unsent:
            self.turns.give_back(self.identity(node_id))
        self.alike = self._are_alike(idle)
        chosen = super().next_nodes(idle, in_flight, waiting)
        self.unsent = []
        if self.shares_workers and not in_flight and not self.workers.number:
            self.unsent = chosen[FIRST_PLACES:]
            chosen = chosen[:FIRST_PLACES]
            self.resting += len(self.unsent)
        self._last_turns |= dict.fromkeys(chosen, self.turns.given)
        self._sent_s |= dict.fromkeys(chosen, self.fleet.clock.virtual_s)
        return chosen

    def arrived(self, update: Update) -> None:
        """Learn that a node is idle, and which worker of a simulation replied."""
        self._sent_s.pop(update.pending.node_id, None)
        if self.shares_workers:
            self.workers.learn(update.reply, 2 * self._training)

    def room(self, num_idle: int, in_flight: int) -> int:
        """Return how many idle nodes may start, so that no message waits long for a worker."""
        is_even = self.shares_workers and self._are_similar()
        fixed_share = FIXED_SHARE_SHARED if is_even else FIXED_SHARE
        usual = self.steps.usual_of_others() if is_even else Usual()
        self.steps.stage = Stage(self._ending(), fixed_share, usual)
        room = super().room(num_idle, in_flight)
        return min(room, max(0, self.places(in_flight + room) - in_flight))

    def places(self, in_flight: int) -> int:
        """Return how many messages may be in flight, given the number of workers."""
        is_limited = self.shares_workers and not self._is_private()
        return self.workers.places(in_flight) if is_limited else in_flight

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""
        self._sent_s.pop(node_id, None)
        super().failed(node_id)

    def _are_similar(self) -> bool:
        return self.steps.are_similar(ALIKE_SHARED)

    def _are_alike(self, idle: list[int]) -> bool:
        """Return whether all nodes are asked, measured and about equally fast."""
        busy = () if self.fleet.queue is None else self.fleet.queue.busy
        step_s = self.steps.speeds.step_s
        if len(idle) + len(busy) > (self.concurrency or inf):
            return False
        nodes = {self.identity(node) for node in {*idle, *busy}}
        if not nodes <= step_s.keys():
            return False
        ratio = ALIKE_SHARED if self.shares_workers else ALIKE
        return not self._is_private() and are_alike([step_s[node] for node in nodes], ratio)

    def _is_private(self) -> bool:
        # The noise of differential privacy fits one number of updates, which is set in advance.
        return any(map(is_private, self.chain()))

    def draw(self, idle: list[int], room: int) -> list[int]:
        """Draw nodes; if there are more than places, those with long slices seldom get one."""
        if self.shares_workers and 0 < room < len(idle) and self._are_similar():
            # Nodes take turns as in FedAvg's rounds: a draw would leave some of them out.
            shuffled = [idle[i] for i in self.rng.permutation(len(idle))]
            return sorted(shuffled, key=lambda node: self._last_turns.get(node, -1))[:room]
        if 0 < room < len(idle):
            slices_s = self.steps.slices_s([self.identity(node) for node in idle])
            equal = self.steps.stage.ending.equal
            chances = draw_chances(slices_s, self.steps.usual_slice_s(), equal)
            # l. 0: keep the `room` nodes with the largest chance / uniform draw, so that a slow
            # node is skipped if enough others are idle.
            turns = (chances / self.rng.random(len(idle))).tolist()
            least = min(1.0, sorted(turns)[-room])
            idle = [node for node, turn in zip(idle, turns, strict=True) if turn >= least]
        return super().draw(idle, room)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return a buffer of updates, or all updates that equally fast nodes send together."""
        self._training = self.num_training(in_flight + self.resting)
        self._places = self.places(self._training)
        found = super().due(waiting, in_flight)
        self._wake_s = inf
        # Replies of nodes that share workers come one by one: waiting would cost server updates.
        if not found or not self.alike or self.shares_workers:
            return found
        # l. 3: a node that got its instruction before the buffer was full will reply soon.
        full_s = found[-1].arrived_s
        until_s = on_clock(full_s + self._usual_trip_s())
        if (
            self.fleet.clock.virtual_s < until_s
            and min(self._sent_s.values(), default=inf) <= full_s
        ):
            self._wake_s = until_s
            return []
        return list({update.pending.node_id: update for update in reversed(waiting)}.values())

    @property
    def wake_s(self) -> float:
        """Time on the fleet's clock until which the next reply is waited for at most."""
        return self._wake_s

    def _usual_trip_s(self) -> float:
        """Return the usual time of a message if nodes are equally fast, in seconds."""
        return float(np.median(self.steps.slices_s(list(self.steps.speeds.step_s))))

    def default_size(self, in_flight: int) -> int:
        """Return the number of updates of a server update."""
        # l. 3; a strategy such as Krum needs more updates.
        size = max(buffer_size(self.places(in_flight)), updates_needed(self.leaf))
        return min(size, buffer_size(in_flight))

    def check_nodes(self, nodes: int) -> None:
        """Refuse too few nodes for a strategy such as Krum."""
        check_enough_updates(self.leaf, nodes, "the number of nodes", buffer_size, QUARTER)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh as FedBuff does, and bound how far the model moves."""
        # `fleet.norms` keeps recent nodes only, so the norms of all nodes are copied.
        self.rates.lengths |= {node: norm for node, (norm, *_) in self.fleet.norms.items()}
        shares = super().weigh(updates, weights)
        in_flight = max(len(updates), self._places)
        spread = self.steps.spread()
        limit = largest_step(spread, len(updates), in_flight, server_momentum(self))
        # l. 7: longer slices allow a longer step, which becomes shorter towards the end.
        equal, step = self.steps.stage.ending
        limit *= step**equal
        # l. 4: b, with which all updates in flight together move the model by one slice.
        bound = min(1.0, limit / shares.mean_discount)
        return shares._replace(scales=shares.scales * bound)

    def conditions(self) -> Conditions:
        """Return what is known of the nodes beside their replies."""
        # Where even nodes share workers they are drawn in turn. The first replies took as long as
        # the workers' start, which says nothing of how often a node replies.
        in_turn = self.shares_workers and self._are_similar()
        # l. 7: a few steps of great weight may be too long. Equal steps have equal weights.
        bounds_lengths = self.steps.stage.ending.equal < 1
        remembers = not self.fleet.is_early(len(self.rates.means), MessageType.TRAIN)
        return Conditions(super().conditions().largest_share, in_turn, bounds_lengths, remembers)

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        """Add a node's scaled update to the present model, which it did not start from."""
        start = next(iter(arrays_in(update.pending.instruction.content).values()))
        return with_update(reply, start, context.arrays, scale)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; an adaptive step has the same length for few updates, so it is divided."""
        if not isinstance(self.leaf, ADAPTIVE):
            return super().aggregate_train(server_round, replies, context)
        # l. 4: all nodes in flight make one whole step together, as in a round of FedAvg.
        eta = self.leaf.eta * min(1.0, len(self.updates) / self._places)
        with replaced(self.leaf, eta=eta):
            return super().aggregate_train(server_round, replies, context)

    def ends_round(self) -> bool:
        """Return whether nodes have trained on as many examples as in a round of FedAvg."""
        usual, mean_examples = self._usual_of_jobs()
        wanted = self._training * mean_examples
        self.count += 1
        self.examples += sum(self._examples_of(update, usual) for update in self.updates.values())
        # l. 6: the round is over. It does not end before a job is known, because missing client
        # support must raise its error first.
        if not self.steps.speeds.jobs or self.examples < wanted:
            self.progress.part = self.examples / wanted if wanted else 0.0
            return False
        facts = {"updates": self.count, "examples": self.examples, "examples_wanted": wanted}
        self.round_facts = facts
        self.examples = max(0.0, self.examples - wanted)
        self.count = 0
        self.progress.ends_round(min(1.0, self.examples / wanted) if wanted else 0.0)
        return True

    def _online(self) -> Set[int]:
        """Return the nodes that are online, as far as a run has looked."""
        queue = self.fleet.queue
        return frozenset() if queue is None else queue.online()

    def _usual_of_jobs(self) -> tuple[UsualJob, float]:
        """Return what most nodes report of their jobs in FedAvg, and the mean of their examples."""
        jobs = self.steps.speeds.jobs
        online = self._online()
        early = self.fleet.is_early(len(jobs), MessageType.TRAIN)
        return self._usual_jobs.of(
            lambda: self._look_at_jobs(early),
            self.steps.speeds.changes,
            len(jobs),
            key=(early, len(online)),
        )

    def _look_at_jobs(self, early: bool) -> tuple[UsualJob, float]:
        every = self.steps.speeds.jobs
        # Right after a resume, no node may have been identified yet.
        online = self._online()
        find = self.fleet.nodes.find
        said = [job for name, job in every.items() if find(name) in online] or list(every.values())
        if not said:
            return UsualJob(1.0, 1.0), 0.0
        passes = [job.passes for job in said]
        steps = [job.steps for job in said]
        usual = usual_job(passes, steps, [job.examples for job in said], early=early)
        _, _, believed = believed_jobs(
            passes, steps, [job.examples for job in said], early=early, usual=usual
        )
        known = [examples for examples in believed.tolist() if examples > 0]
        return usual, sum(known) / len(known) if known else 0.0

    def _examples_of(self, update: Update, usual: UsualJob) -> float:
        """Return the number of examples that a node trained on; its whole job if unknown."""
        (metrics,) = metrics_in(update.reply.content).values()
        examples = max(0.0, read_number(metrics, self.steps.speeds.weight_key, 1.0))
        said = self.steps.speeds.jobs.get(self.identity(update.pending.node_id))
        steps = read_number(metrics, keys.NUM_STEPS, 0.0)
        if said is None or not steps:
            return examples
        # Both are bounded: steps by the instruction, and jobs by what most nodes report.
        columns = believed_jobs([said.passes], [said.steps], [said.examples], usual=usual)
        passes, job_steps, _ = (float(column[0]) for column in columns)
        return examples if job_steps == inf else examples * passes * (steps / job_steps)

    def state_dict(self) -> StateDict:
        """Return FedBuff's state, and the examples of this round."""
        return super().state_dict() | {
            "trained": self.examples,
            "rounds": self.progress.rounds_done,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.examples = float(str(state["trained"]))
        self.progress.rounds_done = int(str(state["rounds"]))


def server_momentum(strategy: Wrapper) -> float:
    """Return how much of the last server update FedAvgM repeats in the next one."""
    momentum: float = getattr(strategy.leaf, "server_momentum", 0.0)
    return momentum


# --- what it learns of workers and of the length of a run ----------------------------------------


class Workers:
    """How many processes answer messages, and how long they take for one."""

    def __init__(self) -> None:
        # Worker and seconds in the ClientApp, of the last replies.
        self._replies: list[tuple[str, float]] = []

    def learn(self, reply: Message, memory: int) -> None:
        """Learn from a reply which worker it is of; of so many replies as are kept."""
        record = configs_in(reply.content).get(keys.TIMING, ConfigRecord())
        worker = record.get(keys.WORKER)
        if isinstance(worker, str):
            self._replies.append((worker, read_number(record, keys.TRAIN_TIME, 0.0)))
        del self._replies[: -max(memory, FIRST_PLACES)]

    @property
    def number(self) -> int:
        """The distinct workers of the last replies."""
        return len({worker for worker, _ in self._replies})

    def places(self, most: int) -> int:
        """Return how many messages keep the workers busy; all nodes' where no worker is known."""
        if not self._replies:
            return most
        job_s = median(seconds for _, seconds in self._replies)
        wanted = places_in_flight(self.number, job_s)
        # Until the first messages have come back, further workers may be busy with them.
        if len(self._replies) < FIRST_PLACES:
            wanted = max(wanted, FIRST_PLACES)
        return min(most, wanted)


class Progress:
    """Rounds that are over, of those of all calls of ``start``.

    >>> progress = Progress(total_rounds=4)
    >>> progress.ends_round(part_of_next=0.5)
    >>> progress.done
    0.375
    """

    def __init__(self, total_rounds: int | None) -> None:
        self.total_rounds = total_rounds
        # None: unknown
        self.rounds: int | None = total_rounds
        self.rounds_done = 0
        self.part = 0.0
        self._said = set[str]()

    def begin(self, run: Run) -> None:
        """Learn how many rounds there are."""
        if run.round < 0 and not run.continues:
            self.rounds_done = 0
            self.part = 0.0
        self.rounds = self.total_rounds or (None if run.continues else run.num_rounds)
        if self.rounds is None:
            self.say_once(UNKNOWN_LENGTH)

    def say_once(self, text: str) -> None:
        """Log why slices do not become equal in steps, the first time only."""
        if text not in self._said:
            self._said.add(text)
            log(INFO, text)

    def ends_round(self, part_of_next: float) -> None:
        """Learn that a round is over, and how much of the next one was trained with it."""
        self.rounds_done += 1
        self.part = part_of_next

    @property
    def done(self) -> float:
        """The part of training that is over; 0 where its length is unknown."""
        return min(1.0, (self.rounds_done + self.part) / self.rounds) if self.rounds else 0.0
