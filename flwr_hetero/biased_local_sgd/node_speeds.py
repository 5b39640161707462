"""How fast each node computes and transfers; the wrapper that learns it and sets steps by it."""

import json
from collections.abc import Iterable, Sequence
from math import ceil, inf, isfinite, isnan, nan
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd import algorithm
from flwr_hetero.biased_local_sgd.algorithm import SAME_CLASS_RATIO, Floats, Indices
from flwr_hetero.errors import check_number
from flwr_hetero.exchange.aggregate import with_update
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.exchange.nodes import Figure
from flwr_hetero.records import Latency, config_of, configs_in, metrics_in, read_number
from flwr_hetero.server.client_support import STEPS
from flwr_hetero.server.composition import check_unscaled
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict

SMOOTHING = 0.5
"""Weight of the past in a node's measured times."""
QUICK_SHARE = 0.1
"""Of the nodes measured, those quicker than the one that a deadline is made for."""
LONGEST_S, MOST_PASSES = 1e9, 1_000
"""What is believed of a node: times within 1/LONGEST_S and LONGEST_S, and local epochs."""


class Job(NamedTuple):
    """What a node would do in a round of FedAvg: passes over its data, steps, and examples."""

    passes: int
    steps: float  # infinite if unknown
    examples: float
    least: int = 1
    """Steps in which each pass holds a whole step of the app's optimizers."""


class NodeSpeeds:
    """Smoothed seconds per step and per message of every node measured so far, by identity."""

    def __init__(self, weight_key: str | None = None) -> None:
        self.weight_key = weight_key or keys.NUM_EXAMPLES
        self.step_s: dict[str, float] = {}
        # By node: the fixed cost of a message, which is its transfer and all else that is no step.
        self.link_s: dict[str, float] = {}
        # The same of real nodes that have replied once, whose first message has loaded the app.
        self.first_s: dict[str, float] = {}
        self._loaded = set[str]()
        # By node: what it would do in a round of FedAvg.
        self.jobs: dict[str, Job] = {}
        # The number of times that anything was learnt, and figures of all nodes.
        self.changes = 0
        self._usual_link_s = Figure[float]()
        self._usual_least = Figure[int]()
        self._quick_s: dict[bool, Figure[float]] = {True: Figure(), False: Figure()}
        self._classes = Figure[tuple[set[str], float]]()

    def learn(self, context: Exchange, reply: Message, metrics: MetricRecord, steps: int) -> None:
        """Learn a node's job, and its times of a step and of a message, from a good reply."""
        identity = context.identity(reply.metadata.src_node_id)
        self.jobs[identity] = job_of(metrics, work_in(reply), steps, self.weight_key)
        latency = context.latency_of(reply)
        if latency is None:
            self.changes += 1
        else:
            seen_s = context.round_trip_s.get(reply.metadata.reply_to_message_id, 0.0)
            times = divided(reply, latency, steps, seen_s if context.same_clock else 0.0)
            # A worker of Flower's simulation loads the app once, for all of its nodes.
            record = configs_in(reply.content).get(keys.TIMING, ConfigRecord())
            loader = str(record.get(keys.WORKER, identity))
            self.observe(identity, steps, *times, loads=not latency.emulated, loader=loader)

    def observe(
        self,
        node: str,
        steps: int,
        compute_s: float,
        link_s: float,
        *,
        loads: bool = False,
        loader: str = "",
    ) -> None:
        """Update a node's times with those of a round; ``loads``: its first message loads the app.

        The first one's fixed cost counts until there is another. ``loader``: the process that loads
        the app, if several nodes share it.
        """
        self.changes += 1
        step_s = min(max(compute_s / steps, 1 / LONGEST_S), LONGEST_S)
        link_s = min(link_s, LONGEST_S)
        self.step_s[node] = smoothed(self.step_s.get(node), step_s)
        if loads and (loader or node) not in self._loaded:
            self._loaded.add(loader or node)
            # A cost that is known is from an earlier run.
            if node not in self.link_s:
                self.link_s[node] = self.first_s[node] = link_s
        elif self.first_s.pop(node, None) is not None:
            self.link_s[node] = link_s
        else:
            self.link_s[node] = smoothed(self.link_s.get(node), link_s)

    def fixed_s(self, node: str) -> float:
        """Return what a message costs a node beside its steps; NaN if that is unknown."""
        if (first_s := self.first_s.get(node)) is None:
            return self.link_s.get(node, nan)
        # Its own cost is unknown. One slice too long does more harm than one message too many.
        usual_s = self._usual_link_s.of(self._median_link_s, self.changes, len(self.link_s))
        return nan if isnan(usual_s) else min(first_s, usual_s)

    def _median_link_s(self) -> float:
        known_s = [self.link_s[node] for node in self.link_s if node not in self.first_s]
        return median_low(known_s) if known_s else nan

    @property
    def usual_least(self) -> int:
        """The median of the fewest steps in which each local epoch of a node holds a whole step."""

        def compute() -> int:
            return median_low([job.least for job in self.jobs.values()] or [1])

        return self._usual_least.of(compute, self.changes, len(self.jobs))

    def classes(self) -> tuple[set[str], float]:
        """Return the fast nodes, and gamma between the two classes."""
        return self._classes.of(self._look_at_classes, self.changes, len(self.step_s))

    def _look_at_classes(self) -> tuple[set[str], float]:
        # Less than a third of the nodes are no class. They count as a little faster than a third.
        least_s = _third(self.step_s.values()) / SAME_CLASS_RATIO
        step_s = [max(time_s, least_s) for time_s in self.step_s.values()]
        fast, gamma = algorithm.fast_class(step_s)
        return {node for node, is_fast in zip(self.step_s, fast, strict=True) if is_fast}, gamma

    def quick_round_s(self, num_steps: int, *, with_link: bool = True) -> float:
        """Return the seconds that a quick node needs; a few cannot set it."""
        return self._quick_s[with_link].of(
            lambda: self._quick_round_s(num_steps, with_link),
            self.changes,
            len(self.step_s),
            key=num_steps,
        )

    def _quick_round_s(self, num_steps: int, with_link: bool) -> float:
        link_s = self.link_s if with_link else dict.fromkeys(self.link_s, 0.0)
        rounds_s = sorted(link_s[n] + num_steps * self.step_s[n] for n in self.step_s)
        if not rounds_s:
            return inf
        quick_s = rounds_s[max(1, int(QUICK_SHARE * len(rounds_s))) if len(rounds_s) > 3 else 0]
        # It is at least half of what the quickest third needs, so that fewer nodes cannot set it.
        return max(quick_s, _third(rounds_s) / 2)


def smoothed(old: float | None, new: float) -> float:
    """Return a node's time after one more measurement."""
    return new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new


def work_in(reply: Message) -> ConfigRecord:
    """Return what a node says of its work; empty if it says nothing."""
    return configs_in(reply.content).get(keys.WORK, ConfigRecord())


def job_of(metrics: MetricRecord, work: ConfigRecord, steps: int, weight_key: str) -> Job:
    """Read from a reply of so many steps what the node's whole job would be."""
    passes = min(max(1, int(read_number(work, keys.PASSES, 1.0))), MOST_PASSES)
    examples = passes * read_number(metrics, weight_key, 0.0)
    batch = read_number(metrics, keys.EXAMPLES_PROCESSED, 0.0) / steps
    whole = read_number(work, keys.JOB_STEPS, examples / batch if batch > 0 else inf)
    whole = whole if isfinite(whole) and whole >= 1 else inf
    least = max(1.0, passes * max(1.0, read_number(work, keys.STEP_BATCHES, 1.0)))
    return Job(passes, whole, examples, int(min(least, max(passes, whole), MOST_PASSES)))


def divided(reply: Message, latency: Latency, steps: int, seen_s: float) -> tuple[float, float]:
    """Divide a latency into computing and the rest; ``seen_s``: the round trip, 0 if unknown."""
    compute_s = latency.seconds
    fixed_s = 0.0
    work = work_in(reply)
    if latency.emulated:
        fixed_s = read_number(configs_in(reply.content)[keys.TIMING], keys.TRANSFER_TIME, 0.0)
        compute_s -= fixed_s
        # A message goes on beyond the steps asked for until each epoch holds an optimizer step.
        if (done := read_number(work, keys.NUM_STEPS, steps)) > steps:
            compute_s *= steps / done
    elif (step_s := read_number(work, keys.STEP_TIME, 0.0)) > 0:
        compute_s = min(steps * step_s, latency.seconds)
        fixed_s = latency.seconds - compute_s
    if not latency.emulated:
        # This is what the worker of a simulation spends between two messages.
        timing = configs_in(reply.content).get(keys.TIMING, ConfigRecord())
        fixed_s += max(0.0, read_number(timing, keys.HANDOVER_TIME, 0.0))
    if latency.source != "observed":
        # What a node does not claim is its link. Errors of rounding are none.
        fixed_s = max(fixed_s, round(seen_s - compute_s, 6))
    return compute_s, fixed_s


def _third(times_s: Iterable[float]) -> float:
    """Return the longest time of the quickest third."""
    ordered = sorted(times_s)
    return ordered[ceil(len(ordered) / 3) - 1] if ordered else 0.0


# --- the wrapper ---------------------------------------------------------------------------


def assigned_steps(message: Message) -> int:
    """Return the steps that an instruction asks for."""
    return int(read_number(config_of(message), keys.NUM_STEPS, 0.0))


class MeasuredSteps(Wrapper):
    """Set each node's local steps by its measured speed; a budget overrides ``num_steps``."""

    decides = frozenset({"steps"})
    client_support = (STEPS,)

    def __init__(self, strategy: Strategy | None, step_correction: float) -> None:
        check_number("step_correction", step_correction, "[0, 1]")
        super().__init__(strategy)
        if step_correction:
            check_unscaled(self, "step_correction", step_correction)
        self.step_correction = step_correction
        self.speeds = NodeSpeeds(self._weight_key)
        self.usual_steps: dict[str, tuple[float, float]] = {}  # and weight, of every node seen
        self._mean_steps = Figure[float]()
        self._num_scaled = 0
        self._assigned: dict[str, int] = {}

    def num_steps(self, nodes: Sequence[str]) -> Indices:
        """Return the steps of each node; shape (len(nodes),)."""
        raise NotImplementedError

    def scales(self, replies: Messages, steps: Indices, weights: list[float]) -> Floats:
        """Return the scale of each update: mean steps of all nodes seen, over its own."""
        for reply, count, weight in zip(replies, steps.tolist(), weights, strict=True):
            self.usual_steps[self.identity(reply.metadata.src_node_id)] = (count, weight)
        self._num_scaled += len(replies)
        num_nodes = len(self.usual_steps)
        mean_steps = self._mean_steps.of(self._look_at_steps, self._num_scaled, num_nodes)
        return algorithm.correction_scales(steps, mean_steps, self.step_correction)

    def _look_at_steps(self) -> float:
        steps, weights = np.array(list(self.usual_steps.values())).T
        return float(np.average(steps, weights=weights))

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Write each node's steps into its own config."""
        steps = self.num_steps([self.identity(m.metadata.dst_node_id) for m in messages])
        # Each local epoch holds one step of the app's optimizers, at least.
        steps = np.maximum(steps, self.speeds.usual_least)
        for message, count in zip(messages, steps.tolist(), strict=True):
            config_of(message)[keys.NUM_STEPS] = count
        return messages

    def steps_of(self, context: Exchange, reply: Message) -> int:
        """Return the steps that count: those reported, at most those assigned; 0 for nonsense."""
        (metrics,) = metrics_in(reply.content).values()
        assigned = assigned_steps(context.instruction_of(reply))
        return max(0, int(min(read_number(metrics, keys.NUM_STEPS, 0.0), assigned)))

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Refuse a claim that is no number of steps."""
        (metrics,) = metrics_in(reply.content).values()
        claim = metrics.get(keys.NUM_STEPS)
        assigned = assigned_steps(context.instruction_of(reply))
        if claim is None or self.steps_of(context, reply):
            return None
        return f"claims {claim!r} steps instead of 1 to {assigned}"

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Learn the nodes' speeds from the steps that count, and undo a power of these."""
        self._assigned = {}
        for reply in replies:
            node_id = reply.metadata.src_node_id
            (metrics,) = metrics_in(reply.content).values()
            assigned = assigned_steps(context.instruction_of(reply))
            claim = read_number(metrics, keys.NUM_STEPS, 0.0)
            # A message goes on until each epoch holds a whole step of the app's optimizers.
            job = job_of(metrics, work_in(reply), assigned, self.speeds.weight_key)
            if claim > assigned + (job.least if job.least > 1 else 0):
                context.note(node_id, f"claims {claim:g} steps, was assigned {assigned}")
            self._assigned[context.identity(node_id)] = assigned
            if steps := self.steps_of(context, reply):
                # Metrics are means over the steps that count.
                metrics[keys.NUM_STEPS] = steps
                self.speeds.learn(context, reply, metrics, steps)
        return self._corrected(context, replies) if self.step_correction else replies

    def _corrected(self, context: Exchange, replies: Messages) -> Messages:
        """Scale each node's update by a power of its steps."""
        start = context.arrays
        weights = self.top.weights(context, replies)
        if not any(weights):
            return replies
        # A node that reports no steps is scaled least.
        steps = np.array([self.steps_of(context, reply) for reply in replies])
        steps[steps == 0] = steps.max(initial=1)
        scaled = zip(replies, self.scales(replies, steps, weights).tolist(), strict=True)
        return [r if s == 1.0 else with_update(r, start, start, s) for r, s in scaled]

    def on_profile_replies(self, context: Exchange, replies: Messages) -> None:
        """Learn from another wrapper's profiling how fast nodes are that report their steps."""
        for reply in replies:
            for metrics in metrics_in(reply.content).values():
                if (steps := int(read_number(metrics, keys.NUM_STEPS, 0.0))) >= 1:
                    self.speeds.learn(context, reply, metrics, steps)

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the measured times belong to."""
        if self.speeds.step_s and not run.continues:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def round_info(self) -> dict[str, Any]:
        """Return the steps assigned to each node."""
        return {"num_steps": self._assigned}

    def state_dict(self) -> StateDict:
        """Return the measured times, jobs and steps, as JSON."""
        known = {name: getattr(self.speeds, name) for name in ("step_s", "link_s", "jobs")}
        return {"known": json.dumps({**known, "usual_steps": self.usual_steps})}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        saved = json.loads(str(state["known"]))
        self.speeds.step_s = saved["step_s"]
        self.speeds.link_s = saved["link_s"]
        self.speeds.jobs = {node: Job(*job) for node, job in saved["jobs"].items()}
        self.speeds.changes += len(self.speeds.jobs) + 1
        self.usual_steps = saved["usual_steps"]
        self._num_scaled += len(self.usual_steps) + 1
