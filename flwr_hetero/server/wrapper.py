"""What every strategy of this package is: a wrapper around another Flower strategy."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from flwr_hetero._flwr import attributes_of, check_strategy, format_of_trees, older_call_hint
from flwr_hetero.errors import invalid
from flwr_hetero.server.aggregate import aggregate, by_node, keep_dtypes
from flwr_hetero.server.contract import Contract, HelpCheck, check_composition, check_start, holds
from flwr_hetero.server.reply_checks import Expected, drop_partial_metrics, weight_of
from flwr_hetero.server.rounds import Loop, Run, run_rounds
from flwr_hetero.server.session import Session
from flwr_hetero.state_dict import StateDict

TIMEOUT_S = 600.0
"""Seconds that a node has for its reply."""


class Wrapper(Strategy):
    """Wrap a strategy: same ``start``, any of the hooks below overridden.

    The wrapped strategy aggregates (and, unless a wrapper selects nodes, samples them); a
    wrapper changes which nodes it sees, what the instructions say and what is learnt from the
    replies. The outermost wrapper checks the replies: bad ones are dropped with a reason, so
    that no node stops the run.

    Parameters
    ----------
    strategy : Strategy, optional
        Any Flower strategy or another wrapper; FedAvg if left out.

    Raises
    ------
    ValueError
        If it is no Flower strategy, is already wrapped, or holds what this one does not go with.

    Notes
    -----
    What goes with what, checked at construction:

    - No two wrappers decide the same thing. ``TiFL`` and ``RandomSelection`` decide the
      selection; ``LocalSteps``, ``BiasedLocalSGD``, ``FedNova``, ``AdaComm`` and the exact mode
      of ``CDGraB`` the steps; ``CDGraB`` the orders; ``Resharding`` the samples of a node; the
      shared-data mode of ``BiasedLocalSGD`` samples and orders. So none occurs twice.
    - ``OverSelect`` goes outside the selection and ``Resharding``: both send nodes messages of
      their own, and a node that is still at work must not get any.
    - ``FedBuff`` goes outside what decides the steps and strategies of Flower's; in its loop
      ``CDGraB``, ``HerdingMeter`` and ``Resharding`` do not work.
    - ``Recorded`` goes outside all others, which it restores before they begin, and
      ``ModelAverage`` outside ``FedAT``, which makes the global model.
    - A selection needs a strategy that derives from FedAvg and leaves the choice of nodes open;
      steps and orders need gradients; ``OverSelect`` needs one that asks several nodes at once.
    - All else goes, with a wrapper outermost: Flower's start has no hooks.

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
    contracts: tuple[Contract, ...] = ()
    """What the replies must hold for this wrapper to have an effect."""
    on_missing = "raise"
    """What to do if no reply of the first round holds it: "raise" or "warn"."""

    leaf: Strategy
    """The innermost strategy."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.inner: Strategy = FedAvg() if strategy is None else check_strategy(strategy)
        self.outer: Wrapper | None = None
        self.leaf = self.chain()[-1]
        self._help: dict[str, HelpCheck] = {}
        if isinstance(self.inner, Wrapper) and self.inner.outer is not None:
            raise invalid("strategy", strategy, "be wrapped only once", "make a new instance")
        check_composition(self)
        self.session = Session()
        if isinstance(self.inner, Wrapper):
            self.inner.outer, self.session = self, self.inner.session

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
        key = self._weight_key
        return [1.0 if key is None else weight_of(reply, key) for reply in replies]

    def helps(self, reply: Message, contract: Contract) -> bool | None:
        """Return whether a reply holds what a contract asks for; None if it does not tell."""
        return holds(reply, contract.key)

    def on_train_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
        """Learn which nodes' replies counted after all wrappers, and which nodes failed."""

    def on_profile_replies(self, replies: list[Message]) -> None:
        """Learn from the good replies of a profiling round; they hold times and no models."""

    def on_evaluate_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Learn from the good evaluation replies; return those that go further in."""
        return replies

    def on_evaluate_end(self, server_round: int, good: list[str], failed: list[str]) -> None:
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
        strategy: Strategy | None = self
        while strategy is not None:
            chain.append(strategy)  # Flower's own wrappers call the next one ``strategy``
            own = attributes_of(strategy)
            following = own.get("inner", own.get("strategy"))
            strategy = following if isinstance(following, Strategy) else None
        return tuple(chain)

    def wrappers(self) -> tuple["Wrapper", ...]:
        """Return this wrapper and those in it, outermost first."""
        return tuple(s for s in self.chain() if isinstance(s, Wrapper))

    def identity(self, node_id: int) -> str:
        """Return a node's stable identity: name, key, partition or id, in that order."""
        return self.session.registry.identity(node_id)

    @property
    def top(self) -> "Wrapper":
        """The outermost wrapper."""
        return self if self.outer is None else self.outer.top

    @property
    def loop(self) -> Loop:
        """The loop that runs: rounds, unless a wrapper brings its own."""
        return self.inner.loop if isinstance(self.inner, Wrapper) else run_rounds

    @property
    def _weight_key(self) -> str | None:
        return getattr(self.leaf, "weighted_by_key", None)

    # --- Flower's Strategy -------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Configure a round of training; see the hooks."""
        if self.outer is None:
            check_start(self)
            self.session.begin_round(arrays, config)
        view = self.before_train(server_round, grid)
        messages: Iterable[Message] = ()
        if _has_nodes(view, grid):
            messages = self.inner.configure_train(server_round, arrays, config, view)
        own = self.on_instructions(server_round, self._with_own_records(messages), grid)
        if self.outer is None:
            self.session.ask(own, grid)
        return own

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        session, like, good = self.session, self.session.arrays, list(replies)
        if self.outer is None:
            trees = format_of_trees(self.leaf)
            sent = None if trees else like
            good = session.accept(good, Expected(sent, self._weight_key, trees=trees))
        self._check_help(good)
        good = session.hooks.heard(self.on_replies, server_round, good, session.drop)
        if isinstance(self.inner, Wrapper):
            arrays, metrics = self.inner.aggregate_train(server_round, good)
        else:
            good = session.count(good, self._weight_key)
            weights = self.top.weights(good)
            session.info.weights = {}
            for identity, weight in zip(session.exchange.counted, weights, strict=True):
                session.info.weights[identity] = weight + session.info.weights.get(identity, 0.0)
            arrays, metrics = aggregate(self.inner, self.leaf, server_round, good, weights, like)
        if self.outer is None:
            if arrays is not None and like is not None:
                arrays = keep_dtypes(arrays, like)  # Flower's FedAdam and its like give float64
            for wrapper in self._of_this_session():
                done = session.exchange
                session.hooks.tell(wrapper.on_train_end, server_round, done.counted, done.failed)
            session.check_progress()
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Configure a round of evaluation; see the hooks."""
        view = self.before_evaluate(server_round, grid)
        messages: Iterable[Message] = ()
        if _has_nodes(view, grid):
            messages = self.inner.configure_evaluate(server_round, arrays, config, view)
        own = self._with_own_records(messages)
        if self.outer is None:
            self.session.ask(own, grid)
        return own

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies, learn from them, and let the wrapped strategy aggregate them."""
        session, good = self.session, list(replies)
        if self.outer is None:
            good = session.accept(good, Expected(None, self._weight_key))
            session.info.by_node = by_node(good, self.identity)
        good = session.hooks.heard(self.on_evaluate_replies, server_round, good, session.drop)
        if not isinstance(self.inner, Wrapper):
            good = session.count(good, self._weight_key)
            drop_partial_metrics(good)
        metrics = self.inner.aggregate_evaluate(server_round, good)
        if self.outer is None:
            for wrapper in self._of_this_session():
                done = session.exchange
                session.hooks.tell(wrapper.on_evaluate_end, server_round, done.counted, done.failed)
            session.check_progress("evaluation")
        return metrics

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

        ``grid`` may also be a :class:`~flwr_hetero.fleet.LocalGrid`; ``timeout`` is in seconds
        of the fleet's clock, ten minutes if left out; None for no limit.
        """
        timeout = inf if timeout is None else timeout
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        settings = (num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        return self.loop(Run(self, grid, initial_arrays, *settings))

    def __getattr__(self, name: str) -> Any:
        """Look further in for what this wrapper does not have."""
        if "inner" not in attributes_of(self) or name.startswith("__"):
            raise AttributeError(name)
        for strategy in self.chain()[1:]:
            if hasattr(type(strategy), name) or name in attributes_of(strategy):
                return getattr(strategy, name)
        names = " > ".join(type(strategy).__name__ for strategy in self.chain())
        hint = older_call_hint(name)
        raise AttributeError(f"{name!r} is no attribute of any strategy in {names}{hint}")

    def _check_help(self, replies: list[Message]) -> None:
        """Check in the first round with enough replies that nodes do their part."""
        for contract in self.contracts:
            check = self._help.setdefault(contract.key, HelpCheck(self, contract))
            if not check.done:
                found = {r.metadata.src_node_id: self.helps(r, contract) for r in replies}
                silent = {n: self.identity(n) for n, helps in found.items() if helps is False}
                enough, helping = self.session.exchange.quorum, sum(map(bool, found.values()))
                check.see(silent, helping, enough, replies)

    def _of_this_session(self) -> list["Wrapper"]:
        """Return the wrappers down to Flower's first strategy, which may wrap others."""
        return [wrapper for wrapper in self.wrappers() if wrapper.session is self.session]

    def _with_own_records(self, messages: Iterable[Message]) -> list[Message]:
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
    """Return whether there is a node to ask; Flower's sampling waits indefinitely for one."""
    return view is grid or any(True for _ in view.get_node_ids())
