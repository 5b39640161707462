"""What goes with what: strategies with each other, and a strategy with how it is started."""

from collections.abc import Callable
from itertools import count as counter
from itertools import pairwise
from typing import Any

from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import chooses_one_node, clips_on_nodes, trains_trees, updates_needed
from flwr_hetero.errors import invalid

GRADIENT_ONLY = frozenset({"steps", "orders", "herding sketches"})
"""Decisions about gradient steps, of which boosted trees take none."""


def name_of(strategy: Strategy) -> str:
    """Return what users know a strategy by."""
    return getattr(strategy, "called", "") or type(strategy).__name__


def check_composition(wrapper: Any) -> None:
    """Refuse what a new outermost wrapper does not go with, by what the classes declare."""
    me = name_of(wrapper)
    leaf = wrapper.leaf
    parts = getattr(wrapper, "parts", ())
    for inner in (each for each in wrapper.wrappers()[1:] if each not in parts):
        name = name_of(inner)
        if both := wrapper.decides & inner.decides:
            rule = f"leave {' and '.join(sorted(both))} to {me}"
            raise invalid("strategy", name, rule, "use one of the two")
        early = inner.outside_of & wrapper.decides
        if early or inner.outermost:
            others = f"the wrapper that decides on {' and '.join(sorted(early))}"
            rule = f"not be {name}, whose place is outside {others if early else 'all others'}"
            raise invalid("strategy", name, rule, f"write {name}({me}(...))")
        for one, other in ((wrapper, inner), (inner, wrapper)):
            if "loop" in one.decides and other.only_rounds:
                rule = f"work without rounds in one composition with {name_of(one)}"
                raise invalid("strategy", name_of(other), rule, other.only_rounds)
    if trains_trees(leaf) and wrapper.decides & GRADIENT_ONLY:
        raise invalid("strategy", type(leaf).__name__, f"train by gradient steps inside {me}")
    if chooses_one_node(leaf) and "waiting" in wrapper.decides:
        raise invalid("strategy", type(leaf).__name__, f"ask several nodes at once inside {me}")
    for outside, strategy in pairwise(wrapper.chain()):
        name = name_of(strategy)
        other = type(outside).__name__
        if not hasattr(strategy, "wrappers"):
            if type(strategy).start is not Strategy.start:
                hint = "what it does each round fits into evaluate_fn or aggregate_train"
                raise invalid("strategy", f"{name}.start", "leave start to the wrapper", hint)
        # It would not pass on the context of hooks.
        elif not hasattr(outside, "wrappers"):
            raise invalid("strategy", name, f"not be inside {other}", f"write {name}({other}(...))")


def check_enough_updates(
    leaf: Strategy,
    count: int | None,
    argument: str,
    updates_of: Callable[[int], int] = int,
    hint: str = "",
) -> None:
    """Refuse fewer updates at a time than a strategy needs that distrusts some; None: unknown."""
    if count is not None and updates_of(count) < (need := updates_needed(leaf)):
        kind = type(leaf).__name__
        hostile = getattr(leaf, "num_malicious_nodes", 0)
        least = next(each for each in counter(count) if updates_of(each) >= need)
        rule = f"be at least {least} around {kind} with num_malicious_nodes={hostile}"
        why = f"{kind} cannot choose among fewer than {need} updates{hint.format(need)}"
        raise invalid(argument, count, rule, why)


def check_first_update(wrapper: Any, count: int, nodes: int) -> None:
    """Refuse a first server update of too few, by what can be changed; ``nodes``: online."""
    leaf: Any = wrapper.leaf
    if count >= updates_needed(leaf):
        return
    for each in wrapper.wrappers():
        if hasattr(each, "check_nodes"):
            each.check_nodes(nodes)
    is_ours = any("selection" in each.decides for each in wrapper.wrappers())
    if count < nodes and not is_ours:
        name = f"{type(leaf).__name__}.min_train_nodes"
        check_enough_updates(leaf, leaf.min_train_nodes, name)
    check_enough_updates(leaf, count, "the number of nodes that train", hint=": start more nodes")


def check_unscaled(wrapper: Any, setting: str, value: Any) -> None:
    """Refuse to scale updates that nodes have clipped: the noise would be too small for them."""
    for strategy in wrapper.chain():
        if clips_on_nodes(strategy):
            rule = f"leave updates as they are around {type(strategy).__name__}"
            raise invalid(setting, value, rule, "weights by examples do, or clipping on the server")
