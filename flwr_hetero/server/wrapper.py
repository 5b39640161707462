"""What every strategy of this package is: a wrapper around another Flower strategy."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from flwr_hetero._flwr import trains_trees
from flwr_hetero.errors import invalid
from flwr_hetero.server.aggregate import aggregate, keep_dtypes
from flwr_hetero.server.reply_checks import weight_of
from flwr_hetero.server.rounds import run_rounds
from flwr_hetero.server.session import Session, expected_of
from flwr_hetero.state_dict import StateDict

if TYPE_CHECKING:
    from flwr_hetero.server.rounds import Run


class Wrapper(Strategy):
    """Wrap a strategy: same ``start``, any of the hooks below overridden.

    The wrapped strategy does the aggregation (and, unless a wrapper selects nodes, the
    sampling); a wrapper changes which nodes it sees, what the instructions say and what is
    learnt from the replies. Wrappers nest in any order. The outermost one checks the replies:
    bad ones are dropped with a reason, so that one node never stops the run.

    Parameters
    ----------
    strategy : Strategy, optional
        Any Flower strategy or another wrapper; FedAvg if left out.

    Raises
    ------
    ValueError
        If it is not a Flower strategy, is already wrapped by another wrapper, or holds a wrapper
        that this one does not go with.

    Notes
    -----
    What goes with what, checked at construction (:mod:`flwr_hetero.server.wrapper`):

    - No two wrappers of a nest decide the same thing. ``TiFL`` decides the selection;
      ``LocalSteps``, ``BiasedLocalSGD``, ``FedNova``, ``AdaComm`` and the exact mode of
      ``CDGraB`` the steps; ``CDGraB`` the orders; ``Resharding`` the samples of a node; the
      shared-data mode of ``BiasedLocalSGD`` samples and orders. So none is there twice.
    - ``OverSelect`` goes outside ``TiFL`` and ``Resharding``: both send nodes messages of their
      own, and a node that is still at work must not get any.
    - ``Recorded`` goes outside all others: it restores them before they begin.
    - ``TiFL`` and weighting by steps ask for a strategy that derives from FedAvg, TiFL for one
      that leaves the choice of nodes open; steps and orders ask for one that trains by gradients.
    - All else goes, in any order.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> wrapper = Wrapper(Wrapper(FedAdam()))
    >>> [type(strategy).__name__ for strategy in wrapper.chain()]
    ['Wrapper', 'Wrapper', 'FedAdam']
    """

    name: ClassVar[str] = "wrapper"
    """Key of this wrapper's facts in the history."""
    decides: frozenset[str] = frozenset()
    """What this wrapper decides for the whole nest, so that no other one may."""
    outside_of: ClassVar[frozenset[str]] = frozenset()
    """Decisions that must be made further in."""
    outermost: ClassVar[bool] = False
    """Whether nothing may be wrapped around this one."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        if strategy is not None and not isinstance(strategy, Strategy):
            raise invalid(
                "strategy", strategy, "be a flwr.serverapp.strategy.Strategy", "pass an instance"
            )
        self.inner: Strategy = FedAvg() if strategy is None else strategy
        self.outer: Wrapper | None = None
        if isinstance(self.inner, Wrapper):
            if self.inner.outer is not None:
                raise invalid("strategy", strategy, "be wrapped only once", "make a new instance")
            check_nest(self)
            self.inner.outer = self
            self.session: Session = self.inner.session
        else:
            check_nest(self)
            self.session = Session()

    # --- hooks: override these -------------------------------------------------------

    def before_train(self, server_round: int, grid: Grid) -> Grid:
        """Prepare a round of training; return the grid that the wrapped strategy sees."""
        return grid

    def before_evaluate(self, server_round: int, grid: Grid) -> Grid:
        """Prepare a round of evaluation; return the grid that the wrapped strategy sees."""
        return grid

    def on_instructions(
        self, server_round: int, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Change the training instructions; each has records of its own."""
        return messages

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn from the good training replies; return those that go further in."""
        return replies

    def weights(self, replies: list[Message]) -> list[float]:
        """Return by what the model of each reply is weighted; ask the :attr:`top` wrapper.

        Replies may come here before or after the hook ``on_replies`` of a wrapper further in.
        """
        if isinstance(self.inner, Wrapper):
            return self.inner.weights(replies)
        key = getattr(self.leaf, "weighted_by_key", None)
        return [1.0 if key is None else weight_of(reply, key) for reply in replies]

    def on_train_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Learn which nodes' replies counted after all wrappers, and which nodes failed."""

    def on_profile_replies(self, replies: list[Message]) -> None:
        """Learn from the good replies of a profiling round; they hold times and no models."""

    def on_evaluate_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn from the good evaluation replies; return those that go further in."""
        return replies

    def on_evaluate_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Learn which nodes' evaluation counted after all wrappers, and which nodes failed."""

    def on_start(self, run: "Run") -> None:
        """Prepare a run; called once by ``start``, before the first round."""

    def on_round_end(self, run: "Run", record: dict[str, Any]) -> None:
        """See a round's line for the history, after the round."""

    def on_finish(self, run: "Run") -> None:
        """See the run off; called by ``start``, also when a round raised."""

    def round_info(self) -> dict[str, Any]:
        """Return what this round's line in the history says of this wrapper, JSON-able."""
        return {}

    def state_dict(self) -> StateDict:
        """Return this wrapper's own state, without that of the wrapped strategy."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""

    # --- the nest ----------------------------------------------------------------------

    def chain(self) -> Iterator[Strategy]:
        """Yield this wrapper, the strategy in it, and so on to the innermost one."""
        strategy: Strategy | None = self
        while strategy is not None:
            yield strategy
            strategy = getattr(strategy, "inner", getattr(strategy, "strategy", None))

    def wrappers(self) -> list["Wrapper"]:
        """Return the wrappers of this nest, outermost first."""
        return [strategy for strategy in self.chain() if isinstance(strategy, Wrapper)]

    @property
    def leaf(self) -> Strategy:
        """The innermost strategy."""
        return list(self.chain())[-1]

    @property
    def top(self) -> "Wrapper":
        """The outermost wrapper."""
        return self if self.outer is None else self.outer.top

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity (name, key, partition or id, in that order).

        Parameters
        ----------
        node_id : int
            Flower's node id.

        Returns
        -------
        str
            For instance ``node-3``.
        """
        return self.session.registry.identity(node_id)

    # --- Flower's Strategy -------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Configure a round of training; see the hooks."""
        if self.outer is None:
            self.session.begin_round(arrays, config)
        view = self.before_train(server_round, grid)
        messages: Iterable[Message] = []
        if _has_nodes(view, grid):
            messages = self.inner.configure_train(server_round, arrays, config, view)
        own = self.on_instructions(server_round, self._own(messages), grid)
        if self.outer is None:
            self.session.ask(own, grid)
        return own

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        good = list(replies)
        if self.outer is None:
            good = self.session.take_in(good, expected_of(self.session.arrays, self.leaf))
        like, good = self.session.arrays, self.on_replies(server_round, good)
        if isinstance(self.inner, Wrapper):
            arrays, metrics = self.inner.aggregate_train(server_round, good)
        else:
            good = self._count(good)
            weights = self.top.weights(good)
            self.session.weights = dict(zip(self.session.counted, weights, strict=True))
            arrays, metrics = aggregate(self.inner, self.leaf, server_round, good, weights, like)
        if self.outer is None:
            for wrapper in self.wrappers():
                wrapper.on_train_end(server_round, self.session.counted, self.session.failed())
        if self.outer is None and arrays is not None and like is not None:
            arrays = keep_dtypes(arrays, like)  # Flower's FedAdam and its like give float64
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Configure a round of evaluation; see the hooks."""
        view = self.before_evaluate(server_round, grid)
        messages: Iterable[Message] = []
        if _has_nodes(view, grid):
            messages = self.inner.configure_evaluate(server_round, arrays, config, view)
        own = self._own(messages)
        if self.outer is None:
            self.session.ask(own, grid)
        return own

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        good = list(replies)
        if self.outer is None:
            good = self.session.take_in(good, expected_of(None, self.leaf))
        good = self.on_evaluate_replies(server_round, good)
        if not isinstance(self.inner, Wrapper):
            good = self._count(good)
        metrics = self.inner.aggregate_evaluate(server_round, good)
        if self.outer is None:
            for wrapper in self.wrappers():
                wrapper.on_evaluate_end(server_round, self.session.counted, self.session.failed())
        return metrics

    def summary(self) -> None:
        """Log the wrapped strategy's settings; wrappers with settings add their own."""
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run federated learning; arguments and result as for any Flower strategy.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or a :class:`~flwr_hetero.fleet.LocalGrid`.
        initial_arrays : ArrayRecord
            The initial global model.
        num_rounds : int
            Rounds to run.
        timeout : float
            Seconds to wait for the replies of a round, by the fleet's clock.
        train_config, evaluate_config : ConfigRecord, optional
            Sent to the nodes.
        evaluate_fn : callable, optional
            Central evaluation: (round, arrays) to MetricRecord or None.

        Returns
        -------
        Result
            Final arrays and the metrics of all rounds.
        """
        return run_rounds(
            self,
            grid,
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn,
        )

    def _count(self, replies: list[Message]) -> list[Message]:
        """Note, before the innermost strategy gets them, whose replies count."""
        good = self.session.drop_weightless(replies, getattr(self.leaf, "weighted_by_key", None))
        self.session.counted = [self.identity(reply.metadata.src_node_id) for reply in good]
        return good

    def _own(self, messages: Iterable[Message]) -> list[Message]:
        """Give each message records of its own; Flower's strategies share one among all."""
        if isinstance(self.inner, Wrapper):
            return list(messages)
        own = []
        for message in messages:
            content = RecordDict()
            for name, record in message.content.items():
                kind: Any = type(record)
                content[name] = record if kind is ArrayRecord else kind(dict(record.items()))
            message.content = content
            own.append(message)
        return own


def _has_nodes(view: Grid, grid: Grid) -> bool:
    """Tell whether there is anyone to ask; Flower's sampling waits for ever for no one."""
    return view is grid or any(True for _ in view.get_node_ids())


GRADIENT_ONLY = frozenset({"steps", "orders"})
"""Decisions about gradient steps, of which boosted trees take none."""


def check_nest(wrapper: "Wrapper") -> None:
    """Refuse a wrapper around strategies that it does not go with.

    The rules are read from three attributes of :class:`~flwr_hetero.strategy.Wrapper`, so that
    they hold for wrappers of other packages too: ``decides``, ``outside_of``, ``outermost``.
    """
    me = type(wrapper).__name__
    for inner in wrapper.wrappers()[1:]:
        name = type(inner).__name__
        if both := wrapper.decides & inner.decides:
            rule = f"leave {' and '.join(sorted(both))} to {me}"
            raise invalid("strategy", name, rule, "use one of the two")
        early = inner.outside_of & wrapper.decides
        if early or inner.outermost:
            whom = f"whoever decides on {' and '.join(sorted(early))}" if early else "all others"
            rule = f"not be {name}, whose place is outside {whom}"
            raise invalid("strategy", name, rule, f"write {name}({me}(...))")
    leaf = type(wrapper.leaf).__name__
    if trains_trees(wrapper.leaf) and wrapper.decides & GRADIENT_ONLY:
        rule = f"train by gradient steps inside {me}"
        raise invalid("strategy", leaf, rule, f"leave {me} out: boosted trees take no such steps")
