"""FedNova: updates that are averaged per step."""

from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

from flwr_hetero.biased_local_sgd.algorithm import Floats, Indices, correction_scales
from flwr_hetero.errors import invalid
from flwr_hetero.exchange.aggregate import normalised
from flwr_hetero.exchange.context import Messages
from flwr_hetero.strategy import LocalSteps


class FedNova(LocalSteps):
    r"""Unbalanced local steps of plain SGD, with updates that are averaged per step.

    .. math:: x_{t+1} - x_t = \sum_i p_i s_i (x_i - x_t), \qquad s_i = \sum_k p_k \tau_k / \tau_i

    It has the settings of :class:`LocalSteps` except ``step_correction``. Wang et al.,
    "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
    NeurIPS 2020.
    """

    name: ClassVar[str] = "fednova"

    def __init__(
        self, strategy: Strategy | None = None, fast_steps: int = 32, **budget: Any
    ) -> None:
        if "step_correction" in budget:
            rule = "be left out: FedNova's is 1"
            raise invalid("step_correction", budget["step_correction"], rule)
        super().__init__(strategy, fast_steps, step_correction=1.0, **budget)

    def scales(self, replies: Messages, steps: Indices, weights: list[float]) -> Floats:
        """Return the scales, by the mean steps of the round's nodes instead of all nodes."""
        mean_steps = float(normalised(weights) @ steps)
        return correction_scales(steps, mean_steps, self.step_correction)
