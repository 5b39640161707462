"""FedAsync: every model is mixed into the global model as soon as it arrives."""

from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from flwr_hetero.asynchronous.algorithm import Shares, staleness_exponent, staleness_weights
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.errors import check_number
from flwr_hetero.exchange.aggregate import with_update
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.server.composition import check_enough_updates


class FedAsync(Rule):
    r"""Mix each node's model into the global model when it arrives; a stale one counts less.

    .. math:: w \leftarrow (1 - \alpha_s) w + \alpha_s w_i, \qquad \alpha_s = \alpha (1 + s)^{-a}

    Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020. Unlike
    ``FedBuff(buffer_size=1)``, it pulls the newest model back to where the node started. All floats
    are mixed, including running statistics. Wrap ``FedProx`` for the paper's proximal term.
    """

    # The paper has no limit.
    node_limit = None

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        mixing: float = 0.6,
        staleness: str | float = "sqrt",
        seed: int = 0,
    ) -> None:
        self.mixing = check_number("mixing", mixing, "(0, 1]")
        self.staleness = staleness
        self.exponent = staleness_exponent(staleness)
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, 1, "the number of updates at a time")

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        return waiting[:1]

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        started = [update.pending.version for update in updates]
        return Shares(staleness_weights(started, self.version, self.exponent))

    def moved(self, context: Exchange, update: Update, reply: Message, scale: float) -> Message:
        return with_update(reply, context.arrays, context.arrays, self.mixing * scale, ())
