"""FedSlice's rule: which nodes are asked for how many steps, what replies count, ends of rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from logging import INFO, WARNING
from math import inf, isfinite, nan
from statistics import median, median_low
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import is_private, log, updates_needed
from flwr_hetero.asynchronous.algorithm import Shares
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import (
    Conditions,
    FedBuff,
    RateCorrection,
    first_of_each_node,
)
from flwr_hetero.biased_local_sgd.strategy import Job, MeasuredSteps
from flwr_hetero.client.carried import MOST_BYTES
from flwr_hetero.errors import check_number
from flwr_hetero.exchange.aggregate import replaced, with_update
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.exchange.queue import on_clock
from flwr_hetero.records import (
    arrays_in,
    config_of,
    configs_in,
    metrics_of,
    num_parameters,
    read_number,
)
from flwr_hetero.server.composition import check_enough_updates, check_unscaled
from flwr_hetero.server.loop import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices import algorithm
from flwr_hetero.slices.algorithm import ALIKE_SHARED, FIXED_SHARE, Ending, UsualJob
from flwr_hetero.state_dict import StateDict

QUARTER = ", a server update has a quarter of these; FedBuff(buffer_size={}) needs fewer nodes"
"""Hint for a strategy such as Krum that gets too few updates."""
EQUAL_ENOUGH = 0.5
"""From how equal steps on optimizers no longer continue from slice to slice."""
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

_Value = TypeVar("_Value")


class SliceRule(FedBuff):
    """FedBuff with small buffers, a bound on the server's step, and rounds of equal work.

    Its methods stand in the order in which an update passes them.
    """

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
        check_number("rate_correction", rate_correction, "[0, 1]")
        super().__init__(strategy, concurrency=concurrency, weighting="examples", seed=seed)
        if rate_correction:
            check_unscaled(self, "rate_correction", rate_correction)
        self.rates = RateCorrection((1.0, rate_correction))
        self.steps = strategy
        self.workers = Workers()
        # A strategy such as Krum needs more updates than a buffer has.
        self._least_updates = updates_needed(self.leaf)
        # The noise of differential privacy fits one number of updates, which is set in advance.
        self._is_private = any(map(is_private, self.chain()))
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

    def on_start(self, run: Run) -> None:
        """Learn the length of the run."""
        super().on_start(run)
        self.progress.begin(run)

    # --- l. 0: the nodes that are asked -----------------------------------------------------

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

    def room(self, num_idle: int, in_flight: int) -> int:
        """Return how many idle nodes may start, so that no message waits long for a worker."""
        in_turn = self._in_turn
        fixed_share = algorithm.FIXED_SHARE_SHARED if in_turn else FIXED_SHARE
        usual = self.steps.usual_of_others() if in_turn else Usual()
        self.steps.stage = Stage(self._ending(), fixed_share, usual)
        room = super().room(num_idle, in_flight)
        return min(room, max(0, self.places(in_flight + room) - in_flight))

    def places(self, in_flight: int) -> int:
        """Return how many messages may be in flight, given the number of workers."""
        is_limited = self.shares_workers and not self._is_private
        return self.workers.places(in_flight) if is_limited else in_flight

    def draw(self, idle: list[int], room: int) -> list[int]:
        """Draw nodes; if there are more than places, those with long slices seldom get one."""
        if not 0 < room < len(idle):
            return super().draw(idle, room)
        if self._in_turn:
            # As in FedAvg's rounds: a draw would leave some of the nodes out.
            shuffled = [idle[i] for i in self.rng.permutation(len(idle))]
            return sorted(shuffled, key=lambda node: self._last_turns.get(node, -1))[:room]
        slices_s = self.steps.slices_s([self.identity(node) for node in idle])
        equal = self.steps.stage.ending.equal
        chances = algorithm.draw_chances(slices_s, self.steps.usual_slice_s(), equal)
        # Keep the `room` nodes with the largest chance / uniform draw, so that a slow node is
        # skipped if enough others are idle.
        turns = (chances / self.rng.random(len(idle))).tolist()
        least = min(1.0, sorted(turns)[-room])
        idle = [node for node, turn in zip(idle, turns, strict=True) if turn >= least]
        return super().draw(idle, room)

    @property
    def shares_workers(self) -> bool:
        """Whether messages wait for free workers, as in a simulation of no emulated devices."""
        queue = self.fleet.queue
        return queue is not None and queue.shares_workers

    @property
    def _in_turn(self) -> bool:
        """Whether nodes take turns: those that share workers, if they take about equally long."""
        return self.shares_workers and self.steps.are_similar()

    def _are_alike(self, idle: list[int]) -> bool:
        """Return whether all nodes are asked, measured and about equally fast."""
        busy = () if self.fleet.queue is None else self.fleet.queue.busy
        step_s = self.steps.speeds.step_s
        if len(idle) + len(busy) > (self.concurrency or inf) or self._is_private:
            return False
        nodes = {self.identity(node) for node in {*idle, *busy}}
        ratio = ALIKE_SHARED if self.shares_workers else algorithm.ALIKE
        return nodes <= step_s.keys() and algorithm.are_alike(
            [step_s[node] for node in nodes], ratio
        )

    # --- l. 2 and 3: when updates are added -------------------------------------------------
    def arrived(self, update: Update) -> None:
        """Learn that a node is idle, and which worker of a simulation replied."""
        self._sent_s.pop(update.pending.node_id, None)
        if self.shares_workers:
            self.workers.learn(update.reply, 2 * self._training)

    def failed(self, node_id: int) -> None:
        """Learn that a node that was to train has no reply that counts."""
        self._sent_s.pop(node_id, None)
        super().failed(node_id)

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
        trips_s = self.steps.slices_s(list(self.steps.speeds.step_s))
        until_s = on_clock(full_s + float(np.median(trips_s)))
        others_come = min(self._sent_s.values(), default=inf) <= full_s
        if others_come and self.fleet.clock.virtual_s < until_s:
            self._wake_s = until_s
            return []
        return first_of_each_node(waiting)

    @property
    def wake_s(self) -> float:
        """Time on the fleet's clock until which the next reply is waited for at most."""
        return self._wake_s

    def default_size(self, in_flight: int) -> int:
        """Return the number of updates of a server update."""
        # l. 3
        size = max(algorithm.buffer_size(self.places(in_flight)), self._least_updates)
        return min(size, algorithm.buffer_size(in_flight))

    def check_nodes(self, nodes: int) -> None:
        """Refuse too few nodes for a strategy such as Krum."""
        check_enough_updates(
            self.leaf, nodes, "the number of nodes", algorithm.buffer_size, QUARTER
        )

    # --- l. 4: what updates count -----------------------------------------------------------

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh as FedBuff does, and bound how far the model moves."""
        # `fleet.norms` keeps recent nodes only, so the norms of all nodes are copied.
        self.rates.lengths |= {node: norm for node, (norm, *_) in self.fleet.norms.items()}
        shares = super().weigh(updates, weights)
        in_flight = max(len(updates), self._places)
        momentum = server_momentum(self)
        limit = algorithm.largest_step(self.steps.spread(), len(updates), in_flight, momentum)
        # l. 7: longer slices allow a longer step, which becomes shorter towards the end.
        equal, step = self.steps.stage.ending
        limit *= step**equal
        # l. 4: b, with which all updates in flight together move the model by one slice.
        bound = min(1.0, limit / shares.mean_discount)
        return shares._replace(scales=shares.scales * bound)

    def conditions(self) -> Conditions:
        """Return what is known of the nodes beside their replies."""
        # The first replies of nodes that take turns took as long as the workers' start, which says
        # nothing of how often a node replies.
        in_turn = self._in_turn
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

    # --- l. 6 and 7: ends of rounds, and the end of the run ---------------------------------

    def ends_round(self) -> bool:
        """Return whether nodes have trained on as many examples as in a round of FedAvg."""
        usual, mean_examples = self._usual_of_jobs()
        wanted = self._training * mean_examples
        self.count += 1
        self.examples += self._examples_of([*self.updates.values()], usual)
        # l. 6: the round is over. It does not end before a job is known, because missing client
        # support must raise its error first.
        if not self.steps.speeds.jobs or self.examples < wanted:
            self.progress.part = self.examples / wanted if wanted else 0.0
            return False
        facts = {"updates": self.count, "examples": self.examples, "examples_wanted": wanted}
        self.round_facts = facts
        self.examples = max(0.0, self.examples - wanted)
        self.count = 0
        self.progress.rounds_done += 1
        self.progress.part = min(1.0, self.examples / wanted) if wanted else 0.0
        return True

    def _usual_of_jobs(self) -> tuple[UsualJob, float]:
        """Return what most nodes report of their jobs in FedAvg, and the mean of their examples."""
        speeds = self.steps.speeds
        early = self.fleet.is_early(len(speeds.jobs), MessageType.TRAIN)
        key = (early, len(self._online()))
        return speeds.figure("jobs", lambda: self._look_at_jobs(early), key)

    def _look_at_jobs(self, early: bool) -> tuple[UsualJob, float]:
        every = self.steps.speeds.jobs
        # Right after a resume, no node may have been identified yet.
        online = self._online()
        find = self.fleet.nodes.find
        said = [job for name, job in every.items() if find(name) in online] or list(every.values())
        if not said:
            return UsualJob(1.0, 1.0), 0.0
        passes, steps, examples, _ = zip(*said, strict=True)
        usual = algorithm.usual_job(passes, steps, examples, early=early)
        _, _, believed = algorithm.believed_jobs(passes, steps, examples, usual)
        known = [count for count in believed.tolist() if count > 0]
        return usual, sum(known) / len(known) if known else 0.0

    def _examples_of(self, updates: Sequence[Update], usual: UsualJob) -> float:
        """Return the number of examples that nodes trained on; their whole jobs where unknown."""
        speeds = self.steps.speeds
        unknown = Job(1, nan, nan)
        said = [speeds.jobs.get(self.identity(u.pending.node_id), unknown) for u in updates]
        # Both are bounded: steps by the instruction, and jobs by what most nodes report.
        passes, job_steps, job_examples, _ = zip(*said, strict=True)
        columns = algorithm.believed_jobs(passes, job_steps, job_examples, usual)
        total = 0.0
        for update, epochs, whole in zip(updates, *(c.tolist() for c in columns[:2]), strict=True):
            metrics = metrics_of(update.reply)
            steps = read_number(metrics, keys.NUM_STEPS, 0.0)
            examples = max(0.0, read_number(metrics, speeds.weight_key, 1.0))
            total += examples * epochs * (steps / whole) if steps and isfinite(whole) else examples
        return total

    def _ending(self) -> Ending:
        """Return how equal slices are in steps by now; equally fast nodes need no change."""
        if not self.progress.rounds or self.alike or self._in_turn or self._is_private:
            return Ending()
        done = self.progress.done
        share = min(1.0, self._training / max(1, len(self._online())))
        # If nodes share workers, their speeds differ by chance.
        if share >= MOST_TRAIN and done >= algorithm.ENDING_FROM and not self.shares_workers:
            self.progress.say_once(ALL_TRAIN)
        return algorithm.ending(done, self.progress.rounds * share, share)

    def _online(self) -> Set[int]:
        """Return the nodes that are online, as far as a run has looked."""
        queue = self.fleet.queue
        return frozenset() if queue is None else queue.online()

    def state_dict(self) -> StateDict:
        """Return FedBuff's state, and the examples of this round."""
        own: StateDict = {"trained": self.examples, "rounds": self.progress.rounds_done}
        return super().state_dict() | own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        self.examples = float(str(state["trained"]))
        self.progress.rounds_done = int(str(state["rounds"]))


def server_momentum(strategy: Wrapper) -> float:
    """Return how much of the last server update FedAvgM repeats in the next one."""
    momentum: float = getattr(strategy.leaf, "server_momentum", 0.0)
    return momentum


# --- l. 1: the steps of a slice ------------------------------------------------------------------


class Usual(NamedTuple):
    """What is expected of a node that has not answered yet; NaN and infinity: nothing."""

    step_s: float = nan
    fixed_s: float = nan
    job_steps: float = inf


class Stage(NamedTuple):
    """What the steps of slices depend on beside the speeds of the nodes."""

    ending: Ending = Ending()
    """How far the run has gone over to equal steps."""
    fixed_share: float = FIXED_SHARE
    """Rho, the largest share of a message's fixed cost in a slice."""
    usual: Usual = Usual()
    """What is expected of nodes that have not answered yet."""


class SliceSteps(MeasuredSteps):
    """Steps that fit a slice, whatever a message costs."""

    name: ClassVar[str] = "local_steps"
    called = "FedSlice"

    def __init__(self, strategy: Strategy | None, slice_steps: int, keep_optimizer: bool) -> None:
        # A node counts by its steps: late in the run all take as many.
        super().__init__(strategy, step_correction=0.0)
        self.slice_steps = slice_steps
        self.keep_optimizer = keep_optimizer
        # SliceRule sets it before it draws nodes.
        self.stage = Stage()
        # By node: steps and seconds of its next slice, and what those of all nodes depend on.
        self._slices: dict[str, tuple[int, float]] = {}
        self._slices_of: Hashable = None

    def on_start(self, run: Run) -> None:
        """Say if the model is too large for nodes to keep the state of an optimizer."""
        super().on_start(run)
        self._slices.clear()
        adam_bytes = 8 * num_parameters(run.arrays)
        if self.keep_optimizer and adam_bytes > MOST_BYTES and not run.continues:
            text = "FedSlice: optimizers start over in each message where their state exceeds %.1f "
            log(WARNING, text + "GB. Adam's has %.1f GB here", MOST_BYTES / 1e9, adam_bytes / 1e9)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Ask nodes for the steps of a slice, and to go on with their optimizers."""
        for message in super().on_instructions(context, messages, grid):
            # Momentum that is kept for as long as slices are then adds up.
            is_kept = self.keep_optimizer and self.stage.ending.equal < EQUAL_ENOUGH
            config_of(message)[keys.KEEP_OPTIMIZER] = is_kept
        return messages

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Learn the nodes' speeds, on which their next slices depend."""
        for reply in replies:
            self._slices.pop(self.identity(reply.metadata.src_node_id), None)
        return super().on_replies(context, replies)

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node's next slice; shape (len(nodes),)."""
        return np.array([steps for steps, _ in self._next_slices(nodes)], np.int64)

    def slices_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return the seconds of each node's slice with its message; NaN where unknown."""
        return np.array([seconds for _, seconds in self._next_slices(nodes)], np.float64)

    def _next_slices(self, nodes: Sequence[str]) -> list[tuple[int, float]]:
        """Return steps and seconds of each node's next slice, computed once until these change."""
        equal = self.stage.ending.equal
        quick = 1.0
        if equal:
            # l. 7: by the slices of all nodes that are known, and not of those alone
            quick = self._figure(
                "quick", lambda: algorithm.quick_steps(self._fitting_steps(self._known()))
            )
        depends_on = self.stage, quick, self._quick_s(), self.speeds.usual_link_s()
        if depends_on != self._slices_of:
            self._slices.clear()
            self._slices_of = depends_on
        if new := [node for node in nodes if node not in self._slices]:
            fitting = self._fitting_steps(new)
            steps = algorithm.equal_steps(fitting, self._job_steps(new), quick, equal)
            step_s = [self.speeds.step_s.get(node, nan) for node in new]
            fixed_s = [self.speeds.fixed_s(node) for node in new]
            seconds = algorithm.seconds_of(steps, step_s, fixed_s)
            slices = zip(steps.tolist(), seconds.tolist(), strict=True)
            self._slices |= zip(new, slices, strict=True)
        return [self._slices[node] for node in nodes]

    def _quick_s(self) -> float:
        return self.speeds.quick_round_s(self.slice_steps, with_link=False)

    def _fitting_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps that fit each node's slice of equal time."""
        speeds = self.speeds
        usual = self.stage.usual
        known = speeds.step_s
        # l. 1
        return algorithm.slice_steps(
            self._quick_s(),
            [known.get(node, usual.step_s) for node in nodes],
            [speeds.fixed_s(node) if node in known else usual.fixed_s for node in nodes],
            self._job_steps(nodes),
            self.stage.fixed_share,
        )

    def _job_steps(self, nodes: Sequence[str]) -> list[float]:
        jobs = self.speeds.jobs
        usual = self.stage.usual.job_steps
        return [jobs[node].steps if node in jobs else usual for node in nodes]

    # --- figures of all nodes ---------------------------------------------------------------

    def spread(self) -> float:
        """Return how many steps of a slice a quick node takes, in means of all nodes."""
        return self._figure("spread", lambda: algorithm.spread_of(self.num_steps(self._known())))

    def usual_slice_s(self) -> float:
        """Return the seconds of a short slice that is usual, with its message; 0 if unknown."""
        return self._figure("slice", lambda: algorithm.usual_slice(self.slices_s(self._known())))

    def are_similar(self) -> bool:
        """Return whether nodes that share workers take about as long for a step."""
        step_s = self.speeds.step_s
        return self.speeds.figure(
            "similar", lambda: algorithm.are_alike([*step_s.values()], ALIKE_SHARED)
        )

    def usual_of_others(self) -> Usual:
        """Return what the nodes that have answered need, which others like them will need, too."""
        return self.speeds.figure("others", self._look_at_others)

    def _look_at_others(self) -> Usual:
        speeds = self.speeds
        if len(speeds.step_s) < 2:
            return Usual()
        fixed_s = [speeds.fixed_s(node) for node in speeds.step_s]
        job_steps = [job.steps for job in speeds.jobs.values()]
        step_s = median(speeds.step_s.values())
        return Usual(step_s, float(np.median(fixed_s)), median_low(job_steps))

    def _figure(self, name: str, compute: Callable[[], _Value]) -> _Value:
        """Return a figure of all slices, which become equal little by little."""
        equal, _ = self.stage.ending
        key = (self.stage.fixed_share, self.stage.usual, round(equal, 2))
        return self.speeds.figure(name, compute, key)

    def _known(self) -> list[str]:
        return list(self.speeds.step_s)


# --- what the rule learns of workers and of the length of a run ----------------------------------


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
        wanted = algorithm.places_in_flight(self.number, job_s)
        # Until the first messages have come back, further workers may be busy with them.
        if len(self._replies) < FIRST_PLACES:
            wanted = max(wanted, FIRST_PLACES)
        return min(most, wanted)


class Progress:
    """Rounds that are over, of those of all calls of ``start``."""

    def __init__(self, total_rounds: int | None) -> None:
        self.total_rounds = total_rounds
        # None: unknown
        self.rounds: int | None = total_rounds
        self.rounds_done = 0
        # The part of the present round that is over.
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

    @property
    def done(self) -> float:
        """The part of training that is over; 0 where its length is unknown."""
        return min(1.0, (self.rounds_done + self.part) / self.rounds) if self.rounds else 0.0
