"""Which strategies go together."""

from typing import Any

from flwr.serverapp.strategy import Strategy

from flwr_hetero._flwr import chooses_one_node, trains_trees
from flwr_hetero.errors import invalid

GRADIENT_ONLY = frozenset({"steps", "orders", "herding sketches"})
"""Decisions about gradient steps, of which boosted trees take none."""


def check_composition(wrapper: Any) -> None:
    """Refuse what a new outermost wrapper does not go with, by what the classes declare."""
    me, leaf = type(wrapper).__name__, wrapper.leaf
    for inner in wrapper.wrappers()[1:]:
        name = type(inner).__name__
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
                rule = f"work without rounds in one composition with {type(one).__name__}"
                raise invalid("strategy", type(other).__name__, rule, other.only_rounds)
    if trains_trees(leaf) and wrapper.decides & GRADIENT_ONLY:
        rule = f"train by gradient steps inside {me}"
        raise invalid("strategy", type(leaf).__name__, rule)
    if chooses_one_node(leaf) and "waiting" in wrapper.decides:
        raise invalid("strategy", type(leaf).__name__, f"ask several nodes at once inside {me}")
    for strategy in wrapper.chain():
        if not hasattr(strategy, "wrappers") and type(strategy).start is not Strategy.start:
            rule = "leave start to the wrapper"
            hint = (
                "give it another name and call the wrapper's start in it; "
                "what it does each round fits into evaluate_fn or aggregate_train"
            )
            raise invalid("strategy", f"{type(strategy).__name__}.start", rule, hint)
