"""FedNova's normalised averaging: the federated peer of weighting by steps."""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy

from flwr_hetero.core.errors import invalid
from flwr_hetero.core.fednova import accumulated_steps, update_scales
from flwr_hetero.strategy.local_steps import LocalSteps
from flwr_hetero.strategy.reply_checks import view_array
from flwr_hetero.strategy.step_plan import Budget

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""How names end of arrays that are no parameters, in torch's batch normalisation."""


class FedNova(LocalSteps):
    r"""Unbalanced local steps whose updates are averaged per step.

    .. math:: x_{t+1} - x_t = \tau_{eff} \sum_i p_i \frac{x_t^i - x_t}{\|a_i\|_1}

    Each reply's update is scaled before the wrapped strategy sees it, so any strategy can do
    the averaging: FedAvg gives the paper's FedNova.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    fast_steps : int
        Steps tau_F of a fast node per round.
    momentum : float
        Momentum of the nodes' SGD in [0, 1), reset each round.
    buffers : sequence of str
        Arrays whose names end so, and integers, are averaged as they are.
    smoothing, **budget
        As for :class:`~flwr_hetero.strategy.local_steps.LocalSteps`.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Notes
    -----
    Scales follow the steps that the server *gave*, not those that a node claims: here a claim
    of fewer steps would raise a node's influence.

    References
    ----------
    .. [1] Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous
       Federated Optimization", NeurIPS 2020.

    Examples
    --------
    >>> strategy = FedNova(fast_steps=32, momentum=0.9)
    >>> FedNova(momentum=1.0)
    Traceback (most recent call last):
    ...
    ValueError: momentum must lie in [0, 1), got 1.0: ...
    """

    name: ClassVar[str] = "fednova"

    def __init__(
        self,
        strategy: Strategy | None = None,
        fast_steps: int = 32,
        *,
        momentum: float = 0.0,
        buffers: Sequence[str] = BUFFERS,
        smoothing: float = 0.5,
        **budget: Unpack[Budget],
    ) -> None:
        accumulated_steps([1], momentum)
        if isinstance(buffers, str):
            raise invalid("buffers", buffers, "be a sequence of names", "put it in a list")
        super().__init__(strategy, fast_steps, smoothing=smoothing, **budget)
        self.momentum, self.buffers = momentum, tuple(buffers)

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Scale each update by the mean of all steps over its own steps."""
        good, start = super().on_replies(server_round, replies), self.session.arrays
        if not good or start is None:
            return good
        steps = [self.assigned[reply.metadata.src_node_id] for reply in good]
        weights = [self._weight(reply) for reply in good]
        if not any(weights):
            return good
        scales = update_scales(steps, weights, self.momentum)
        pairs = zip(good, scales.tolist(), strict=True)
        return [self._scaled(reply, scale, start) for reply, scale in pairs]

    def _weight(self, reply: Message) -> float:
        """Return the weight that the innermost strategy will give to a reply."""
        key = getattr(self.leaf, "weighted_by_key", None)
        (metrics,) = reply.content.metric_records.values()
        return 1.0 if key is None else float(metrics[key])  # type: ignore[arg-type]

    def _scaled(self, reply: Message, scale: float, start: ArrayRecord) -> Message:
        ((name, arrays),) = reply.content.array_records.items()
        content = RecordDict(dict(reply.content))
        content[name] = ArrayRecord(
            {key: self._step_from(start[key], array, scale, key) for key, array in arrays.items()}
        )
        return Message(content, metadata=reply.metadata)  # type: ignore[call-overload,no-any-return]

    def _step_from(self, start: Array, end: Array, scale: float, name: str) -> Array:
        before, after = view_array(start), view_array(end)
        if after.dtype.kind != "f" or before.dtype.kind != "f" or name.endswith(self.buffers):
            return end
        return Array(np.asarray(before + scale * (after - before), after.dtype))
