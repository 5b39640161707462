"""What every strategy of this package is: a wrapper around another Flower strategy."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from flwr_hetero._flwr import copy_of, pull_quickly
from flwr_hetero.errors import invalid
from flwr_hetero.records import own_records
from flwr_hetero.server.aggregate import keep_dtypes, settle_evaluations, weight_of
from flwr_hetero.server.arrivals import check_late_limit
from flwr_hetero.server.checks import accept, count, judge_of
from flwr_hetero.server.client_support import (
    ClientSupport,
    check_client_support,
    check_progress,
    holds,
)
from flwr_hetero.server.composition import check_composition, name_of
from flwr_hetero.server.context import Exchange, Fleet, OfFleet
from flwr_hetero.server.limits import aggregate_parts, check_limit
from flwr_hetero.server.rounds import Loop, Run, by_node, run_rounds
from flwr_hetero.settings import FixedSettings, check_assignment, check_hooks
from flwr_hetero.state_dict import StateDict

TIMEOUT_S = 600.0
"""Seconds that a node has for its reply."""


class Wrapper(Strategy, metaclass=FixedSettings):
    """Wrap a strategy: same ``start``, any of the hooks below overridden.

    The wrapped strategy samples nodes and aggregates; a wrapper changes which nodes it sees, what
    the instructions say and what it takes from the replies. Bad replies are dropped with a reason;
    an error in a hook ends the run. ValueError for what is no Flower strategy, is already wrapped,
    or holds what this one does not go with.

    Parameters
    ----------
    strategy : Strategy, optional
        Any Flower strategy or another wrapper; FedAvg if left out.

    Notes
    -----
    An update longer than :attr:`update_limit` (4) medians of the nodes' last norms, and than the
    longest median of the run, counts less: at ten times that limit, as a tenth of it. At 100 times
    it is dropped. The limit of a node with more assigned steps is longer, by their root, and
    shorter for one that claims over four medians of examples. Until three nodes are known, the
    model's norm, or 1, stands for the median. Until half of the nodes asked have answered, it is at
    most twice the lower quartile.
    Integers, trees, fleets of two and strategies with differential privacy have no limit.

    So that no node sets a mean, an accuracy lies in [0, 1] if the median does; another metric lies
    in [0, 1], or within ten medians, or ten median distances, of the median. A value that is not
    finite counts as the median. One or two replies are compared with the last ones of other nodes.

    A round goes on without a node that takes 50 times (:attr:`late_limit`) as long as most of the
    nodes asked, and as the median of the last times; it rests twice as long. That needs the times
    of four others, and real nodes have 10 s. In Flower's simulation it needs emulated devices.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> wrapper = Wrapper(Wrapper(FedAdam()))
    >>> [type(strategy).__name__ for strategy in wrapper.chain()]
    ['Wrapper', 'Wrapper', 'FedAdam']
    """

    name: ClassVar[str] = "wrapper"
    """Key of this wrapper's information in the history."""
    called: ClassVar[str] = ""
    """What users know this one by, if not by its class."""
    decides: frozenset[str] = frozenset()
    """What this wrapper decides for the whole composition, so that no other one may."""
    outside_of: ClassVar[frozenset[str]] = frozenset()
    """Decisions that must be made further in."""
    outermost: ClassVar[bool] = False
    """Whether nothing may be wrapped around this one."""
    only_rounds = ""
    """Why this wrapper works in synchronous rounds only; empty if it works in any loop."""
    client_support: tuple[ClientSupport, ...] = ()
    """What nodes must do for this wrapper to have an effect."""
    update_limit = OfFleet(check_limit)
    """Norm above which an update counts less, in medians of the nodes; None: no limit."""
    late_limit = OfFleet(check_late_limit)
    """After how many median times a round goes on without a node; None: after the time-out."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.inner: Strategy = FedAvg() if strategy is None else copy_of(strategy)
        self.outer: Wrapper | None = None
        self.leaf: Strategy = self.chain()[-1]
        self._weight_key: str | None = getattr(self.leaf, "weighted_by_key", None)
        # client support: which nodes lack it, by its key, and what is clear
        self.lacking: dict[str, dict[int, str]] = {}
        self.clear: set[str] = set()
        if isinstance(self.inner, Wrapper) and self.inner.outer is not None:
            raise invalid("strategy", strategy, "be wrapped only once", "make a new instance")
        check_composition(self)
        self.fleet = Fleet()
        if isinstance(self.inner, Wrapper):
            self.inner.outer, self.fleet = self, self.inner.fleet

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the hooks of a new class."""
        super().__init_subclass__(**kwargs)
        check_hooks(cls, Wrapper)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is not a setting."""
        check_assignment(self, name, value)
        super().__setattr__(name, value)

    # --- hooks: override these -------------------------------------------------------
    # The context of a hook is an exchange: its round, the global model, messages and replies.

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Prepare a round of training; return the grid that the wrapped strategy sees."""
        return grid

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Prepare a round of evaluation; return the grid that the wrapped strategy sees."""
        return grid

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Change the training instructions; each has records of its own."""
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Return what is wrong with a reply to training, which no wrapper then sees; or None."""
        return None

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn from the good training replies; return those that go further in."""
        return replies

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Return by what the model of each reply is weighted; ask the :attr:`top` wrapper."""
        if isinstance(self.inner, Wrapper):
            return self.inner.weights(context, replies)
        key = self._weight_key
        return [1.0 if key is None else weight_of(reply, key) for reply in replies]

    def has_support(self, context: Exchange, reply: Message, support: ClientSupport) -> bool | None:
        """Return whether a node does its part, by its reply; None if that does not tell."""
        return holds(reply, support.key)

    def on_train_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Learn which nodes' replies counted after all wrappers, and which nodes failed."""

    def on_profile_replies(self, context: Exchange, replies: list[Message]) -> None:
        """Learn from the good replies of a profiling round; they hold times and no models."""

    def on_evaluate_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn from the good evaluation replies; return those that go further in."""
        return replies

    def on_evaluate_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Learn which nodes' evaluation counted after all wrappers, and which nodes failed."""

    def on_start(self, run: Run) -> None:
        """Prepare a run; called once by ``start``, before the first round."""

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """See a round's line for the history, after the round."""

    def on_finish(self, run: Run) -> None:
        """End a run; called by ``start``, also when a round raised."""

    def round_info(self) -> dict[str, Any]:
        """Return what this round's line in the history says of this wrapper, JSON-able."""
        return {}

    def state_dict(self) -> StateDict:
        """Return this wrapper's own state, without that of the wrapped strategy."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""

    # --- the composition ---------------------------------------------------------------
    def chain(self) -> tuple[Strategy, ...]:
        """Return this wrapper, the strategy in it, and so on to the innermost one."""
        chain: list[Strategy] = []
        following: Any = self
        while isinstance(following, Strategy):
            chain.append(following)
            # Flower's own wrappers call the next one ``strategy``
            own = vars(following)
            following = own.get("inner", own.get("strategy"))
        return tuple(chain)

    def wrappers(self) -> tuple["Wrapper", ...]:
        """Return this wrapper and those in it, outermost first."""
        return tuple(s for s in self.chain() if isinstance(s, Wrapper))

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity: name, key, partition or id, in that order."""
        return self.fleet.nodes.identity(node_id)

    @property
    def top(self) -> "Wrapper":
        """The outermost wrapper."""
        return self if self.outer is None else self.outer.top

    @property
    def loop(self) -> Loop:
        """The loop that runs: rounds, unless a wrapper brings its own."""
        return self.inner.loop if isinstance(self.inner, Wrapper) else run_rounds

    # --- Flower's Strategy -------------------------------------------------------------
    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        context: Exchange | None = None,
    ) -> list[Message]:
        """Configure a round of training; see the hooks."""
        context = self.given(context)
        how = server_round, arrays, config, self.before_train(context, grid)
        messages = self._ask(self.inner.configure_train, how, context, grid)
        own = self.on_instructions(context, messages, grid)
        if self.outer is None:
            context.ask(own, grid, judge_of(self, context))
        return own

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        context, good = self.given(context), list(replies)
        # the outermost judges replies, for all, before any hook sees them
        if self.outer is None:
            good = accept(context, good, judge_of(self, context))
        if any(each.key not in self.clear for each in self.client_support):
            check_client_support(self, context, good)
        good = self.on_replies(context, good)
        if isinstance(self.inner, Wrapper):
            arrays, metrics = self.inner.aggregate_train(server_round, good, context)
        else:
            good = count(context, good, self._weight_key)
            weights = self.top.weights(context, good)
            # a server update may hold several replies of a node
            for identity, weight in zip(context.counted, weights, strict=True):
                context.weights[identity] = weight + context.weights.get(identity, 0.0)
            arrays, metrics = aggregate_parts(self.inner, self.leaf, context, good, weights)
        if self.outer is None:
            # Flower's FedAdam gives float64
            if arrays is not None and context.arrays:
                arrays = keep_dtypes(arrays, context.arrays)
            for wrapper in self.wrappers():
                wrapper.on_train_end(context, context.counted, context.failed_nodes())
            check_progress(context)
        return arrays, metrics

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        context: Exchange | None = None,
    ) -> list[Message]:
        """Configure a round of evaluation; see the hooks."""
        context = self.given(context)
        how = server_round, arrays, config, self.before_evaluate(context, grid)
        own = self._ask(self.inner.configure_evaluate, how, context, grid)
        if self.outer is None:
            context.ask(own, grid, judge_of(self, context, trains=False))
        return own

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> MetricRecord | None:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        context, good = self.given(context), list(replies)
        if self.outer is None:
            good = accept(context, good, judge_of(self, context, trains=False))
            settle_evaluations(context, good, self._weight_key)
            self.fleet.by_node = by_node(context, good)
        good = self.on_evaluate_replies(context, good)
        if isinstance(self.inner, Wrapper):
            metrics = self.inner.aggregate_evaluate(server_round, good, context)
        else:
            good = count(context, good, self._weight_key)
            metrics = self.inner.aggregate_evaluate(server_round, good)
        if self.outer is None:
            for wrapper in self.wrappers():
                wrapper.on_evaluate_end(context, context.counted, context.failed_nodes())
            check_progress(context, "evaluation")
        return metrics

    def _ask(
        self, ask: Callable[..., Any], how: tuple[Any, ...], context: Exchange, grid: Grid
    ) -> list[Message]:
        """Let the wrapped strategy write instructions for the nodes that it is shown."""
        view = how[-1]
        # Flower's sampling waits indefinitely for one
        if view is not grid and not any(True for _ in view.get_node_ids()):
            return []
        if isinstance(self.inner, Wrapper):
            return list(ask(*how, context))
        messages: list[Message] = list(ask(*how))
        # Flower's strategies share one among all messages
        for message in messages:
            message.content = own_records(message.content)
        return messages

    def given(self, context: Exchange | None) -> Exchange:
        """Return the context that our loops give; a strategy of Flower's around this has none."""
        if context is None:
            name = name_of(self)
            text = f"{name} works in its own start, not inside a strategy of Flower's"
            raise RuntimeError(f"{text}: put that one inside, {name}(DP(...)).")
        return context

    def summary(self) -> None:
        """Log the wrapped strategy's settings; wrappers with settings add their own."""
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = TIMEOUT_S,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run federated learning; arguments and result as for any Flower strategy.

        ``grid`` may be a ``LocalGrid``; ``timeout`` is in seconds of the fleet's clock, or None.
        """
        pull_quickly()
        timeout_s = inf if timeout is None else timeout
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        run = Run(self, grid, initial_arrays, num_rounds, timeout_s, *configs, evaluate_fn)
        self.fleet.is_running = True
        try:
            return self.loop(run)
        finally:
            self.fleet.is_running = False

    def __getattr__(self, name: str) -> Any:
        """Look further in for what this wrapper does not have."""
        if "inner" not in vars(self) or name.startswith("__"):
            raise AttributeError(name)
        for strategy in self.chain()[1:]:
            if hasattr(type(strategy), name) or name in vars(strategy):
                return getattr(strategy, name)
        names = " > ".join(type(strategy).__name__ for strategy in self.chain())
        text = f"{name!r} is no attribute of any strategy in {names}"
        if name == "initialize_parameters":
            # what ServerApp(server_fn=...) asks for first
            text += ": call its start(grid, arrays) in a function with @app.main()"
        raise AttributeError(text)
