"""AdaComm: fewer local steps as the loss falls. It is Mercury's rival in local SGD."""

from math import ceil, isfinite, isnan, nan, sqrt
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import config_of
from flwr_hetero.server.client_support import STEPS
from flwr_hetero.state_dict import StateDict, check_state
from flwr_hetero_studies.rivals.node_memory import NeedsLoss, loss_of, loss_support

STATE = {"num_steps": int, "first_loss": float, "loss": float, "adapted_at_s": float}


def adaptive_steps(loss: float, first_loss: float, previous_steps: int, first_steps: int) -> int:
    r"""Choose the local steps of the next interval; half of the previous ones if not fewer.

    .. math:: \tau_l = \lceil \tau_0 \sqrt{F(x_l) / F(x_0)} \rceil

    >>> adaptive_steps(0.25, 1.0, 20, 20), adaptive_steps(1.0, 1.0, 20, 20)
    (10, 10)
    """
    by_loss = ceil(first_steps * sqrt(max(loss, 0.0) / first_loss))
    return max(1, by_loss if by_loss < previous_steps else ceil(previous_steps / 2))


class AdaComm(NeedsLoss):
    """Let nodes take many local steps at first and fewer as the training loss falls.

    Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off
    in Local-Update SGD", MLSys 2019. Steps are adapted every ``interval_s`` seconds of the fleet's
    clock; 0 adapts them after every round.
    """

    name: ClassVar[str] = "adacomm"
    decides = frozenset({"steps"})
    client_support = STEPS, loss_support("whose loss does not count")

    def __init__(
        self, strategy: Strategy | None = None, first_steps: int = 20, *, interval_s: float = 60.0
    ) -> None:
        self.first_steps = self.num_steps = check_count("first_steps", first_steps, 1)
        self.interval_s = check_number("interval_s", interval_s, "[0, inf)")
        super().__init__(strategy)
        self.first_loss = self.loss = nan
        self.adapted_at_s = 0.0

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        now_s = context.fleet.clock.virtual_s
        if now_s >= self.adapted_at_s + self.interval_s and self.first_loss > 0:
            self.num_steps = adaptive_steps(
                self.loss, self.first_loss, self.num_steps, self.first_steps
            )
            self.adapted_at_s = now_s
        for message in messages:
            config_of(message)[keys.NUM_STEPS] = self.num_steps
        return messages

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Take the median of the nodes' training losses, which no single node can steer."""
        known = [loss for loss in map(loss_of, replies) if isfinite(loss)]
        if known:
            self.loss = float(np.median(known))
            self.first_loss = self.loss if isnan(self.first_loss) else self.first_loss
        return replies

    def round_info(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def state_dict(self) -> StateDict:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: StateDict) -> None:
        check_state(state, STATE, "AdaComm")
        for name, kind in STATE.items():
            setattr(self, name, kind(state[name]))
