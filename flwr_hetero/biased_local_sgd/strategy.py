"""Local steps by speed, and biased local SGD."""

from collections.abc import Sequence
from math import nan
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd import algorithm
from flwr_hetero.biased_local_sgd.algorithm import Indices
from flwr_hetero.biased_local_sgd.node_speeds import MeasuredSteps, assigned_steps
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.records import config_of
from flwr_hetero.state_dict import StateDict, entries_below


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

    def fast_nodes(self) -> set[str]:
        """Return the nodes of the fast class."""
        return self.speeds.classes()[0]


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
        fast_nodes = self.fast_nodes()
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
