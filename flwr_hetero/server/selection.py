"""The seam for selection: which nodes train and evaluate in a round."""

import json
import random
from collections.abc import Mapping, Set
from logging import INFO, WARNING
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_hetero._flwr import chooses_one_node, log, trains_trees
from flwr_hetero.errors import check_count, invalid
from flwr_hetero.server.aggregate import with_update
from flwr_hetero.server.composition import check_enough_updates, check_unscaled
from flwr_hetero.server.context import Exchange
from flwr_hetero.server.nodes import MINIMA, GridView, online_nodes, wait_for_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict, check_state

FLOWERS_DEFAULT = 2
"""Flower's own minimum of nodes: a strategy with it was given none."""

LONG_STEP = 4.0
"""Length of a round's step, where unbiased and in FedAvg's, above which the log says so."""
LONG_HINT = "select them more often, or lower the learning rate (docs/objectives.md)"


class Outcome(NamedTuple):
    """What a selected node delivered: its latency and its metrics."""

    latency_s: float
    metrics: Mapping[str, Any]


class Selection(Wrapper):
    r"""Select the nodes of each round; a rule of selection overrides ``select``.

    The wrapped strategy trains all nodes that it is shown, and is shown the selected ones only.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    clients_per_round : int, optional
        Nodes that train in a round; None: all.
    evaluates : bool
        Whether nodes evaluate even if the wrapped strategy does not ask for it.
    fixed_size : bool
        Whether every round trains ``clients_per_round`` nodes, as privacy accounting asks for.
    unbiased : bool
        Whether updates are weighted by one over their nodes' chances to be selected, which a
        rule gives by ``node_chances``.

    Raises
    ------
    ValueError
        If the wrapped strategy has a selection of its own, or would wait for nodes that it is
        not shown.

    Notes
    -----
    Unbiased is the sum of Horvitz and Thompson over the selected nodes S of all M that may be
    selected, with weights :math:`n_i` of mean :math:`\bar n` and chances :math:`\pi_i`:

    .. math:: x \leftarrow x + \sum_{i \in S} \frac{n_i}{M \bar n \, \pi_i} (x_i - x)

    The divisor is fixed, for over the weights of those selected it would not be unbiased: in a
    tier of equal chances they would cancel. A round's step so has a varying length, and a reply
    that does not come counts as an update of zero.
    """

    name: ClassVar[str] = "selection"
    decides = frozenset({"selection"})
    count_argument: ClassVar[str] = "clients_per_round"
    """Argument that says how many nodes train, for hints."""

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int | None = None,
        *,
        evaluates: bool = False,
        fixed_size: bool = False,
        unbiased: bool = False,
    ) -> None:
        if clients_per_round is not None:
            check_count("clients_per_round", clients_per_round, 1)
        if unbiased:  # the first to answer have other chances than those asked
            self.decides = self.decides | {"waiting"}
        super().__init__(strategy)
        if unbiased and trains_trees(self.leaf):
            rule = "average models with unbiased=True: updates of trees cannot be scaled"
            raise invalid("strategy", type(self.leaf).__name__, rule)
        if unbiased and any(getattr(s, "accountant", None) for s in self.chain()):
            raise invalid("unbiased", unbiased, "be False where privacy is accounted for")
        if unbiased:
            check_unscaled(self, "unbiased", unbiased)
        self.clients_per_round, self.unbiased = clients_per_round, unbiased
        self.selected: list[int] = []
        self.usual_weights: dict[str, float] = {}  # of every node seen, if unbiased
        self._chances: Mapping[int, float] = {}
        self._has_warned = False
        self._outcomes: dict[str, Outcome] = {}
        self._inner_evaluates = self._open_inner_selection(evaluates, fixed_size)

    # --- override these ----------------------------------------------------------------

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Return the ids of the nodes that train; nodes may be sent messages before."""
        raise NotImplementedError

    def select_for_evaluation(self, context: Exchange, grid: Grid) -> list[int]:
        """Return the ids of the nodes that evaluate: those that train, if any do."""
        return self.selected if self._inner_evaluates else []

    def node_chances(self, context: Exchange, online: Set[int]) -> Mapping[int, float]:
        """Return the chance of each node that ``select`` might have returned, by id.

        Asked for after it, if ``unbiased``. Empty if they are not known: this round counts as
        without ``unbiased``.
        """
        raise NotImplementedError

    def on_outcome(self, context: Exchange, good: dict[str, Outcome], failed: list[str]) -> None:
        """Learn from a round of training; nodes are named by their identity."""

    # --- hooks of the wrapper ------------------------------------------------------------

    def before_train(self, context: Exchange, grid: Grid) -> Grid:
        """Wait for a node and show the selected ones."""
        online = wait_for_nodes(grid, 1)
        self.selected = self.select(context, grid, online)
        self._chances = self.node_chances(context, online) if self.unbiased else {}
        return GridView(grid, self.selected)

    def before_evaluate(self, context: Exchange, grid: Grid) -> Grid:
        """Show the nodes that evaluate, of those that are shown to this wrapper."""
        selected, online = self.select_for_evaluation(context, grid), online_nodes(grid)
        return GridView(grid, [node_id for node_id in selected if node_id in online])

    def on_replies(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Note latency and metrics; wrapped strategies may still drop replies."""
        self._outcomes = {}
        for reply in replies:
            name, seconds = self.identity(reply.metadata.src_node_id), context.comparable_s(reply)
            (metrics,) = reply.content.metric_records.values()
            self._outcomes[name] = Outcome(seconds, dict(metrics))
        return self._as_sum(context, replies) if self._chances else replies

    def weights(self, context: Exchange, replies: list[Message]) -> list[float]:
        """Divide the weights by the nodes' chances, if unbiased."""
        weights, chances = super().weights(context, replies), self._chances
        if not chances:
            return weights
        pairs = zip(weights, replies, strict=True)
        return [weight / chances[reply.metadata.src_node_id] for weight, reply in pairs]

    def _as_sum(self, context: Exchange, replies: list[Message]) -> list[Message]:
        """Scale the updates so that their weighted mean is the sum over the selected nodes."""
        start, weights = context.arrays, self.top.weights(context, replies)
        for reply, weight in zip(replies, weights, strict=True):
            node_id = reply.metadata.src_node_id
            self.usual_weights[self.identity(node_id)] = weight * self._chances[node_id]
        if not any(weights):
            return replies
        step = sum(weights) / (len(self._chances) * fmean(self.usual_weights.values()))
        if step > LONG_STEP and not self._has_warned:
            self._has_warned = True
            text = "%s: a step %.3g times as long as FedAvg's, of nodes with a chance of %.2g; %s"
            chance, advice = min(self._chances[r.metadata.src_node_id] for r in replies), LONG_HINT
            log(WARNING, text, type(self).__name__, step, chance, advice)
        return [with_update(reply, start, start, step) for reply in replies]

    def on_train_end(self, context: Exchange, good: list[str], failed: list[str]) -> None:
        """Pass on what the nodes delivered whose replies counted."""
        self.on_outcome(context, {node: self._outcomes[node] for node in good}, failed)

    def state_dict(self) -> StateDict:
        """Return the nodes' weights, if unbiased."""
        return {"usual_weights": json.dumps(self.usual_weights)} if self.unbiased else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        if self.unbiased:
            check_state(state, {"usual_weights": str}, type(self).__name__)
            self.usual_weights = json.loads(str(state["usual_weights"]))

    def _open_inner_selection(self, evaluates: bool, fixed_size: bool) -> bool:
        """Let the innermost strategy train all nodes shown; return whether it evaluates.

        Flower's ``sample_nodes`` waits indefinitely for nodes that a view hides: what could make
        it wait is refused, and the minima are set to 1.
        """
        leaf: Any = self.leaf
        me, kind = self.called or type(self).__name__, type(leaf).__name__
        count = self.clients_per_round
        if not isinstance(leaf, FedAvg) or chooses_one_node(leaf):
            raise invalid("strategy", kind, "derive from FedAvg and leave the choice of nodes open")
        if leaf.fraction_train != 1.0:
            rule, hint = f"be 1.0 inside {me}", f"set {self.count_argument} of {me} instead"
            raise invalid(f"{kind}.fraction_train", leaf.fraction_train, rule, hint)
        for minimum in MINIMA:
            most = max(count or 0, FLOWERS_DEFAULT)
            if getattr(leaf, minimum) > most:
                rule = f"be at most {most} inside {me}, whose nodes it is shown"
                hint = f"leave it out: {self.count_argument} says how many nodes train"
                raise invalid(f"{kind}.{minimum}", getattr(leaf, minimum), rule, hint)
        check_enough_updates(leaf, count, self.count_argument)
        for strategy in (s for s in self.chain() if not isinstance(s, Wrapper)):
            asked = getattr(strategy, "num_sampled_clients", count)
            if getattr(strategy, "accountant", None) and not (fixed_size and asked == count):
                rule = f"be the size of every round, clients_per_round={count}"
                raise invalid(f"{type(strategy).__name__}.num_sampled_clients", asked, rule)
        inner_evaluates = bool(leaf.fraction_evaluate > 0)
        self._min_evaluate_nodes = int(leaf.min_evaluate_nodes)
        leaf.min_train_nodes = leaf.min_available_nodes = leaf.min_evaluate_nodes = 1
        if evaluates and not inner_evaluates:
            leaf.fraction_evaluate = 1.0
        return inner_evaluates


class RandomSelection(Selection):
    """Train nodes drawn uniformly without replacement each round; they evaluate too.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.
    clients_per_round : int, optional
        Nodes that train in a round; None: all.
    unbiased : bool
        Whether the mean over the draws is FedAvg's step with all nodes. Without it, nodes with
        many examples count less than by these, most of all if ``clients_per_round`` is 1.
    seed : int
        Of the selection.

    Raises
    ------
    ValueError
        If a setting is out of range, or the wrapped strategy has a selection of its own.

    Notes
    -----
    Flower's ``fraction_train`` is of the nodes online, and its ``min_train_nodes`` waits for
    them; this trains with those that are there, fewer if fewer are online.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = RandomSelection(FedAdam(), clients_per_round=5, seed=1)
    """

    name: ClassVar[str] = "random"

    def __init__(
        self,
        strategy: Strategy | None = None,
        clients_per_round: int | None = 5,
        *,
        unbiased: bool = False,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(check_count("seed", seed))  # as Flower draws
        super().__init__(strategy, clients_per_round, unbiased=unbiased)

    def select(self, context: Exchange, grid: Grid, online: Set[int]) -> list[int]:
        """Draw the nodes of a round."""
        count = min(self.clients_per_round or len(online), len(online))
        return self.rng.sample(sorted(online), count)

    def node_chances(self, context: Exchange, online: Set[int]) -> Mapping[int, float]:
        """Give all nodes online the same chance."""
        return dict.fromkeys(online, len(self.selected) / len(online))

    def state_dict(self) -> StateDict:
        """Return the state of the generator."""
        return super().state_dict() | {"rng": json.dumps(self.rng.getstate())}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        super().load_state_dict(state)
        check_state(state, {"rng": str}, type(self).__name__)
        version, words, gauss = json.loads(str(state["rng"]))
        self.rng.setstate((version, tuple(words), gauss))

    def summary(self) -> None:
        """Log the settings, then those of the wrapped strategy."""
        log(INFO, "\t├──> %s: %s nodes a round", type(self).__name__, self.clients_per_round)
        super().summary()
