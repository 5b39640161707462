"""Biased local SGD: unbalanced steps, steps-weighted models, high-loss samples on fast nodes."""

from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import check_high_loss_fraction, fast_share
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples, read_samples, samples_record
from flwr_hetero.biased_local_sgd.step_budget import Budget, LocalSteps
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.records import config_of
from flwr_hetero.state_dict import StateDict, entries_below


class BiasedLocalSGD(LocalSteps):
    r"""Let fast nodes do more, count for more and see the harder samples.

    .. math:: x_{t+1} = \sum_i \frac{\tau_i}{\sum_k \tau_k} x_t^i

    Every node gets ``num-steps`` in its own config, and ``fast``, ``fast-share`` and
    ``high-loss-fraction`` for its :class:`~flwr_hetero.sampler.TopLossSampler`. Models are
    weighted by steps, metrics by examples as before. Robust strategies that do not weight
    (median, trimmed mean, Krum) keep their rule and get the steps only.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy that derives from FedAvg, or another wrapper;
        FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    weighted_by_steps : bool
        The bias in aggregation. False: weighted as the wrapped strategy does.
    high_loss_fraction : float, optional
        The bias in sampling: lambda in (0, 1]. None: all nodes sample uniformly.
    share : float, optional
        Size of the fast nodes' allocation as a part of the samples, in (0, 1]. None: the
        paper's, tau_F P_F / (tau_F P_F + tau_S P_S). The closer to 1, the weaker the bias.
    shared_samples : int, optional
        Size N of a data set that all nodes see (the paper's setting): the server collects the
        losses and hands out index lists. None: each node ranks its own samples, and neither
        an index nor a single loss leaves it.
    batch_size : int
        Examples per step; needed for index lists only.
    unified : bool
        For index lists: slow nodes get what the fast ones left (Table 6).
    seed : int
        For index lists.
    smoothing : float
        Weight of the past in a node's measured times, in [0, 1).
    **budget
        ``budget``, ``gamma``, ``deadline_s``, ``min_steps``, ``max_steps``: as for
        :class:`~flwr_hetero.biased_local_sgd.step_budget.StepPlan`.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy cannot weight by steps.

    References
    ----------
    .. [1] Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous
       Systems", Algorithm 1.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = BiasedLocalSGD(FedAdam(), fast_steps=32, high_loss_fraction=0.3)
    >>> BiasedLocalSGD(high_loss_fraction=1.5)
    Traceback (most recent call last):
    ...
    ValueError: high_loss_fraction must lie in (0, 1], got 1.5: ...
    """

    name: ClassVar[str] = "biased-local-sgd"

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        weighted_by_steps: bool = True,
        high_loss_fraction: float | None = 0.5,
        share: float | None = None,
        shared_samples: int | None = None,
        batch_size: int = 32,
        unified: bool = False,
        seed: int = 0,
        smoothing: float = 0.5,
        **budget: Unpack[Budget],
    ) -> None:
        if shared_samples is not None:
            self.decides = self.decides | {"samples", "orders"}
        super().__init__(strategy, fast_steps, smoothing=smoothing, **budget)
        if high_loss_fraction is not None:
            check_high_loss_fraction(high_loss_fraction)
        if share is not None and not 0 < share <= 1:
            raise invalid("share", share, "lie in (0, 1]", "leave it out for the paper's")
        check_count("seed", seed, 0, "any such number will do")
        if shared_samples is not None:
            check_count("shared_samples", shared_samples, 1, "it is the size of the data set")
        self.weighted_by_steps = weighted_by_steps
        self.high_loss_fraction, self.share = high_loss_fraction, share
        self.shared: SharedSamples | None = None
        if shared_samples is not None:
            self.shared = SharedSamples(
                shared_samples,
                batch_size,
                high_loss_fraction,
                share=share,
                unified=unified,
                seed=seed,
            )
        self._handed_out: dict[int, NDArray[np.int64]] = {}
        if weighted_by_steps:
            self._check_weights()

    def _check_weights(self) -> None:
        name, cure = type(self.leaf).__name__, "pass weighted_by_steps=False"
        if not isinstance(self.leaf, FedAvg):
            raise invalid("strategy", name, "derive from FedAvg to weight models by steps", cure)
        if any(getattr(strategy, "accountant", None) for strategy in self.chain()):
            rule = "be without a privacy accountant, which asks for equal weights"
            raise invalid("strategy", name, rule, cure)

    # --- instructions --------------------------------------------------------------------

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Write each node's steps and its part in the sampling."""
        messages = super().on_instructions(server_round, messages, grid)
        sort_key = self.session.registry.sort_key
        in_order = sorted(messages, key=lambda message: sort_key(message.metadata.dst_node_id))
        if self.shared is not None:
            self._hand_out(self.shared, in_order)
        elif self.high_loss_fraction is not None and messages:
            self._give_roles(in_order)
        return messages

    def _give_roles(self, messages: list[Message]) -> None:
        steps, fast = self._plan_of(messages)
        share = self.share or fast_share(steps, fast) or 1.0
        for message, is_fast in zip(messages, fast, strict=True):
            config = config_of(message)
            config[keys.FAST], config[keys.FAST_SHARE] = is_fast, share
            config[keys.HIGH_LOSS_FRACTION] = self.high_loss_fraction  # type: ignore[assignment]

    def _hand_out(self, shared: SharedSamples, messages: list[Message]) -> None:
        """Give lists to the nodes that are known; a new node's first few steps are its own."""
        known = self.speeds.step_s
        messages = [m for m in messages if self.identity(m.metadata.dst_node_id) in known]
        lists = shared.hand_out(*self._plan_of(messages)) if messages else []
        for message, indices in zip(messages, lists, strict=True):
            message.content[keys.SAMPLES] = samples_record(indices)
        node_ids = [message.metadata.dst_node_id for message in messages]
        self._handed_out = dict(zip(node_ids, lists, strict=True))

    def _plan_of(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Return the steps and the class of each message's node."""
        node_ids = [message.metadata.dst_node_id for message in messages]
        fast = self.plan.fast_nodes([self.identity(n) for n in node_ids], self.speeds)
        return [self.assigned[node_id] for node_id in node_ids], fast.tolist()

    # --- replies -------------------------------------------------------------------------

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Check claims, learn the nodes' speeds and, in shared-data mode, the losses."""
        good = super().on_replies(server_round, replies)
        if self.shared is None:
            return good
        return [reply for reply in good if self._take_losses(self.shared, reply)]

    def _take_losses(self, shared: SharedSamples, reply: Message) -> bool:
        node_id = reply.metadata.src_node_id
        record = reply.content.config_records.get(keys.SAMPLES)
        if record is None or node_id not in self._handed_out:
            return True
        try:
            indices, losses = read_samples(record)
            if not np.isin(indices, self._handed_out[node_id]).all():
                raise ValueError("losses of samples that it was not given")
            shared.record(indices, losses)
        except ValueError as error:
            self.session.fail(node_id, str(error))
            return False
        return True

    def weights(self, replies: list[Message]) -> list[float]:
        """Weight models by steps if this bias is on (Eq. 4)."""
        if not self.weighted_by_steps:
            return super().weights(replies)
        return [float(self.steps_of(reply)) for reply in replies]

    # --- the run -------------------------------------------------------------------------

    def round_info(self) -> dict[str, Any]:
        """Return steps, gamma and, in shared-data mode, how far the samples are."""
        info = super().round_info()
        if self.shared is not None:
            known = self.shared.losses[~np.isnan(self.shared.losses)]
            info |= {"epoch": self.shared.epoch, "samples-known": int(known.size)}
        return info

    def state_dict(self) -> StateDict:
        """Return the measured times and, in shared-data mode, losses and pools."""
        shared = {} if self.shared is None else self.shared.state_dict()
        return super().state_dict() | {f"shared.{key}": value for key, value in shared.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        if self.shared is not None:
            self.shared.load_state_dict(entries_below("shared.", state))
