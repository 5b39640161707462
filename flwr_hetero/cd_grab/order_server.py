"""The order server (Alg. 4): each node's order, and the balancing of pairs that come by rounds."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.cd_grab.algorithm import (
    Signs,
    Vectors,
    balance_group,
    own_share,
    reorder,
    unit_signs,
)
from flwr_hetero.cd_grab.wire import Answer, Report
from flwr_hetero.state_dict import StateDict, check_state

Group: TypeAlias = dict[str, Report]

MEMORY = 0.5
"""Weight of the past in a node's overlap."""
NEARLY = 1.03
"""Orders count as equally long up to this factor."""
OUTLIER = 3.0
"""A node whose differences are longer than this many times the median node's is an outlier."""
FEW = 16
"""Pairs that show how long a node's differences are; with fewer the limit is higher."""


@dataclass
class NodeState:
    """One node's order and the signs of the pass through it that is under way."""

    order: NDArray[np.int64]
    version: int = 0
    signs: Signs | None = None
    pass_signs: Signs = field(default_factory=lambda: np.zeros(0, np.int8))
    own_sum: Vectors = field(default_factory=lambda: np.zeros(0, np.float32))
    group: frozenset[str] | None = None
    overlap: float = 1.0
    lost: bool = False

    def add(self, signs: Signs) -> None:
        """Add the signs of the next pairs; after the last one make the next order."""
        self.pass_signs = np.concatenate([self.pass_signs, signs])
        num_units = len(self.order)
        if len(self.pass_signs) == num_units // 2:
            self.signs, self.pass_signs = self.pass_signs, self.pass_signs[:0]
            # Alg. 4, l. 14
            self.order = reorder(self.order, unit_signs(self.signs, num_units))
            self.version += 1


_SCHEMA = {
    "order": ((-1,), "i"),
    "version": int,
    "pass_signs": ((-1,), "i"),
    "own_sum": ((-1,), "f"),
    "group": int,
    "overlap": float,
    "lost": bool,
}


class Balance(NamedTuple):
    """What the reports of a round came to, for the history."""

    pairs: int = 0
    pairs_together: int = 0
    own_share: float = 0.0
    signed_sum: float = 0.0


class OrderServer:
    """Balance pairs round by round and keep every node's order (Alg. 4)."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self.states: dict[str, NodeState] = {}

    def answer(self, node: str) -> Answer:
        """Return a node's next order (Alg. 4, l. 15): signs, or all of it if it lost track."""
        state = self.states.get(node)
        if state is None:
            return Answer()
        if state.lost:
            return Answer(state.version, order=state.order, first_pair=len(state.pass_signs))
        return Answer(state.version, signs=state.signs)

    def receive(self, reports: Mapping[str, Report]) -> Balance:
        """Balance the pairs of a round; reports by node, in the order of the nodes."""
        accepted = {n: report for n, report in reports.items() if self._accepts(n, report)}
        parts = []
        # a common sum is of no use to nodes that are not side by side
        for group in side_by_side(accepted):
            join_group((self.states[node] for node in group), frozenset(group))
            split = [group] if self.exact else split_outliers(group)
            parts += [self._balance(part) for part in split]
        if not parts:
            return Balance()
        pairs, together, shares, signed_sums = zip(*parts, strict=True)
        share = float(np.average(shares, weights=pairs))
        return Balance(sum(pairs), sum(together), share, max(signed_sums))

    def rename(self, old: str, new: str) -> None:
        """Keep a node's state under a better identity."""
        if (state := self.states.pop(old, None)) is not None:
            self.states.setdefault(new, state)

    def _accepts(self, node: str, report: Report) -> bool:
        """Return whether a report continues the pass; notice a node without the right order."""
        state = self.states.get(node)
        if state is None or len(state.order) != report.num_units:
            state = NodeState(np.arange(report.num_units))
            # an order from before a restart of the server is not known here
            if report.version:
                state.version, state.lost = report.version + 1, True
            self.states[node] = state
        # an answer that was lost is sent again; all else takes a whole order
        one_behind = report.version == state.version - 1 and state.signs is not None
        state.lost = report.version != state.version and (state.lost or not one_behind)
        if report.version != state.version or not len(report.diffs):
            return False
        # Alg. 4, l. 3: r <- 0
        if report.first_pair == 0:
            state.pass_signs = np.zeros(0, np.int8)
            state.own_sum = np.zeros(report.diffs.shape[1], report.diffs.dtype)
        return report.first_pair == len(state.pass_signs)

    def _balance(self, group: Group) -> Balance:
        """Give signs to a group's pairs, and each node its next order after the last pair."""
        states = [self.states[node] for node in group]
        diffs = [report.diffs for report in group.values()]
        shares = own_share([state.overlap for state in states], len(states))
        own_sums = [state.own_sum for state in states]
        # Alg. 4, l. 4-13
        running_sum, signs = balance_group(own_sums, diffs, shares)
        for state, own in zip(states, signs, strict=True):
            state.add(own)
        num_pairs = sum(map(len, signs))
        usual = float(np.linalg.norm([*map(np.linalg.norm, diffs)]) / np.sqrt(num_pairs)) or 1.0
        together = num_pairs if len(states) > 1 else 0
        signed_sum = float(np.linalg.norm(running_sum)) / usual
        return Balance(num_pairs, together, float(shares.mean()), signed_sum)

    def state_dict(self) -> StateDict:
        """Return all states as ``node/field``; a group, which many nodes share, is kept once."""
        number: dict[frozenset[str] | None, int] = {None: -1}
        state: dict[str, Any] = {}
        for node, own in self.states.items():
            # a sum is changed in place
            fields = vars(own) | {"own_sum": own.own_sum.copy()}
            fields["group"] = number.setdefault(own.group, len(number) - 1)
            state |= {f"{node}/{k}": value for k, value in fields.items() if value is not None}
        groups = [sorted(group) for group in number if group is not None]
        return state | {"groups": json.dumps(groups)}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from ``state_dict``; nodes that lost their state get their orders whole."""
        check_state(state, {"groups": str}, "CDGraB")
        groups = [*map(frozenset, json.loads(str(state["groups"]))), None]
        fields: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            node, _, name = key.rpartition("/")
            if node:
                fields.setdefault(node, {})[name] = value
        for own in fields.values():
            check_state(own, _SCHEMA, "CDGraB")
            own |= {"group": groups[own["group"]], "own_sum": own["own_sum"].copy()}
        self.states = {node: NodeState(**own) for node, own in fields.items()}


# --- groups --------------------------------------------------------------------------


def side_by_side(reports: Mapping[str, Report]) -> list[Group]:
    """Group the nodes at the same position of orders about equally long."""
    places = {n: (r.first_pair, r.num_units, len(r.diffs)) for n, r in reports.items()}
    leader_of, leader = {}, (-1, 0, 0)
    for place in sorted(set(places.values())):
        lengths = zip(place[1:], leader[1:], strict=True)
        if place[0] != leader[0] or any(max(pair) > NEARLY * min(pair) for pair in lengths):
            leader = place
        leader_of[place] = leader
    groups: dict[tuple[int, int, int], Group] = {}
    for node, report in reports.items():
        groups.setdefault(leader_of[places[node]], {})[node] = report
    return list(groups.values())


def join_group(states: Iterable[NodeState], group: frozenset[str]) -> None:
    """Put nodes into a group; track how much of its last group each is balanced with again."""
    # last groups are mostly the same
    num_common: dict[frozenset[str], int] = {}
    for state in states:
        last, state.group = state.group, group
        if last is not None:
            if last not in num_common:
                num_common[last] = len(group & last)
            kept = (num_common[last] - 1) / max(1, len(group) - 1)
            state.overlap = MEMORY * state.overlap + (1 - MEMORY) * kept


def split_outliers(group: Group) -> list[Group]:
    """Balance nodes with far longer differences than the median node's alone."""
    lengths = {n: float(np.linalg.norm(r.diffs)) / len(r.diffs) ** 0.5 for n, r in group.items()}
    # so that no node, nor one that lies, rules all signs
    limit = OUTLIER * float(np.median([*lengths.values()]))
    outliers = {
        n for n, r in group.items() if lengths[n] > limit * max(1.0, (FEW / len(r.diffs)) ** 0.5)
    }
    inliers = {n: r for n, r in group.items() if n not in outliers}
    return [inliers, *({n: group[n]} for n in group if n in outliers)]
