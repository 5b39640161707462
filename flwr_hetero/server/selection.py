"""Rules of selection: which nodes train and evaluate in a round."""

import json
import random
from collections.abc import Mapping, Set
from typing import Any, ClassVar, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero._flwr import chooses_one_node
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.nodes import MINIMA, GridView, online_nodes, wait_for_nodes
from flwr_hetero.records import metrics_of
from flwr_hetero.server.composition import check_enough_updates, name_of
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state


class Outcome(NamedTuple):
    """The latency and the metrics of a selected node."""

    latency_s: float
    metrics: Mapping[str, Any]


class Selection(Wrapper):
    """Select the nodes of each round; a rule of selection overrides ``select``.

    The wrapped strategy is shown the selected nodes only, and trains all of them. ValueError for a
    strategy that selects nodes itself, or that would wait for nodes that it is not shown.

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates; FedAvg if left out. It is copied: see :class:`Wrapper`.
    clients_per_round : int, optional
        Number of nodes that train in a round. None: all nodes.
    """

    name: ClassVar[str] = "selection"
    decides = frozenset({"selection"})
    count_argument: ClassVar[str] = "clients_per_round"
    """Name of the argument for the number of nodes, which hints mention."""
    evaluates = False
    """Whether nodes evaluate even if the wrapped strategy does not evaluate."""

    def __init__(
        self, strategy: Strategy | None = None, clients_per_round: int | None = None
    ) -> None:
        if clients_per_round is not None:
            check_count("clients_per_round", clients_per_round, 1)
        super().__init__(strategy)
        self.clients_per_round = clients_per_round
        self.selected: list[int] = []
        self._outcomes: dict[str, Outcome] = {}
        self._open_inner_selection()

    # --- override these ----------------------------------------------------------------
    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Return the ids of the nodes that train; the rule may send messages to nodes first."""
        raise NotImplementedError

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Return the ids of the nodes that evaluate: those that train, if any do."""
        return self.selected if self._inner_evaluates else []

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Learn from a round of training, in which each node has its identity as its name."""

    # --- hooks of the wrapper ------------------------------------------------------------
    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Wait until a node is online, and show the selected nodes."""
        self.selected = self.select(context, grid, wait_for_nodes(grid, 1))
        return GridView(grid, self.selected)

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Show the nodes that evaluate, if they are shown to this wrapper."""
        selected = self.select_for_evaluation(context, grid)
        online = online_nodes(grid)
        return GridView(grid, [node_id for node_id in selected if node_id in online])

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Keep latencies and metrics, because wrapped strategies may still drop replies."""
        self._outcomes = {}
        for reply in replies:
            outcome = Outcome(context.comparable_s(reply), dict(metrics_of(reply)))
            self._outcomes[context.identity(reply.metadata.src_node_id)] = outcome
        return replies

    def on_train_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Pass on the outcomes of the nodes whose replies counted."""
        self.on_outcome(context, {node: self._outcomes[node] for node in good}, failed)

    def _open_inner_selection(self) -> None:
        """Let the copy of the user's strategy train all nodes that it is shown."""
        leaf: Any = self.leaf
        me = name_of(self)
        kind = type(leaf).__name__
        count = self.clients_per_round
        if not isinstance(leaf, FedAvg) or chooses_one_node(leaf):
            raise invalid("strategy", kind, "derive from FedAvg and leave the choice of nodes open")
        if leaf.fraction_train != 1.0:
            rule = f"be 1.0 inside {me}"
            hint = f"set {self.count_argument} of {me} instead"
            raise invalid(f"{kind}.fraction_train", leaf.fraction_train, rule, hint)
        # Flower's sample_nodes would wait indefinitely for nodes that are hidden. Its default is 2.
        most = max(count or 0, 2)
        for minimum in (name for name in MINIMA if getattr(leaf, name) > most):
            rule = f"be at most {most} inside {me}, whose nodes it is shown"
            hint = f"leave it out: {self.count_argument} says how many nodes train"
            raise invalid(f"{kind}.{minimum}", getattr(leaf, minimum), rule, hint)
        check_enough_updates(leaf, count, self.count_argument)
        # A privacy accountant assumes that all rounds have the same size.
        for strategy in self.chain()[len(self.wrappers()) :]:
            if getattr(strategy, "accountant", None):
                rule = f"be without a privacy accountant inside {me}, whose rounds vary in size"
                raise invalid("strategy", type(strategy).__name__, rule)
        self._inner_evaluates = bool(leaf.fraction_evaluate > 0)
        self._min_evaluate_nodes = int(leaf.min_evaluate_nodes)
        leaf.min_train_nodes = leaf.min_available_nodes = leaf.min_evaluate_nodes = 1
        if self.evaluates and not self._inner_evaluates:
            leaf.fraction_evaluate = 1.0


class RandomSelection(Selection):
    """Draw the nodes of each round uniformly without replacement; the same nodes evaluate.

    >>> strategy = RandomSelection(clients_per_round=5, seed=1)

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that aggregates; FedAvg if left out.
    clients_per_round : int, optional
        Number of nodes that train in a round, if as many are online. None: all nodes.
    seed : int
        Seed of the selection.
    """

    name: ClassVar[str] = "random"

    def __init__(
        self, strategy: Strategy | None = None, clients_per_round: int | None = 5, *, seed: int = 0
    ) -> None:
        self.seed = check_count("seed", seed)
        # Flower draws its nodes with a generator of this kind.
        self.rng = random.Random(seed)
        super().__init__(strategy, clients_per_round)

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Draw the nodes of a round."""
        count = min(self.clients_per_round or len(online), len(online))
        return self.rng.sample(sorted(online), count)

    def state_dict(self) -> StateDict:
        """Return the state of the generator."""
        return {"rng": json.dumps(self.rng.getstate())}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        check_state(state, {"rng": str}, type(self).__name__)
        version, words, gauss = json.loads(str(state["rng"]))
        self.rng.setstate((version, tuple(words), gauss))
