"""Biased local SGD: unbalanced steps, models weighted by steps, high losses on fast nodes."""

from typing import Any, ClassVar

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import fast_share
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples
from flwr_hetero.biased_local_sgd.step_budget import LocalSteps, assigned_steps
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.records import config_of
from flwr_hetero.server.context import Exchange
from flwr_hetero.state_dict import StateDict, entries_below


class BiasedLocalSGD(LocalSteps):
    r"""Let fast nodes take more steps, weigh more and see the harder samples.

    .. math:: x_{t+1} = \sum_i \frac{\tau_i}{\sum_k \tau_k} x_t^i \quad \text{("steps")}

    Every node gets ``num-steps`` in its own config, and ``fast``, ``fast-share`` and
    ``high-loss-fraction`` for its :class:`~flwr_hetero.sampler.TopLossSampler`. Metrics are
    weighted by examples as before. Robust strategies that do not weight
    (median, trimmed mean, Krum) keep their rule and get the steps only.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy that derives from FedAvg, or another wrapper;
        FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    weighting : {"steps", "examples", "sqrt", "normalised"}, optional
        ``steps`` is the paper's bias in aggregation, the default for shared data. For private
        data it is as for :class:`~flwr_hetero.strategy.LocalSteps`: there the paper's would
        weigh a node's data by about the square of its steps.
    high_loss_fraction : float, optional
        The bias in sampling: lambda in (0, 1]. None: all nodes sample uniformly.
    share : float, optional
        Size of the fast nodes' allocation as a part of the samples, in (0, 1]. None: the
        paper's, tau_F P_F / (tau_F P_F + tau_S P_S). The closer to 1, the weaker the bias.
    shared_samples : int, optional
        Size N of a data set that all nodes see (the paper's setting): the server collects the
        losses and assigns lists of indices. None: each node ranks its own samples, and neither
        an index nor a single loss leaves it.
    batch_size, unified, seed
        For shared data: examples per step; whether slow nodes get what the fast ones left
        (Table 6); of the server's generator.
    **budget
        ``budget``, ``gamma``, ``deadline_s``, ``min_steps``, ``max_steps``, ``on_missing``: as
        for :class:`~flwr_hetero.strategy.LocalSteps`.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy cannot weight by steps.

    References
    ----------
    Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems",
    Algorithm 1.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = BiasedLocalSGD(FedAdam(), fast_steps=32, high_loss_fraction=0.3)
    """

    name: ClassVar[str] = "biased-local-sgd"

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        weighting: str | None = None,
        high_loss_fraction: float | None = 0.5,
        share: float | None = None,
        shared_samples: int | None = None,
        batch_size: int = 32,
        unified: bool = False,
        seed: int = 0,
        **budget: Any,
    ) -> None:
        if shared_samples is not None:
            self.decides = self.decides | {"samples", "orders"}
            self.has_shared_data = True
            self.only_rounds = "indices are assigned to all nodes of a round together"
        default = "sqrt" if shared_samples is None else "steps"
        super().__init__(strategy, fast_steps, weighting=weighting or default, **budget)
        if high_loss_fraction is not None:
            check_number("high_loss_fraction", high_loss_fraction, "(0, 1]", "None switches it off")
        if share is not None:
            check_number("share", share, "(0, 1]")
        check_count("seed", seed)
        self.high_loss_fraction, self.share = high_loss_fraction, share
        self.shared: SharedSamples | None = None
        if shared_samples is not None:
            self.shared = SharedSamples(
                shared_samples, batch_size, high_loss_fraction, share, unified, seed
            )

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Write each node's steps, and what it needs to choose its samples."""
        messages = super().on_instructions(context, messages, grid)
        message_of = {message.metadata.dst_node_id: message for message in messages}
        node_ids = sorted(message_of, key=self.fleet.nodes.sort_key)
        if self.shared is not None:  # a node that was never measured chooses its first samples
            node_ids = [n for n in node_ids if self.identity(n) in self.speeds.step_s]
        fast_nodes = self.fast_nodes()
        steps = [assigned_steps(message_of[node_id]) for node_id in node_ids]
        fast = [self.identity(node_id) in fast_nodes for node_id in node_ids]
        if self.shared is not None:
            self.shared.assign([message_of[node_id] for node_id in node_ids], steps, fast)
        elif self.high_loss_fraction is not None and node_ids:
            share = self.share or fast_share(steps, fast) or 1.0
            for node_id, is_fast in zip(node_ids, fast, strict=True):
                config = config_of(message_of[node_id])
                config[keys.FAST], config[keys.FAST_SHARE] = is_fast, share
                config[keys.HIGH_LOSS_FRACTION] = self.high_loss_fraction
        return messages

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Check steps, learn the nodes' speeds and, with shared data, the losses."""
        good = super().on_replies(context, replies)
        if self.shared is not None:
            for reply in good:
                self.shared.record(reply)
        return good

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Return what is wrong with the steps or, with shared data, with the losses."""
        reason = super().why_bad(context, reply)
        return reason or (self.shared.why_bad(reply) if self.shared else None)

    def round_info(self) -> dict[str, Any]:
        """Return steps, gamma and, with shared data, epoch and samples of known loss."""
        return super().round_info() | ({} if self.shared is None else self.shared.round_info())

    def state_dict(self) -> StateDict:
        """Return the measured times and, with shared data, losses and pools."""
        shared = {} if self.shared is None else self.shared.state_dict()
        return super().state_dict() | {f"shared.{key}": value for key, value in shared.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        if self.shared is not None:
            self.shared.load_state_dict(entries_below("shared.", state))
        super().load_state_dict(state)
