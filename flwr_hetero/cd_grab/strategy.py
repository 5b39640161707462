"""CD-GraB's order server (Alg. 4): it balances the orders of all nodes together."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.cd_grab import algorithm, wire
from flwr_hetero.cd_grab.algorithm import Signs, Vectors
from flwr_hetero.cd_grab.wire import Answer, Report, Terms
from flwr_hetero.errors import check_choice, check_count
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.records import config_of, configs_in
from flwr_hetero.server.client_support import STEPS, ClientSupport
from flwr_hetero.server.loop import Run
from flwr_hetero.server.profiling import identify_nodes
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import StateDict

Group: TypeAlias = dict[str, Report]
"""Reports by node, of nodes whose pairs are balanced together."""
MEMORY = 0.5  # weight of the past in a node's overlap
OUTLIER = 3.0  # outliers have differences longer than this times the median node's
FEW = 16  # with fewer pairs the limit for outliers is higher
ORDERS = ClientSupport(
    keys.ORDER,
    "what it saw of its order",
    "    from flwr_hetero.mod import hetero\n"
    "    from flwr_hetero.sampler import OrderedSampler\n"
    "    app = ClientApp(mods=[hetero])  # adds to the reply what the sampler has to say\n"
    "    loader = hetero.batches(loader, msg, sampler=OrderedSampler, model=model)\n"
    "    criterion = loader.criterion()  # in place of the loss function",
    "which stay with their own order",
)


@dataclass
class NodeState:
    """One node's order and the signs of the pass through it that is under way."""

    order: NDArray[np.int64]
    version: int = 0
    pass_signs: Signs = field(default_factory=lambda: np.zeros(0, np.int8))
    own_sum: Vectors = field(default_factory=lambda: np.zeros(0, np.float32))
    group: frozenset[str] = frozenset()
    overlap: float = 1.0

    def add(self, signs: Signs) -> None:
        """Add the signs of the next pairs; make the next order after the last pair."""
        self.pass_signs = np.concatenate([self.pass_signs, signs])
        num_units = len(self.order)
        if len(self.pass_signs) == num_units // 2:
            # Alg. 4, l. 14
            signs = algorithm.unit_signs(self.pass_signs, num_units)
            self.order = algorithm.reorder(self.order, signs)
            self.pass_signs = self.pass_signs[:0]
            self.version += 1


class Balance(NamedTuple):
    """Pairs that were balanced in a round, for the history."""

    pairs: int = 0
    pairs_together: int = 0
    own_share: float = 0.0


class OrderServer:
    """Balance pairs round by round and keep every node's order (Alg. 4)."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.states: dict[str, NodeState] = {}

    def answer(self, node: str) -> Answer:
        """Return a node's next order (Alg. 4, l. 15)."""
        state = self.states.get(node)
        return Answer() if state is None else Answer(state.version, state.order)

    def receive(self, reports: Mapping[str, Report]) -> Balance:
        """Balance the pairs of a round; reports by node, in the order of the nodes."""
        accepted = {n: report for n, report in reports.items() if self._accepts(n, report)}
        pairs = pairs_together = 0
        sum_of_shares = 0.0
        # A common sum balances only nodes at the same position of equally long orders.
        for group in side_by_side(accepted):
            self._join(frozenset(group))
            for part in [group] if self.exact else split_outliers(group):
                num_pairs, share = self._balance(part)
                pairs += num_pairs
                pairs_together += num_pairs if len(part) > 1 else 0
                sum_of_shares += num_pairs * share
        return Balance(pairs, pairs_together, sum_of_shares / max(1, pairs))

    def _accepts(self, node: str, report: Report) -> bool:
        """Return whether a report continues the pass through the node's present order."""
        state = self.states.get(node)
        if state is None or len(state.order) != report.num_units:
            # The node may have an order from before a restart: number ours above it.
            version = report.version and report.version + 1
            state = self.states[node] = NodeState(np.arange(report.num_units), version)
        if report.version != state.version or not len(report.diffs):
            return False
        # Alg. 4, l. 3: r <- 0
        if report.first_pair == 0:
            state.pass_signs = np.zeros(0, np.int8)
            state.own_sum = np.zeros(report.diffs.shape[1], report.diffs.dtype)
        is_next = report.first_pair == len(state.pass_signs)
        return is_next and report.diffs.shape[1] == len(state.own_sum)

    def _join(self, group: frozenset[str]) -> None:
        """Track which part of its last group each node is balanced with again."""
        states = [self.states[node] for node in group]
        # Most nodes share their last group, so that each common part is counted once.
        num_common = {last: len(group & last) for last in {state.group for state in states}}
        for state in states:
            if state.group:
                kept = (num_common[state.group] - 1) / max(1, len(group) - 1)
                state.overlap = MEMORY * state.overlap + (1 - MEMORY) * kept
            state.group = group

    def _balance(self, group: Group) -> tuple[int, float]:
        """Give signs to a group's pairs; return their number and the share of own sums."""
        states = [self.states[node] for node in group]
        shares = algorithm.own_share([state.overlap for state in states], len(states))
        # Alg. 4, l. 4-13
        own_sums = [state.own_sum for state in states]
        diffs = [report.diffs for report in group.values()]
        _, signs = algorithm.balance_group(own_sums, diffs, shares)
        for state, node_signs in zip(states, signs, strict=True):
            state.add(node_signs)
        return sum(map(len, signs)), float(shares.mean())

    def state_dict(self) -> StateDict:
        """Return all states as ``node/field``; a group, which many nodes share, is kept once."""
        numbers: dict[frozenset[str], int] = {}
        saved: dict[str, Any] = {}
        for node, state in self.states.items():
            # Own sums are changed in place.
            fields = vars(state) | {"own_sum": state.own_sum.copy()}
            fields["group"] = numbers.setdefault(state.group, len(numbers))
            saved |= {f"{node}/{name}": value for name, value in fields.items()}
        return saved | {"groups": json.dumps([sorted(group) for group in numbers])}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        groups = [frozenset(group) for group in json.loads(str(state["groups"]))]
        by_node: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            node, _, name = key.rpartition("/")
            if node:
                by_node.setdefault(node, {})[name] = value
        for fields in by_node.values():
            fields |= {"group": groups[fields["group"]], "own_sum": fields["own_sum"].copy()}
        self.states = {node: NodeState(**fields) for node, fields in by_node.items()}


def side_by_side(reports: Mapping[str, Report]) -> list[Group]:
    """Group the nodes at the same position of equally long orders, with as many pairs."""
    groups: dict[tuple[int, ...], Group] = {}
    for node, report in reports.items():
        # A faulty or lying node may send vectors of another length: it gets its own group.
        place = report.first_pair, report.num_units, *report.diffs.shape
        groups.setdefault(place, {})[node] = report
    return list(groups.values())


def split_outliers(group: Group) -> list[Group]:
    """Isolate outliers, so that one node cannot determine the signs of all.

    An outlier is a node whose differences are far longer than the median node's.
    """
    num_pairs = len(next(iter(group.values())).diffs)
    lengths = {n: float(np.linalg.norm(r.diffs)) / num_pairs**0.5 for n, r in group.items()}
    limit = OUTLIER * float(np.median([*lengths.values()])) * max(1.0, (FEW / num_pairs) ** 0.5)
    inliers = {node: report for node, report in group.items() if lengths[node] <= limit}
    outliers = [{node: report} for node, report in group.items() if node not in inliers]
    return [inliers, *outliers]


class CDGraB(Wrapper):
    """Serve orders to nodes that train with an :class:`~flwr_hetero.sampler.OrderedSampler`.

    Each reply brings the differences of the pairs of units that the node has visited, each
    instruction its next order. Nodes without such a sampler take part unchanged.
    MissingClientSupportError in the first round if no node reports on its order. Cooper et al.,
    NeurIPS 2023, Algorithms 3 and 4.

    >>> strategy = CDGraB(num_units=64)

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates: any Flower strategy, or another wrapper; FedAvg if left out.
    mode : {"sketched", "exact"}
        ``sketched``: any number of local steps per round, one short sketch per pair. ``exact``:
        one step per round and whole gradients: the paper's algorithms to the letter, if all nodes
        take part.
    sketch_size : int
        Numbers k in a sketch, two bytes each; 256 has most of the gain of 1024, 16 has none.
    num_units : int, optional
        Units in every node's order; by default each node's own choice. Only equally long orders
        are balanced together: set it where nodes hold unequal amounts of data.
    seed : int
        Seed of the sketch.

    Notes
    -----
    The paper leaves partial participation out. Here the sign balances a mix of the global sum and
    the node's own sum (:func:`~flwr_hetero.cd_grab.algorithm.own_share`; ``own_share`` in the
    history). Above 0.8 ``OrderedSampler(method="id-grab")`` is as good, and sends
    nothing. A resumed run equals an unbroken one if nodes keep their state.
    """

    name: ClassVar[str] = "cd_grab"
    decides = frozenset({"orders"})
    client_support: tuple[ClientSupport, ...] = (ORDERS,)
    only_rounds = "nodes balance pairs on their own there: OrderedSampler(method='id-grab')"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        mode: str = "sketched",
        sketch_size: int = 1024,
        num_units: int | None = None,
        seed: int = 0,
    ) -> None:
        exact = check_choice("mode", mode, ("sketched", "exact")) == "exact"
        size = 0 if exact else check_count("sketch_size", sketch_size, 1)
        units = 0 if num_units is None else check_count("num_units", num_units, 2)
        if exact:
            self.decides = self.decides | {"steps"}
            self.client_support = ORDERS, STEPS
        super().__init__(strategy)
        self.mode = mode
        self.sketch_size = sketch_size
        self.num_units = num_units
        self.seed = check_count("seed", seed)
        self.server = OrderServer(exact=exact)
        self.terms = Terms(0, size, seed, units)
        # By node, from when its reply is judged.
        self._reports: dict[int, Report] = {}
        self._balance = Balance()

    def on_start(self, run: Run) -> None:
        """After a resume, find out which nodes the orders belong to."""
        if self.server.states:
            identify_nodes(self, run.exchange(run.round + 1), run.grid, run.timeout_s)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Send each node its order (Alg. 4, l. 15)."""
        self.terms = self.terms._replace(server_round=context.round)
        self._reports = {}
        for message in messages:
            answer = self.server.answer(self.identity(message.metadata.dst_node_id))
            record = wire.write_instruction(self.terms, answer)
            message.content[keys.ORDER] = ConfigRecord(record)  # type: ignore[arg-type]
            # With one step per round all gradients of a round are at the same weights.
            if self.server.exact:
                config_of(message)[keys.NUM_STEPS] = 1
        return messages

    def why_bad(self, context: Exchange, reply: Message) -> str | None:
        """Read the pairs in a reply (Alg. 4, l. 5); return why they cannot be balanced."""
        record = configs_in(reply.content).get(keys.ORDER)
        if record is None:
            return None
        try:
            self._reports[reply.metadata.src_node_id] = wire.read_report(record, self.terms)
        except ValueError as error:
            return f"order record: {error}"
        return None

    def on_replies(self, context: Exchange, replies: Messages) -> Messages:
        """Take the pairs out of the replies and balance them (Alg. 4, l. 8-14)."""
        ordered = [reply for reply in replies if reply.content.pop(keys.ORDER, None) is not None]
        self._balance = self.server.receive(self._weighted(context, ordered))
        return replies

    def _weighted(self, context: Exchange, replies: Messages) -> dict[str, Report]:
        """Return reports by identity, with pairs scaled by the weights of the nodes' models."""
        weights = self.top.weights(context, replies)
        mean_weight = sum(weights) / len(weights) if any(weights) else 1.0
        result = {}
        for reply, weight in zip(replies, weights, strict=True):
            report = self._reports[reply.metadata.src_node_id]
            if weight != mean_weight:
                report = report._replace(diffs=weight / mean_weight * report.diffs)
            result[self.identity(reply.metadata.src_node_id)] = report
        return result

    def round_info(self) -> dict[str, Any]:
        """Return the number of pairs balanced in this round, and the share of own sums."""
        return self._balance._asdict()

    def state_dict(self) -> StateDict:
        """Return all orders and the signs of the passes under way."""
        return self.server.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``."""
        self.server.load_state_dict(state)
