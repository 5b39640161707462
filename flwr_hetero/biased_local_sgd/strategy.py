"""Local steps by measured speed, and biased local SGD."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import ceil, inf, isfinite, isnan, nan
from statistics import median_low
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd import algorithm
from flwr_hetero.biased_local_sgd.algorithm import SAME_CLASS_RATIO, Floats, Indices
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.exchange.aggregate import with_update
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.exchange.nodes import Figure
from flwr_hetero.records import Latency, config_of, configs_in, metrics_in, read_number
from flwr_hetero.server.client_support import STEPS
from flwr_hetero.server.composition import check_unscaled
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, entries_below

SMOOTHING = 0.5
"""Weight of the past in a node's measured times."""
QUICK_SHARE = 0.1
"""Of the nodes measured, those quicker than the one that a deadline is made for."""
LONGEST_S, MOST_PASSES = 1e9, 1_000
"""What is believed of a node: times within 1/LONGEST_S and LONGEST_S, and local epochs."""

_Value = TypeVar("_Value")


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
        # By node that was seen: its last steps, and its weight.
        self.usual_steps: dict[str, tuple[float, float]] = {}
        self._assigned: dict[str, int] = {}

    def num_steps(self, nodes: Sequence[str]) -> Indices:
        """Return the steps of each node; shape (len(nodes),)."""
        raise NotImplementedError

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
        counted = []
        for reply in replies:
            node_id = reply.metadata.src_node_id
            (metrics,) = metrics_in(reply.content).values()
            assigned = assigned_steps(context.instruction_of(reply))
            claim = read_number(metrics, keys.NUM_STEPS, 0.0)
            if claim > assigned:
                # A message goes on until each epoch holds a whole step of the app's optimizers.
                job = job_of(metrics, work_in(reply), assigned, self.speeds.weight_key)
                if claim > assigned + (job.least if job.least > 1 else 0):
                    context.note(node_id, f"claims {claim:g} steps, was assigned {assigned}")
            self._assigned[context.identity(node_id)] = assigned
            steps = self.steps_of(context, reply)
            if steps:
                # Metrics are means over the steps that count.
                metrics[keys.NUM_STEPS] = steps
                self.speeds.learn(context, reply, metrics, steps)
            counted.append(steps)
        weights = self.top.weights(context, replies) if self.step_correction else []
        if not any(weights):
            return replies
        # A node that reports no steps is scaled least.
        steps_of_all = np.array([steps or max(1, *counted) for steps in counted])
        scales = self.scales(replies, steps_of_all, weights).tolist()
        start = context.arrays
        return [
            reply if scale == 1.0 else with_update(reply, start, start, scale)
            for reply, scale in zip(replies, scales, strict=True)
        ]

    def scales(self, replies: Messages, steps: Indices, weights: list[float]) -> Floats:
        """Return the scale of each update: mean steps of all nodes seen, over its own."""
        for reply, count, weight in zip(replies, steps.tolist(), weights, strict=True):
            self.usual_steps[self.identity(reply.metadata.src_node_id)] = (count, weight)
        mean_steps = self.speeds.figure("mean steps", self._look_at_steps)
        return algorithm.correction_scales(steps, mean_steps, self.step_correction)

    def _look_at_steps(self) -> float:
        steps, weights = np.array(list(self.usual_steps.values())).T
        return float(np.average(steps, weights=weights))

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


class LocalSteps(MeasuredSteps):
    r"""Set each node's local steps by its speed.

    .. math:: \tau_i = \lfloor \gamma_i \tau_F \rfloor

    The number is ``num-steps`` in the config of the node's instruction. The node reports its steps
    as ``num-steps`` in its metrics, and at most the assigned number counts. Lim et al., "Biased
    Local SGD for Efficient Deep Learning on Heterogeneous Systems", section 4.1. ValueError for a
    setting out of range, or of another kind of budget. MissingClientSupportError in the first round
    if no node reports its steps.

    >>> strategy = LocalSteps(fast_steps=32, budget="deadline", deadline_s=60.0)

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates; FedAvg if left out. It is copied: see :class:`Wrapper`.
    fast_steps : int
        Number tau_F of steps that a fast node takes in a round.
    budget : {"two-class", "deadline"}
        ``two-class``, the paper's: tau_F or gamma tau_F. ``deadline``: the steps that fit into
        ``deadline_s``, including transfers.
    gamma : float, optional
        For two classes: tau_S / tau_F in (0, 1]. None: measured.
    deadline_s : float, optional
        Seconds of a round. None: the time in which a fast node takes ``fast_steps``. This is the
        second fastest node, or the one that 10 % are faster than. The deadline is at least half of
        the time that the fastest third needs.
    step_correction : float
        Power q in [0, 1] of its steps that is undone: updates are scaled by
        :math:`(\bar\tau / \tau_i)^q`. 0: a node's data count by its steps. 1: as in FedAvg, but an
        update of few steps is magnified together with its noise.

    Notes
    -----
    A node that was never measured gets one step, so that the first round of a new fleet measures
    it. Fewer than a third of the nodes cannot change a measured gamma, or a default deadline by
    more than a factor of 2. Set gamma if fewer nodes are fast.
    """

    name: ClassVar[str] = "local_steps"

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        budget: str = "two-class",
        gamma: float | None = None,
        deadline_s: float | None = None,
        step_correction: float = 0.5,
    ) -> None:
        self.fast_steps = check_count("fast_steps", fast_steps, 1)
        self.budget = check_choice("budget", budget, ("two-class", "deadline"))
        if gamma is not None:
            check_number("gamma", gamma, "(0, 1]")
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, "(0, inf)")
        other = ("deadline_s", deadline_s) if budget == "two-class" else ("gamma", gamma)
        if other[1] is not None:
            raise invalid(*other, f"be left out with budget={budget!r}")
        self.gamma = gamma
        self.deadline_s = deadline_s
        super().__init__(strategy, step_correction)

    def num_steps(self, nodes: Sequence[str]) -> Indices:
        """Return the steps of each node; shape (len(nodes),)."""
        step_s = np.array([self.speeds.step_s.get(node, nan) for node in nodes])
        if self.budget == "deadline":
            link_s = np.array([self.speeds.link_s.get(node, nan) for node in nodes])
            limit_s = self.deadline_s or self.speeds.quick_round_s(self.fast_steps)
            return algorithm.timed_steps(limit_s, step_s, link_s, self.fast_steps)
        fast, measured = self.speeds.classes()
        slow_gamma = measured if self.gamma is None else self.gamma
        gammas = np.array([1.0 if node in fast else slow_gamma for node in nodes])
        # Balanced steps do not depend on times.
        if self.gamma != 1:
            gammas[np.isnan(step_s)] = nan
        # Alg. 1, l. 1
        return algorithm.gamma_steps(gammas, self.fast_steps)


class BiasedLocalSGD(LocalSteps):
    r"""Let fast nodes take more steps, count more and train on samples with higher losses.

    .. math:: x_{t+1} = \sum_i \frac{\tau_i}{\sum_k \tau_k} x_t^i \quad \text{(weigh_by_steps)}

    Nodes choose their samples with a :class:`~flwr_hetero.sampler.TopLossSampler`. Strategies
    without weights (median, trimmed mean, Krum) use the steps only. Lim et al., "Biased Local SGD
    for Efficient Deep Learning on Heterogeneous Systems", Algorithm 1. ValueError for a setting out
    of range, or a strategy that cannot weight by steps.

    >>> strategy = BiasedLocalSGD(fast_steps=32, high_loss_fraction=0.3)

    Parameters
    ----------
    strategy, fast_steps, **budget
        As for :class:`LocalSteps`.
    weigh_by_steps : bool, optional
        The paper's bias in aggregation, Eq. (4). None: for shared data only, as in the paper. With
        private data, it would weight a node's data by about the square of its steps.
    step_correction : float, optional
        As for LocalSteps. None: 0.5, or 0 if models are weighted by steps.
    high_loss_fraction : float, optional
        The bias in sampling: lambda in (0, 1]. None: all nodes sample uniformly.
    share : float, optional
        Part of the samples that is allocated to fast nodes, in (0, 1]. None: the paper's,
        tau_F P_F / (tau_F P_F + tau_S P_S). The bias is weaker if it is closer to 1.
    shared_samples : int, optional
        Size N of a data set that all nodes have (the paper's setting): the server collects losses
        and assigns indices. None: each node ranks its own samples and sends nothing about them.
    batch_size : int
        For shared data: examples in a step.
    unified : bool
        For shared data: whether slow nodes get the samples that the fast nodes left (Table 6).
    seed : int
        For shared data: seed of the server's generator.
    """

    name: ClassVar[str] = "biased_local_sgd"

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        weigh_by_steps: bool | None = None,
        step_correction: float | None = None,
        high_loss_fraction: float | None = 0.5,
        share: float | None = None,
        shared_samples: int | None = None,
        batch_size: int = 32,
        unified: bool = False,
        seed: int = 0,
        **budget: Any,
    ) -> None:
        if is_shared := shared_samples is not None:
            self.decides = self.decides | {"samples", "orders"}
            self.only_rounds = "indices are assigned to all nodes of a round together"
        elif unified:
            rule = "be left out without shared data"
            raise invalid("unified", unified, rule, "set shared_samples")
        self.weigh_by_steps = is_shared if weigh_by_steps is None else weigh_by_steps
        if self.weigh_by_steps and step_correction:
            rule = "be 0 or left out where models are weighted by steps"
            raise invalid("step_correction", step_correction, rule)
        if step_correction is None:
            step_correction = 0.0 if self.weigh_by_steps else 0.5
        super().__init__(strategy, fast_steps, step_correction=step_correction, **budget)
        if self.weigh_by_steps:
            self._check_weights_by_steps()
        if high_loss_fraction is not None:
            check_number("high_loss_fraction", high_loss_fraction, "(0, 1]", "None switches it off")
        if share is not None:
            check_number("share", share, "(0, 1]")
        self.high_loss_fraction = high_loss_fraction
        self.share = share
        self.shared_samples = shared_samples
        self.batch_size = batch_size
        self.unified = unified
        self.seed = check_count("seed", seed)
        self.shared: SharedSamples | None = None
        if shared_samples is not None:
            how = high_loss_fraction, share, unified, seed
            self.shared = SharedSamples(shared_samples, batch_size, *how)

    def _check_weights_by_steps(self) -> None:
        leaf = type(self.leaf).__name__
        hint = "or pass weigh_by_steps=False"
        if not isinstance(self.leaf, FedAvg):
            raise invalid("strategy", leaf, "derive from FedAvg to weight by steps", hint)
        if any(getattr(s, "accountant", None) for s in self.chain() if s is not self):
            rule = "be without a privacy accountant, which asks for equal weights"
            raise invalid("strategy", leaf, rule, hint)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Write each node's steps, and what it needs to choose its samples."""
        # l. 1: tau_S <- gamma tau_F; the nodes do l. 8 to 13
        messages = super().on_instructions(context, messages, grid)
        sort_key = context.fleet.nodes.sort_key
        fast_nodes, _ = self.speeds.classes()
        asked = sorted(messages, key=lambda message: sort_key(message.metadata.dst_node_id))
        if self.shared is not None:
            # A node that was never measured chooses its first samples by itself.
            known = self.speeds.step_s
            asked = [m for m in asked if self.identity(m.metadata.dst_node_id) in known]
        steps = [assigned_steps(message) for message in asked]
        fast = [self.identity(message.metadata.dst_node_id) in fast_nodes for message in asked]
        if self.shared is not None:
            # l. 3 to 6 of the data that all nodes see
            self.shared.assign(asked, steps, fast)
        elif self.high_loss_fraction is not None and asked:
            # l. 3 to 6 are the nodes' own: TopLossSampler needs N_F / N and lambda
            share = self.share or algorithm.fast_share(steps, fast) or 1.0
            for message, is_fast in zip(asked, fast, strict=True):
                config = config_of(message)
                config[keys.FAST] = is_fast
                config[keys.FAST_SHARE] = share
                config[keys.HIGH_LOSS_FRACTION] = self.high_loss_fraction
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Refuse steps and, with shared data, losses that make no sense."""
        reason = super().why_bad(context, reply)
        return reason or (self.shared.why_bad(reply) if self.shared else None)

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Learn the nodes' speeds and, with shared data, the losses."""
        if self.shared is not None:
            # l. 14: record the loss of every processed sample
            self.shared.record(replies)
        return super().on_replies(context, replies)

    def weights(self, context: Exchange, replies: Messages) -> list[float]:
        """Weight models by their steps; a model without steps gets the smallest weight."""
        if not self.weigh_by_steps:
            return super().weights(context, replies)
        # l. 15: average the models by steps, Eq. (4)
        steps = [self.steps_of(context, reply) for reply in replies]
        fewest = min((count for count in steps if count), default=1)
        return [float(count or fewest) for count in steps]

    def state_dict(self) -> StateDict:
        """Return the measured times and, with shared data, the losses and pools."""
        shared = {} if self.shared is None else self.shared.state_dict()
        return super().state_dict() | {f"shared.{key}": value for key, value in shared.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        if self.shared is not None:
            self.shared.load_state_dict(entries_below("shared.", state))
        super().load_state_dict(state)


# --- what is measured of the nodes -----------------------------------------------------------


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
        self.jobs: dict[str, Job] = {}
        # The number of times that anything was learnt.
        self.changes = 0
        self._figures: dict[str, Figure[Any]] = defaultdict(Figure)

    def figure(self, name: str, compute: Callable[[], _Value], key: Hashable = None) -> _Value:
        """Return a figure of all nodes, which is not computed again for each reply.

        ``key``: what it depends on beside what was measured.
        """
        value: _Value = self._figures[name].of(compute, self.changes, len(self.jobs), key)
        return value

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
        usual_s = self.usual_link_s()
        return nan if isnan(usual_s) else min(first_s, usual_s)

    def usual_link_s(self) -> float:
        """Return the median of the fixed costs that are known where some are not; else NaN."""
        return self.figure("link", self._median_link_s) if self.first_s else nan

    def _median_link_s(self) -> float:
        known_s = [self.link_s[node] for node in self.link_s if node not in self.first_s]
        return median_low(known_s) if known_s else nan

    @property
    def usual_least(self) -> int:
        """The median of the fewest steps in which each local epoch of a node holds a whole step."""
        return self.figure(
            "least", lambda: median_low([job.least for job in self.jobs.values()] or [1])
        )

    def classes(self) -> tuple[set[str], float]:
        """Return the fast nodes, and gamma between the two classes."""
        return self.figure("classes", self._look_at_classes)

    def _look_at_classes(self) -> tuple[set[str], float]:
        # Less than a third of the nodes are no class. They count as a little faster than a third.
        least_s = _third(self.step_s.values()) / SAME_CLASS_RATIO
        step_s = [max(time_s, least_s) for time_s in self.step_s.values()]
        fast, gamma = algorithm.fast_class(step_s)
        return {node for node, is_fast in zip(self.step_s, fast, strict=True) if is_fast}, gamma

    def quick_round_s(self, num_steps: int, *, with_link: bool = True) -> float:
        """Return the seconds that a quick node needs; a few cannot set it."""

        def compute() -> float:
            link_s = self.link_s if with_link else dict.fromkeys(self.link_s, 0.0)
            rounds_s = sorted(link_s[n] + num_steps * self.step_s[n] for n in self.step_s)
            if not rounds_s:
                return inf
            place = max(1, int(QUICK_SHARE * len(rounds_s))) if len(rounds_s) > 3 else 0
            # At least half of what the quickest third needs, so that fewer nodes cannot set it.
            return max(rounds_s[place], _third(rounds_s) / 2)

        return self.figure("quick round", compute, (num_steps, with_link))


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
