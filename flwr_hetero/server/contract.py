"""What goes together: strategies with each other, and a strategy with what its nodes reply."""

from collections.abc import Mapping, Sequence
from logging import WARNING
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero._flwr import (
    chooses_one_node,
    clips_on_nodes,
    log,
    trains_trees,
    updates_needed,
)
from flwr_hetero.errors import check_choice, check_count, check_number, invalid
from flwr_hetero.records import read_number
from flwr_hetero.server.node_half.hints import MOD_LINES, step_lines

ON_MISSING = ("raise", "warn")
MAX_NAMES = 10
"""Nodes that a warning names."""


class Contract(NamedTuple):
    """What a reply must hold: a metric or a record of this name; its meaning; lines to add.

    ``without`` says what becomes of nodes that leave it out while others do not, ``way_out`` what
    else can be done. Without ``lines`` they are those for steps, in the framework at hand.
    """

    key: str
    meaning: str
    lines: str
    without: str
    way_out: str = 'pass on_missing="warn" to'


STEPS = Contract(keys.NUM_STEPS, "steps that the node took", "", "which count least")
"""What nodes must do for any wrapper that decides the steps."""
TIMES = Contract(
    keys.TIMING,
    "how long the node took",
    MOD_LINES,
    "which are taken for equally fast",
    "set num_tiers=1 of",
)
"""What nodes must do in a simulation, where the server's clock sees the wait for a worker."""


USUAL_KEY = "train-loss"


def loss_contract(key: str | None, without: str) -> Contract:
    """Make the contract of a method that goes by the loss in this metric, or in any."""
    name = key or USUAL_KEY
    line = f'    metrics = MetricRecord({{"num-examples": ..., "{name}": loss}})'
    return Contract(name, "training loss", line, without)


def training_loss(metrics: Mapping[str, Any], key: str | None = None) -> float:
    """Return a node's mean training loss; NaN if it reports none.

    Without a key it is the first metric with "loss" in its name, those with "train" before others.
    """
    found = sorted(metrics, key=lambda name: ("train" not in name, name))
    names = [key] if key else [n for n in found if "loss" in n and n != keys.LOSS_RMS]
    return read_number(metrics, names[0]) if names else nan


def loss_per_sample(metrics: Mapping[str, Any], key: str | None = None) -> float:
    """Return the root mean square of a node's losses per sample, else its mean loss; or NaN."""
    square = read_number(metrics, keys.LOSS_RMS) if key is None else nan
    return square if isfinite(square) else training_loss(metrics, key)


class MissingHelpError(RuntimeError):
    """No node does its part of a method, which would have no effect or do harm."""


def check_on_missing(on_missing: str) -> str:
    """Refuse what is no way to treat missing help."""
    return str(check_choice("on_missing", on_missing, ON_MISSING))


def holds(reply: Message, key: str) -> bool:
    """Return whether a reply has a record or a metric of a name."""
    records = reply.content.metric_records.values()
    return key in reply.content or any(key in record for record in records)


def has_mod(reply: Message) -> bool:
    """Return whether a mod of ours measured a reply; emulated times are also a LocalGrid's."""
    record = reply.content.config_records.get(keys.TIMING)
    return record is not None and record.get(keys.EMULATED) is False


class HelpCheck:
    """Find out once whether the nodes keep a contract.

    One node that does shows that the app can. That none does is believed of as many nodes as
    are enough to be no fault of theirs, in one round or over several.
    """

    def __init__(self, wrapper: Any, contract: Contract) -> None:
        self.owner, self.on_missing = name_of(wrapper), wrapper.on_missing
        self.contract = contract
        self.silent: dict[int, str] = {}
        self.done = False

    def see(
        self,
        silent: Mapping[int, str],
        num_helping: int,
        enough: int,
        replies: Sequence[Message] = (),
    ) -> None:
        """Raise or warn, once that is clear; ``silent`` are names of nodes without it, by id."""
        self.silent |= silent
        self.done = num_helping > 0 or len(self.silent) >= enough
        if not (self.done and self.silent):
            return
        key, meaning, lines, without, way_out = self.contract
        lines = lines or step_lines(has_mod=any(map(has_mod, replies)))
        if num_helping:
            names = list(self.silent.values())
            log(
                WARNING,
                "%s: no %r (%s) from %d of %d nodes, %s: %s. Lines for the node:\n%s",
                *(self.owner, key, meaning, len(names), len(names) + num_helping, without),
                ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else ""),
                lines,
            )
            return
        text = (
            f"{self.owner}: no node reports {key!r} ({meaning}), so {self.owner} has no "
            f"effect. Add to the ClientApp:\n{lines}\n"
        )
        if self.on_missing == "raise":
            raise MissingHelpError(f"{text}or {way_out} {self.owner}.")
        log(WARNING, text)


def check_help(wrapper: Any, context: Any, replies: Sequence[Message]) -> None:
    """Check in the first round with enough replies that nodes do their part."""
    for contract in wrapper.contracts:
        check = wrapper._help.setdefault(contract.key, HelpCheck(wrapper, contract))
        if not check.done:
            found = {r.metadata.src_node_id: wrapper.helps(context, r, contract) for r in replies}
            silent = {n: context.identity(n) for n, helps in found.items() if helps is False}
            check.see(silent, sum(map(bool, found.values())), context.quorum, replies)


# --- strategies with each other ----------------------------------------------------------------

GRADIENT_ONLY = frozenset({"steps", "orders", "herding sketches"})
"""Decisions about gradient steps, of which boosted trees take none."""


def name_of(strategy: Strategy) -> str:
    """Return what users know a strategy by."""
    return getattr(strategy, "called", "") or type(strategy).__name__


def check_composition(wrapper: Any) -> None:
    """Refuse what a new outermost wrapper does not go with, by what the classes declare."""
    me, leaf = name_of(wrapper), wrapper.leaf
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
        if inner.outer is None and inner is not wrapper.inner and _has_loop(inner):
            rule = f"not be {name} inside a strategy of Flower's, which works in rounds"
            raise invalid("strategy", name, rule, "write it the other way round")
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


def check_enough_updates(leaf: Strategy, count: int | None, argument: str) -> None:
    """Refuse fewer updates at a time than a strategy needs that distrusts some; None: unknown."""
    if count is not None and count < (need := updates_needed(leaf)):
        kind, hostile = type(leaf).__name__, getattr(leaf, "num_malicious_nodes", 0)
        rule = f"be at least {need} around {kind} with num_malicious_nodes={hostile}"
        raise invalid(argument, count, rule, f"{kind} cannot choose among fewer updates")


def check_run(run: Any) -> None:
    """Refuse arguments of ``start`` of another type, as the older API and other libraries have."""
    check_count("num_rounds", run.num_rounds)
    if run.timeout_s != inf:
        check_number("timeout", run.timeout_s, "(0, inf)", "or None, for no limit")
    if not hasattr(run.grid, "push_messages"):
        raise invalid("grid", type(run.grid).__name__, "be the Grid that the ServerApp is given")
    if not isinstance(run.arrays, ArrayRecord):
        hint = "ArrayRecord(model.state_dict()), or ArrayRecord([...]) of NumPy arrays"
        raise invalid("initial_arrays", type(run.arrays).__name__, "be an ArrayRecord", hint)
    if not run.arrays:
        raise invalid("initial_arrays", run.arrays, "hold an array")
    for name in ("train_config", "evaluate_config"):
        if not isinstance(config := getattr(run, name), ConfigRecord):
            hint = "ConfigRecord({...}), the same for all rounds"
            raise invalid(name, type(config).__name__, "be a ConfigRecord", hint)
    if run.evaluate_fn is not None and not callable(run.evaluate_fn):
        rule = "be a function of the round and the arrays"
        raise invalid("evaluate_fn", run.evaluate_fn, rule)


def check_start(wrapper: Any) -> None:
    """Say what a run lacks that a strategy of Flower's around a wrapper has started."""
    if wrapper.fleet.started:
        return
    wrapper.fleet.started = True
    name = type(wrapper).__name__
    if _has_loop(wrapper):
        text = "works without rounds, but a strategy of Flower's around it has started rounds"
        raise RuntimeError(f"{name} {text}: put that strategy into {name}.")
    text = (
        "%s: a strategy of Flower's around it has started the run, so that nothing is recorded, "
        "averaged or ended early, and only the mod `timing` tells how long nodes take; "
        "put a Wrapper around it: strategy = Wrapper(strategy)"
    )
    log(WARNING, text, name)


def _has_loop(wrapper: Any) -> bool:
    return any("loop" in each.decides for each in wrapper.wrappers())


def check_unscaled(wrapper: Any, setting: str, value: Any) -> None:
    """Refuse to scale updates that nodes have clipped: the noise would be too small for them."""
    for strategy in wrapper.chain():
        if clips_on_nodes(strategy):
            rule = f"leave updates as they are around {type(strategy).__name__}"
            hint = "weights by examples do, or clipping on the server"
            raise invalid(setting, value, rule, hint)
