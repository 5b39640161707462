"""FedSlice, the composition that is recommended."""

from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.server.composition import check_enough_updates, name_of
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.slices.algorithm import buffer_size
from flwr_hetero.slices.average import RecentAverage, server_momentum
from flwr_hetero.slices.rule import QUARTER, SliceRule
from flwr_hetero.slices.steps import SliceSteps


class FedSlice(Wrapper):
    r"""Train in slices of time instead of rounds, and return the average of recent models.

    Each node takes the steps that fit a slice, in which a fast node takes ``slice_steps``. The
    server updates the model whenever a quarter of the nodes in flight have replied. A round ends
    when they have trained on as many examples as in a round of FedAvg, and has one evaluation.
    ValueError for a setting out of range, or a strategy that selects nodes, sets steps or trains
    trees; MissingClientSupportError in the first round, if no node takes the steps it is asked for.

    >>> strategy = FedSlice(concurrency=5)

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates, as for :class:`FedBuff`; FedAvg if left out.
    concurrency : int, optional
        Nodes in flight. None: all that are online.
    slice_steps : int
        Least steps that a fast node takes in a slice. Where a message has a fixed cost, a slice
        takes at least four times as long, but never longer than the node's job in FedAvg.
    rate_correction : float
        Power in [0, 1] with which a node's reporting rate is undone. 1: to reply more often buys no
        influence. 0: a node that replies twice as often counts twice as much.
    window : int
        Largest number of models in the average that is evaluated and returned. After t server
        updates it is of about the last sqrt(2t). Late in a run it grows.
    keep_optimizer : bool
        Nodes' torch optimizers continue from slice to slice: no momentum is lost. Each node keeps a
        state as large as the model, or twice that for Adam; a simulation keeps those of all.
    total_rounds : int, optional
        Rounds of the whole training, where ``start`` is called for a few of them at a time. None:
        those of one ``start``.
    seed : int
        Of the draw of nodes.

    Notes
    -----
    A node counts by its examples and its steps. Late in a run slices become equal in steps, so that
    it ends at FedAvg's objective: in full where at most a quarter of the nodes train at the same
    time, in part up to three quarters.

    All updates in flight move the model no further than a slice of a fast node would, so that
    FedAvg's learning rate fits. The momentum of ``FedAvgM`` repeats updates, which are smaller for
    it. A weighted update longer than five medians of all is cut to that. The ``eta`` of ``FedAdam``
    is divided among the nodes in flight. Nodes of which a slice takes longer are drawn as much less
    often, so that all have the same share of the places in flight. In Flower's simulation, unless
    devices are emulated, no more messages are in flight than its workers need. Where all nodes
    train at the same time and are about equally fast, a server update takes all replies that come
    at about the same time. A node that has evaluated for a tenth of the time is left out but for
    the last time. ``start`` with the arrays that the last one returned, on the same grid, goes on
    with what is in flight.
    """

    name: ClassVar[str] = "fedslice"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        concurrency: int | None = None,
        slice_steps: int = 10,
        rate_correction: float = 1.0,
        window: int = 32,
        keep_optimizer: bool = True,
        total_rounds: int | None = None,
        seed: int = 0,
    ) -> None:
        self.slice_steps = check_count("slice_steps", slice_steps, 1)
        if total_rounds is not None:
            check_count("total_rounds", total_rounds, 1)
        self.total_rounds = total_rounds
        self.keep_optimizer = check_choice("keep_optimizer", keep_optimizer, (True, False))
        # The errors of the parts would name classes that users do not know.
        for inner in strategy.wrappers() if isinstance(strategy, Wrapper) else ():
            if both := inner.decides & DECIDED:
                rule = f"leave {' and '.join(sorted(both))} to FedSlice"
                raise invalid("strategy", name_of(inner), rule, "use one of the two")
        self.steps = SliceSteps(strategy, slice_steps, keep_optimizer)
        self.rule = SliceRule(self.steps, concurrency, rate_correction, total_rounds, seed)
        average = RecentAverage(self.rule, window=window)
        self.concurrency = concurrency
        self.rate_correction = rate_correction
        self.window = window
        self.seed = seed
        self.parts = (average, self.rule, self.steps)
        self.decides = DECIDED
        super().__init__(average)
        check_number("server_momentum", server_momentum(self), "[0, 1)")
        if concurrency is not None:
            check_enough_updates(self.leaf, concurrency, "concurrency", buffer_size, QUARTER)

    @property
    def node_limit(self) -> float | None:
        """Largest share of a node in all updates, in even shares; None: any."""
        return self.rule.node_limit

    @node_limit.setter
    def node_limit(self, limit: float | None) -> None:
        self.rule.node_limit = limit

    def round_info(self) -> dict[str, Any]:
        """Return the round's server updates, and examples trained on of those wanted."""
        return self.rule.round_facts


DECIDED = SliceSteps.decides | SliceRule.decides | RecentAverage.decides
"""What FedSlice decides."""
