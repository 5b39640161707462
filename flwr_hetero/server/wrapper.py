"""What every strategy of this package is: a wrapper around another Flower strategy."""

import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from math import inf
from typing import Any, ClassVar
from weakref import proxy

from flwr.app import DEFAULT_TTL, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from flwr_hetero._flwr import copy_of, format_of_trees, is_private, pull_quickly
from flwr_hetero.errors import check_number, invalid, shown
from flwr_hetero.exchange.aggregate import aggregate, keep_dtypes, settle_evaluations, weight_of
from flwr_hetero.exchange.checks import (
    Expected,
    Verdicts,
    accept,
    count,
)
from flwr_hetero.exchange.context import Exchange, Fleet, check_progress
from flwr_hetero.exchange.nodes import is_simulated
from flwr_hetero.records import own_records
from flwr_hetero.server.client_support import ClientSupport, check_client_support, holds
from flwr_hetero.server.composition import check_composition, name_of
from flwr_hetero.server.loop import Rounds, Run, SynchronousRounds, by_node, run_all
from flwr_hetero.state_dict import StateDict

TIMEOUT_S = 600.0
"""Seconds that a node has for its reply."""
SIMILAR = 0.85
"""A new method is taken for a misspelt hook if the names are this similar; 1 means equal."""
BY_KEYWORD = {"start"}
"""Methods that users call with keywords, so that the order of their arguments is free."""


# --- settings, which are fixed, and hooks, which may not be misspelt -------------------------
class Construction(ABCMeta):
    """Metaclass that knows when a constructor has ended."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a strategy, whose settings are fixed from now on."""
        strategy = super().__call__(*args, **kwargs)
        vars(strategy)["_is_built"] = True
        return strategy


def _public_methods(kind: type) -> set[str]:
    methods = {name for name, value in vars(kind).items() if inspect.isfunction(value)}
    return {name for name in methods if not name.startswith("_")}


class FixedSettings(metaclass=Construction):
    """Base class of strategies whose settings cannot be changed once they are constructed.

    A setting is an argument of the constructor, which stores it under its name. All other
    attributes may change, but a new attribute can only be added by a hook, during a run.
    """

    setting_names: ClassVar[frozenset[str]] = frozenset()
    """Names of all constructor arguments, those of the base classes included."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Learn the names of settings; TypeError for a hook that is not, or cannot be, called."""
        super().__init_subclass__(**kwargs)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, FixedSettings)]
        cls.setting_names = frozenset().union(*(base.setting_names for base in bases))
        if constructor := vars(cls).get("__init__"):
            parameters = [*inspect.signature(constructor).parameters.values()][1:]
            named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            cls.setting_names |= {*named}
        inherited = {name for base in bases for name in _public_methods(base)}
        hooks = [name for name in inherited if "_" in name]
        for name in _public_methods(cls) - inherited:
            for close in get_close_matches(name, hooks, n=1, cutoff=SIMILAR):
                raise TypeError(
                    f"{cls.__name__}.{name} is not a hook and would never be called: did you mean "
                    f"{close}? If not, give it another name, or a leading underscore."
                )
        for name in _public_methods(cls) & inherited - BY_KEYWORD:
            overridden = next(vars(base)[name] for base in bases if name in vars(base))
            _check_signature(cls, vars(cls)[name], overridden)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; AttributeError for a setting, or for an unknown name."""
        own = vars(self)
        if "_is_built" in own and (name not in own or name in self.setting_names):
            _check_assignment(self, name, value)
        super().__setattr__(name, value)


def _check_signature(kind: type, method: Any, overridden: Any) -> None:
    """Refuse a method that cannot be called with the arguments of the one that it overrides."""
    parameters = inspect.signature(overridden).parameters.values()
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*by_position, **by_name)
    except TypeError as error:
        raise TypeError(
            f"{kind.__name__}.{method.__name__} is called with "
            f"({', '.join([*by_position[1:], *by_name])}): {error}."
        ) from None


def _check_assignment(strategy: Any, name: str, value: Any) -> None:
    kind = type(strategy)
    label = name_of(strategy)
    if name in kind.setting_names:
        raise AttributeError(
            f"{label}.{name} is a setting, and settings are fixed once a strategy is made. "
            f"Make a new strategy instead: {label}({name}={shown(value)})."
        )
    if hasattr(kind, name) or strategy.fleet.is_running:
        return
    owners = [each for each in strategy.chain()[1:] if name in {*dir(type(each)), *vars(each)}]
    close = get_close_matches(name, [*kind.setting_names, *vars(strategy)], n=1)
    if owners:
        hint = f"It belongs to {name_of(owners[0])}: set it there, before that is wrapped."
    elif close:
        hint = f"Did you mean {close[0]}?"
    else:
        hint = "An attribute of your own must be set in __init__ first."
    raise AttributeError(f"{label} has no attribute {name!r} that could be set. {hint}")


class FleetLimit:
    """A limit, or None, that the fleet stores, so that all wrappers around a strategy share it."""

    def __init__(self, bounds: str, hint: str) -> None:
        self.bounds = bounds
        self.hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.fleet, self.name)

    def __set__(self, wrapper: Any, limit: float | None) -> None:
        if limit is not None:
            limit = check_number(self.name, limit, self.bounds, self.hint)
        setattr(wrapper.fleet, self.name, limit)


# --- the wrapper -----------------------------------------------------------------------------
class Wrapper(FixedSettings, Strategy):
    """Wrap a strategy: same ``start``, with hooks that a subclass overrides.

    The wrapped strategy samples nodes and aggregates. A wrapper decides which nodes it sees, what
    the instructions say and which replies it gets. A bad reply is dropped with a reason, and an
    error in a hook ends the run. ValueError for an object that is no Flower strategy, is already
    wrapped, or contains a wrapper that cannot be combined with this one.

    >>> wrapper = Wrapper()

    Parameters
    ----------
    strategy : Strategy, optional
        Any Flower strategy, or another wrapper; FedAvg if left out. A Flower strategy is copied and
        never changes. What a run leaves in the copy is read from the wrapper: ``wrapper.m_t``.

    Notes
    -----
    To set an argument of the constructor later raises AttributeError; only the two limits below may
    be set until ``start``.

    An update is shortened if its norm exceeds :attr:`update_limit` (4) times the median norm of the
    nodes' last updates, and dropped at 100 times the limit (``flwr_hetero/exchange/checks.py``).
    Until three nodes are known, the norm of the model, or 1, replaces the median. Integers, trees,
    fleets of two nodes and strategies with differential privacy have no limit.

    No single node can set a mean. An accuracy is limited to [0, 1] if the median lies there, and
    another metric to [0, 1], to ten medians or to ten median distances from the median. A value
    that is not finite counts as the median. One or two replies are compared with earlier ones.

    A round goes on without a node that takes :attr:`late_limit` (50) times as long as most nodes
    asked, and as the median of the last times: at least 10 s on real nodes. It rests twice as long.
    This needs the times of four other nodes, and emulated devices in Flower's simulation.
    """

    name: ClassVar[str] = "wrapper"
    """Key of this wrapper's information in the history."""
    called: ClassVar[str] = ""
    """Name that is shown to users; the name of the class if empty."""
    decides: frozenset[str] = frozenset()
    """Aspects of training that this wrapper decides: only one wrapper may decide each."""
    outside_of: ClassVar[frozenset[str]] = frozenset()
    """Aspects that a wrapper inside this one must decide, if any does."""
    outermost: ClassVar[bool] = False
    """Whether no other wrapper may be put around this one."""
    only_rounds = ""
    """Why this wrapper works in synchronous rounds only; empty if it works in any rounds."""
    client_support: tuple[ClientSupport, ...] = ()
    """What nodes must do for this wrapper to have an effect."""
    update_limit = FleetLimit("[1, inf)", "or None, for no limit")
    """Norm, in medians of the nodes, above which an update is shortened; None: no limit."""
    late_limit = FleetLimit("(1, inf)", "or None: only the time-out counts")
    """Number of median times after which a round goes on without a node; None: the time-out."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.inner: Strategy = FedAvg() if strategy is None else copy_of(strategy)
        self.strategy = self.inner
        self.outer: Wrapper | None = None
        inside: list[Strategy] = []
        following: Any = self.inner
        while isinstance(following, Strategy):
            inside.append(following)
            # Flower's own wrappers call the wrapped strategy ``strategy``.
            attributes = vars(following)
            following = attributes.get("inner", attributes.get("strategy"))
        self._inside = tuple(inside)
        self._wrappers_inside = tuple(each for each in inside if isinstance(each, Wrapper))
        self.leaf: Strategy = inside[-1]
        self._weight_key: str | None = getattr(self.leaf, "weighted_by_key", None)
        self._tree_format = format_of_trees(self.leaf)
        # Noise for privacy is right only for updates that nobody shortens.
        self._limits_updates = not any(map(is_private, inside))
        # By key of client support: the nodes known to lack it, and the keys that are decided.
        self.lacking: dict[str, dict[int, str]] = {}
        self.clear: set[str] = set()
        if isinstance(self.inner, Wrapper) and self.inner.outer is not None:
            raise invalid("strategy", strategy, "be wrapped only once", "make a new instance")
        check_composition(self)
        self.fleet = Fleet()
        if isinstance(self.inner, Wrapper):
            self.inner.outer = self
            self.fleet = self.inner.fleet

    # --- hooks: override these -------------------------------------------------------
    # The context of a hook is an exchange: its round, the global model, messages and replies.
    #
    # A run calls `on_start` of all wrappers, the outermost first. A round then calls
    # 1. `before_train`, the outermost first, until the wrapped strategy writes instructions;
    # 2. `on_instructions`, the innermost first;
    # 3. `why_bad` for each reply when it is here, the outermost first;
    # 4. `on_replies`, the outermost first, until the wrapped strategy aggregates the replies by the
    #    `weights` of the outermost;
    # 5. `on_train_end`, the outermost first;
    # 6. `before_evaluate`, `on_evaluate_replies` and `on_evaluate_end` in the same way;
    # 7. `round_info`, the outermost first, and `on_round_end`, the innermost first.
    # At its end, also after an error, a run calls `on_finish`, the innermost first.
    # Without rounds, steps 3 to 5 belong to a server update, and 1 and 2 to what is sent at once.

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Prepare a round of training; return the grid that the wrapped strategy sees."""
        return grid

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Prepare a round of evaluation; return the grid that the wrapped strategy sees."""
        return grid

    def on_instructions(
        self, context: Exchange, messages: list[Message], grid: Grid
    ) -> list[Message]:
        """Change the training instructions, which share no records with each other."""
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Return why a reply to training is dropped before any wrapper sees it, or None."""
        return None

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Learn from the good training replies; return those that go further in."""
        return replies

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Return the weight of each reply's model; only the weights of :attr:`top` take effect."""
        if isinstance(self.inner, Wrapper):
            return self.inner.weights(context, replies)
        key = self._weight_key
        return [1.0 if key is None else weight_of(reply, key) for reply in replies]

    def has_support(self, context: Exchange, reply: Message, support: ClientSupport) -> bool | None:
        """Return whether a reply shows that its node gives the support; None if unknown."""
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

    def evaluated_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that is evaluated and returned; ``arrays``: the newest one."""
        return self.inner.evaluated_model(arrays) if isinstance(self.inner, Wrapper) else arrays

    def on_start(self, run: Run) -> None:
        """Prepare a run; called once by ``start``, before the first round."""

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """See a round's line for the history, after the round."""

    def on_finish(self, run: Run) -> None:
        """End a run; called by ``start``, also when a round raised."""

    def round_info(self) -> dict[str, Any]:
        """Return what the history says of this wrapper and round, as JSON values."""
        return {}

    def state_dict(self) -> StateDict:
        """Return this wrapper's own state, without that of the wrapped strategy."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""

    # --- the composition ---------------------------------------------------------------
    def chain(self) -> tuple[Strategy, ...]:
        """Return this wrapper, the strategy in it, and so on to the innermost one."""
        return (self, *self._inside)

    def wrappers(self) -> tuple["Wrapper", ...]:
        """Return this wrapper and those in it, outermost first."""
        return (self, *self._wrappers_inside)

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity: name, key, partition or id, in that order."""
        return self.fleet.nodes.identity(node_id)

    @property
    def top(self) -> "Wrapper":
        """The outermost wrapper."""
        return self if self.outer is None else self.outer.top

    def make_rounds(self, run: Run) -> Rounds:
        """Return what a round is: synchronous training, unless a wrapper inside decides."""
        if isinstance(self.inner, Wrapper):
            return self.inner.make_rounds(run)
        return SynchronousRounds()

    def _judge(self, context: Exchange, *, trains: bool = True) -> Verdicts:
        """Return what judges replies to training, or to evaluation, for the whole composition."""
        # The exchange refers to its judge: in a cycle, its models would wait for the garbage
        # collector.
        context = proxy(context)
        if not trains:
            return Verdicts(context, Expected(None, self._weight_key))
        wanted = Expected(
            None if self._tree_format else context.arrays,
            self._weight_key,
            trees=self._tree_format,
            update_limit=self.update_limit if self._limits_updates else None,
        )
        return Verdicts(context, wanted, self.wrappers())

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
        view = self.before_train(context, grid)
        arguments = (server_round, arrays, config, view)
        messages = self._ask(self.inner.configure_train, arguments, context, grid)
        messages = self.on_instructions(context, messages, grid)
        if self.outer is None:
            context.ask(messages, grid, self._judge(context))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        context = self.given(context)
        good = list(replies)
        # The outermost wrapper judges the replies for all, before any hook sees them.
        if self.outer is None:
            good = accept(context, good, self._judge(context))
        if any(support.key not in self.clear for support in self.client_support):
            check_client_support(self, context, good)
        good = self.on_replies(context, good)
        if isinstance(self.inner, Wrapper):
            arrays, metrics = self.inner.aggregate_train(server_round, good, context)
        else:
            good = count(context, good, self._weight_key)
            weights = self.top.weights(context, good)
            # A server update may contain several replies of a node.
            for identity, weight in zip(context.counted, weights, strict=True):
                context.weights[identity] = weight + context.weights.get(identity, 0.0)
            arrays, metrics = aggregate(self.inner, self.leaf, context, good, weights)
        if self.outer is None:
            # Flower's FedAdam returns float64.
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
        view = self.before_evaluate(context, grid)
        arguments = (server_round, arrays, config, view)
        messages = self._ask(self.inner.configure_evaluate, arguments, context, grid)
        if self.outer is None:
            cannot = self.fleet.cannot_evaluate
            messages = [m for m in messages if m.metadata.dst_node_id not in cannot]
            context.ask(messages, grid, self._judge(context, trains=False))
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message], context: Exchange | None = None
    ) -> MetricRecord | None:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        context = self.given(context)
        good = accept(context, list(replies), self._judge(context, trains=False))
        settle_evaluations(context, good, self._weight_key)
        self.fleet.by_node = by_node(context, good)
        wrappers = self.wrappers()
        for wrapper in wrappers:
            good = wrapper.on_evaluate_replies(context, good)
        good = count(context, good, self._weight_key)
        metrics = wrappers[-1].inner.aggregate_evaluate(server_round, good)
        for wrapper in wrappers:
            wrapper.on_evaluate_end(context, context.counted, context.failed_nodes())
        check_progress(context, "evaluation")
        return metrics

    def _ask(
        self, ask: Callable[..., Any], arguments: tuple[Any, ...], context: Exchange, grid: Grid
    ) -> list[Message]:
        """Let the wrapped strategy write instructions for the nodes that it is shown."""
        view = arguments[-1]
        # Flower's sampling would wait indefinitely for a node.
        if view is not grid and not any(True for _ in view.get_node_ids()):
            return []
        if isinstance(self.inner, Wrapper):
            return list(ask(*arguments, context))
        messages: list[Message] = list(ask(*arguments))
        # Flower's strategies put the same records into all messages.
        for message in messages:
            message.content = own_records(message.content)
        return messages

    def given(self, context: Exchange | None) -> Exchange:
        """Return the context, which loops of this package pass and Flower's strategies do not."""
        if context is None:
            name = name_of(self)
            text = f"{name} works in its own start, not inside a strategy of Flower's"
            raise RuntimeError(f"{text}: put that one inside, {name}(DP(...)).")
        return context

    def summary(self) -> None:
        """Log the settings of the wrapped strategy."""
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
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run federated learning; arguments and result as for any strategy of Flower 1.43.

        ``grid`` may be a ``LocalGrid``; ``timeout`` is in seconds of the fleet's clock. None: no
        limit, on real nodes 12 hours.
        ``should_stop`` is called after each round, or server update, with its number and the result
        so far, which it must not change. If it returns True, the run ends.
        """
        pull_quickly()
        # On real nodes a message lives for 12 hours. Flower 1.43 does not report when it is lost.
        longest_s = inf if is_simulated(grid) else float(DEFAULT_TTL)
        timeout_s = longest_s if timeout is None else timeout
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        functions = evaluate_fn, should_stop
        run = Run(self, grid, initial_arrays, num_rounds, timeout_s, *configs, *functions)
        return run_all(run, self.make_rounds(run))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a strategy inside, if this wrapper has none of that name."""
        if "inner" not in vars(self) or name.startswith("__"):
            raise AttributeError(name)
        for strategy in self.chain()[1:]:
            if hasattr(type(strategy), name) or name in vars(strategy):
                return getattr(strategy, name)
        names = " > ".join(type(strategy).__name__ for strategy in self.chain())
        text = f"{name!r} is no attribute of any strategy in {names}"
        if name == "initialize_parameters":
            # ServerApp(server_fn=...) asks for this method first.
            text += ": call its start(grid, arrays) in a function with @app.main()"
        raise AttributeError(text)
