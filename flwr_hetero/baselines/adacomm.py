"""AdaComm: fewer local steps as the loss falls, Mercury's rival in local SGD."""

import math
from math import ceil, isfinite, sqrt
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.records import config_of
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict


def adaptive_steps(
    loss: float, first_loss: float, previous_steps: int, first_steps: int, shrink: float = 0.5
) -> int:
    r"""Choose the local steps of the next interval.

    .. math:: \tau_l = \lceil \tau_0 \sqrt{F(x_l) / F(x_0)} \rceil, \quad
              \tau_l = \lceil \gamma \tau_{l-1} \rceil \text{ if that is not less}
    """
    if not (isfinite(first_loss) and first_loss > 0.0):
        raise invalid("first_loss", first_loss, "be positive", "measure it on the first model")
    if min(previous_steps, first_steps) < 1:
        steps = (previous_steps, first_steps)
        raise invalid("steps", steps, "be at least 1", "start with a few")
    if not 0.0 < shrink < 1.0:
        raise invalid("shrink", shrink, "lie in (0, 1)", "0.5 halves them")
    if not isfinite(loss):
        return previous_steps
    by_loss = ceil(first_steps * sqrt(max(loss, 0.0) / first_loss))
    return max(1, by_loss if by_loss < previous_steps else ceil(shrink * previous_steps))


class AdaComm(Wrapper):
    """Let nodes take many local steps at first and fewer as the training loss falls.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    first_steps : int
        Local steps in the first interval.
    interval_s : float
        Seconds of the fleet's clock between two adaptations; 0 adapts after every round.
    shrink : float
        What the steps are multiplied by when the loss alone would not lower them.
    loss_key : str
        Metric with a node's training loss.

    Raises
    ------
    ValueError
        If a setting is out of range.

    References
    ----------
    .. [1] Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best
       Error-Runtime Trade-off in Local-Update SGD", MLSys 2019.

    Examples
    --------
    >>> strategy = AdaComm(first_steps=20, interval_s=60.0)
    >>> AdaComm(first_steps=0)
    Traceback (most recent call last):
    ...
    ValueError: first_steps must be a whole number of at least 1, got 0: ...
    """

    name: ClassVar[str] = "adacomm"
    decides = frozenset({"steps"})

    def __init__(
        self,
        strategy: Strategy | None = None,
        first_steps: int = 20,
        *,
        interval_s: float = 60.0,
        shrink: float = 0.5,
        loss_key: str = "train-loss",
    ) -> None:
        first_steps = check_count("first_steps", first_steps, 1, "20 is a start")
        if not (math.isfinite(interval_s) and interval_s >= 0):
            raise invalid("interval_s", interval_s, "be at least 0", "60 seconds is the paper's")
        if not 0 < shrink < 1:
            raise invalid("shrink", shrink, "lie in (0, 1)", "0.5 is the paper's")
        super().__init__(strategy)
        self.first_steps = self.num_steps = first_steps
        self.interval_s, self.shrink, self.loss_key = float(interval_s), float(shrink), loss_key
        self.first_loss = self.loss = math.nan
        self.adapted_at_s = 0.0

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Adapt the steps if an interval has passed, and tell every node."""
        now_s = self.session.virtual_s
        due = now_s >= self.adapted_at_s + self.interval_s and math.isfinite(self.loss)
        if due and self.first_loss > 0:
            self.num_steps = adaptive_steps(
                self.loss, self.first_loss, self.num_steps, self.first_steps, self.shrink
            )
            self.adapted_at_s = now_s
        for message in messages:
            config_of(message)[keys.NUM_STEPS] = self.num_steps
        return messages

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Take the median of the nodes' training losses: no single node can steer it."""
        losses = [
            float(value)
            for reply in replies
            for record in reply.content.metric_records.values()
            if isinstance(value := record.get(self.loss_key), (int, float))
        ]
        losses = [loss for loss in losses if math.isfinite(loss)]
        if losses:
            self.loss = float(np.median(losses))
            if math.isnan(self.first_loss):
                self.first_loss = self.loss
        return replies

    def round_info(self) -> dict[str, Any]:
        """Return the local steps of this round."""
        return {"num_steps": self.num_steps}

    def state_dict(self) -> StateDict:
        """Return steps, losses and the time of the last adaptation."""
        return {
            "num_steps": self.num_steps,
            "first_loss": self.first_loss,
            "loss": self.loss,
            "adapted_at_s": self.adapted_at_s,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.num_steps = int(state["num_steps"])
        self.first_loss, self.loss = float(state["first_loss"]), float(state["loss"])
        self.adapted_at_s = float(state["adapted_at_s"])
