"""FedBuff: updates are added to the model as they come, a buffer of them at a time."""

from collections import Counter
from logging import INFO

from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import log
from flwr_hetero.asynchronous.algorithm import (
    RateCorrection,
    Shares,
    default_buffer,
    full_buffer,
    staleness_exponent,
    staleness_of,
    staleness_weights,
)
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.rule import Rule
from flwr_hetero.errors import check_choice, check_count, check_number
from flwr_hetero.server.contract import check_enough_updates, check_unscaled
from flwr_hetero.state_dict import StateDict, check_state

POWERS = {"fair": (1.0, 1.0), "sqrt": (0.5, 0.5), "examples": (1.0, 0.0), "equal": (0.0, 0.0)}
"""Powers of the wrapped strategy's weight and of the interval between replies."""


class FedBuff(Rule):
    r"""Keep nodes in flight all the time and add their updates to the model as they come.

    .. math:: w \leftarrow w + \frac{1}{K} \sum_{i \in buffer} \frac{v_i}{\bar v} \,
              \frac{w_i - w_{start}}{\sqrt{1 + s_i}}

    No round waits for its slowest node. ``num_rounds`` of ``start`` counts server updates. Put
    what sets steps inside: ``FedBuff(LocalSteps(budget="slice"))``.

    Parameters
    ----------
    strategy : Strategy, optional
        What averages the updates, as it would those of a round: any Flower strategy that derives
        from FedAvg, or a wrapper; FedAvg if left out.
    concurrency : int, optional
        Nodes in flight, drawn uniformly from the idle ones; None: all online.
    buffer_size : int, optional
        Updates K in a server update; None: half of the nodes in flight, at least 3.
    staleness : {"sqrt", "none"} or float
        Weight of an update that started s server updates ago: 1 / sqrt(1 + s), 1, or with the
        exponent of 1 / (1 + s).
    weighting : {"fair", "sqrt", "examples", "equal"}
        ``fair``: as the wrapped strategy weights (by examples), times the node's mean seconds
        between two replies. Nodes do not count more because they answer more often, nor less
        because they are always stale, and one that has sent half of a buffer waits. ``sqrt``: the
        root of that. ``examples``: as the wrapped strategy weights. ``equal``: the paper's rule.
    rate_correction : float, optional
        Power in [0, 1] with which a node's reporting rate is undone, in place of that of
        ``weighting``.
    max_weight : float, optional
        Where the rate is corrected: largest weight of an update, in means; what it cuts off is in
        the history. None: twice the weight that a tenth of the nodes reach.
    seed : int
        Of the draw of nodes.

    Raises
    ------
    ValueError
        If a setting is out of range, the wrapped strategy has a selection of its own or trains
        trees, or a wrapper works in rounds only.

    Notes
    -----
    The update is the difference to the model that the node started from. A node whose reply is
    bad or does not come is backed off for 10 s, or for the time-out, and twice as long each time;
    one that is away for as long as its last job took, and four times as long each time. A run
    ends when all nodes have failed six times in a row. Nodes evaluate when they are idle next, in
    a tenth of the time at most, and at the end. A resumed run loses no server update, and its
    draws and weights go on; what was in flight is asked again with the newest model.

    References
    ----------
    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.

    Examples
    --------
    >>> from flwr_hetero.strategy import LocalSteps
    >>> strategy = FedBuff(LocalSteps(fast_steps=20, budget="slice"), concurrency=10)
    >>> paper = FedBuff(concurrency=100, buffer_size=10, weighting="equal")
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        buffer_size: int | None = None,
        staleness: str | float = "sqrt",
        weighting: str = "fair",
        rate_correction: float | None = None,
        max_weight: float | None = 4.0,
        seed: int = 0,
    ) -> None:
        if buffer_size is not None:
            check_count("buffer_size", buffer_size, 1)
        self.exponent = staleness_exponent(staleness)
        powers = POWERS[check_choice("weighting", weighting, tuple(POWERS))]
        if rate_correction is not None:
            powers = powers[0], check_number("rate_correction", rate_correction, "[0, 1]")
        if max_weight is not None:
            check_number("max_weight", max_weight, "[1, inf)")
        super().__init__(strategy, concurrency=concurrency, seed=seed)
        check_enough_updates(self.leaf, buffer_size, "buffer_size")
        self.rates = RateCorrection(powers, max_weight)
        if self.rates.undoes_rate and rate_correction is None:
            check_unscaled(self, "weighting", weighting)
        elif self.rates.undoes_rate:
            check_unscaled(self, "rate_correction", rate_correction)
        self.buffer_size, self.weighting, self.size = buffer_size, weighting, 1

    def next_nodes(self, idle: list[int], in_flight: int, waiting: list[Update]) -> list[int]:
        """Draw nodes; where rates are undone, none that would fill the buffer."""
        if self.rates.undoes_rate and in_flight:
            often = Counter(update.pending.node_id for update in waiting)
            idle = [node for node in idle if often[node] < max(2, (self.size + 1) // 2)]
        return super().next_nodes(idle, in_flight, waiting)

    def due(self, waiting: list[Update], in_flight: int) -> list[Update]:
        """Return the first K updates when there are as many."""
        training = min(self.concurrency or in_flight, in_flight)  # others evaluate
        self.size = self.buffer_size or self.default_size(training)
        return full_buffer(waiting, self.size)

    def default_size(self, in_flight: int) -> int:
        """Return K where it is not given."""
        return default_buffer(in_flight)

    def weigh(self, updates: list[Update], weights: list[float]) -> Shares:
        """Weigh stale updates down, and by default let no node count by its speed."""
        stale = staleness_of([update.pending.version for update in updates], self.version)
        discounts = staleness_weights(stale, self.exponent)
        if self.rates.powers == (0.0, 0.0):  # the paper's rule
            return Shares(discounts)
        nodes = [self.identity(update.pending.node_id) for update in updates]
        times_s = [(update.pending.sent_s, update.arrived_s) for update in updates]
        return self.rates.weigh(nodes, weights, times_s, discounts)

    def state_dict(self) -> StateDict:
        """Return the generator's state, and what is known of the nodes' replies."""
        return super().state_dict() | {"rates": self.rates.to_str()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"rates": str}, "FedBuff")
        super().load_state_dict(state)
        self.rates.learn_from(str(state["rates"]))

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        nodes = "all nodes" if self.concurrency is None else f"{self.concurrency} nodes"
        size = self.buffer_size or "half of them"
        text = "\t├──> FedBuff: %s in flight, %s in a server update, weighted %s"
        log(INFO, text, nodes, size, self.weighting)
        super().summary()
