"""FedSlice, the recommended strategy: three wrappers in one."""

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

    Each node takes the steps that fit into a slice of time, in which a fast node takes
    ``slice_steps``. The server updates the model whenever a quarter of the nodes in flight have
    replied. A round ends when the nodes have trained on as many examples as in a round of FedAvg,
    and then the model is evaluated once. ValueError for a setting out of range, or a strategy that
    selects nodes, sets steps or trains trees. MissingClientSupportError in the first round if no
    node takes the steps that it is asked for.

    >>> FedSlice(concurrency=5, window=8).window
    8

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates, as for :class:`FedBuff`; FedAvg if left out. It is copied: see
        :class:`Wrapper`.
    concurrency : int, optional
        Number of nodes in flight. None: all nodes that are online.
    slice_steps : int
        Smallest number of steps that a fast node takes in a slice. If a message has a fixed cost, a
        slice takes at least four times as long, but never longer than the node's job in FedAvg.
    rate_correction : float
        Power in [0, 1] by which differences in reporting rates are undone. 1: a node gains no
        influence by replying more often. 0: a node that replies twice as often counts twice.
    window : int
        Largest number of models in the average that is evaluated and returned. After t server
        updates it contains about the last sqrt(2t) models. Late in a run it grows.
    keep_optimizer : bool
        Whether the torch optimizers of nodes continue from slice to slice, so that no momentum is
        lost. Each node keeps a state as large as the model, or twice that for Adam. A simulation
        keeps the states of all nodes.
    total_rounds : int, optional
        Rounds of the whole training, if ``start`` is called for a few rounds at a time. None: the
        rounds of one ``start``.
    seed : int
        Seed of the draw of nodes.

    Notes
    -----
    A node counts by its examples and its steps. Late in a run, slices become equal in steps, so
    that the run ends at FedAvg's objective: in full if at most a quarter of the nodes train at the
    same time, and in part if up to three quarters do.

    Together, all updates in flight move the model no further than one slice of a fast node, so that
    FedAvg's learning rate fits. Updates are smaller for ``FedAvgM``, whose momentum repeats them,
    and the ``eta`` of ``FedAdam`` is divided among the nodes in flight. A weighted update longer
    than five medians is shortened to that length. A node is drawn less often the longer its slice
    takes, so that all nodes are in flight for equally long. In Flower's simulation without emulated
    devices, no more messages are in flight than its workers need. If all nodes train at the same
    time and are about equally fast, a server update takes all replies that arrive at about the same
    time. A node that has spent a tenth of the time on evaluation evaluates only the last model.
    ``start`` continues with the messages in flight if it gets the arrays that the last ``start``
    returned, and the same grid. It then trains on while its last model is evaluated. Once half of
    the nodes have been asked, nodes that train for longer than 0.3 of a round are left out of that
    evaluation, so that its figures are mostly those of fast nodes.
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
        # Conflicts are refused here: the errors of the parts would name SliceSteps or SliceRule.
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
        self.strategy = self.steps.inner
        check_number("server_momentum", server_momentum(self), "[0, 1)")
        if concurrency is not None:
            check_enough_updates(self.leaf, concurrency, "concurrency", buffer_size, QUARTER)

    @property
    def node_limit(self) -> float | None:
        """Largest share of all updates from one node, in even shares; None: no limit."""
        return self.rule.node_limit

    @node_limit.setter
    def node_limit(self, limit: float | None) -> None:
        self.rule.node_limit = limit

    def round_info(self) -> dict[str, Any]:
        """Return the round's server updates, and its examples beside those that were wanted."""
        return self.rule.round_facts


DECIDED = SliceSteps.decides | SliceRule.decides | RecentAverage.decides
"""Aspects of training that FedSlice decides."""
