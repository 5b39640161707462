"""FedNova: average updates per step, so that unequal steps do not shift the objective."""

from collections.abc import Sequence
from typing import ClassVar, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import Strategy
from numpy.typing import ArrayLike, NDArray

from flwr_hetero.biased_local_sgd.step_budget import Budget, LocalSteps
from flwr_hetero.errors import invalid
from flwr_hetero.server.aggregate import normalised
from flwr_hetero.server.reply_checks import view_array


def accumulated_steps(num_steps: ArrayLike, momentum: float = 0.0) -> NDArray[np.float64]:
    r"""Sum of the factors with which a node's gradients enter its update.

    .. math:: \|a_i\|_1 = \frac{1}{1 - \rho} \left(\tau_i - \rho \frac{1 - \rho^{\tau_i}}
        {1 - \rho}\right)
    """
    steps = np.asarray(num_steps, dtype=np.float64)
    if not np.all(steps >= 1):
        raise invalid("num_steps", steps.tolist(), "be at least 1", "leave out idle nodes")
    if not 0 <= momentum < 1:
        raise invalid("momentum", momentum, "lie in [0, 1)", "use the nodes' SGD momentum")
    carried = momentum * (1 - momentum**steps) / (1 - momentum)
    return np.asarray((steps - carried) / (1 - momentum))


def update_scales(
    num_steps: ArrayLike, weights: ArrayLike, momentum: float = 0.0
) -> NDArray[np.float64]:
    r"""Factors that make an ordinary weighted mean FedNova's normalised one.

    .. math:: x_{t+1} - x_t = \tau_{eff} \sum_i p_i \frac{x_i - x_t}{\|a_i\|_1}
        = \sum_i p_i s_i (x_i - x_t), \qquad
        s_i = \frac{\sum_k p_k \|a_k\|_1}{\|a_i\|_1}

    Notes
    -----
    Written as a scale per reply and not as a mean of its own, so that any strategy can follow:
    a server optimiser, a median, clipping.
    """
    steps = accumulated_steps(num_steps, momentum)
    return np.asarray(normalised(weights) @ steps / steps)


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
        As for :class:`~flwr_hetero.biased_local_sgd.step_budget.LocalSteps`.

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
        weights = self.top.weights(good)
        if not any(weights):
            return good
        scales = update_scales(steps, weights, self.momentum)
        pairs = zip(good, scales.tolist(), strict=True)
        return [self._scaled(reply, scale, start) for reply, scale in pairs]

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
