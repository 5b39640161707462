"""What rivals based on asynchronous SGD have in common: local steps, and a server's rate."""

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.records import config_of
from flwr_hetero.server.client_support import STEPS
from flwr_hetero.server.composition import check_enough_updates


class LocalASGD(Rule):
    """Ask each node for the same local steps, whose update stands for a gradient."""

    decides = Rule.decides | {"steps"}
    client_support = (STEPS,)
    # The papers have no limit.
    node_limit = None

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        num_steps: int | None = None,
        server_rate: float = 1.0,
        concurrency: int | None = None,
        seed: int = 0,
    ) -> None:
        self.num_steps = None if num_steps is None else check_count("num_steps", num_steps, 1)
        self.server_rate = check_number("server_rate", server_rate, "(0, inf)")
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, 1, "the number of updates at a time")

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        if self.num_steps is not None:
            for message in messages:
                config_of(message)[keys.NUM_STEPS] = self.num_steps
        return messages
