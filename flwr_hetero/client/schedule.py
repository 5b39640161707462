"""A learning-rate schedule of torch's that goes on from message to message."""

from copy import deepcopy
from functools import partial
from typing import Any

HYPERPARAMETERS = ("lr", "momentum", "betas")
"""Entries of an optimizer's groups that schedules of torch's change."""


class KeptSchedule:
    """A schedule of one message, and whether and how it goes on in the next one.

    ``after_length``: whether the app had asked for ``len(loader)`` before it made the schedule.
    """

    def __init__(self, scheduler: Any, after_length: bool) -> None:
        self.scheduler, self._after_length = scheduler, after_length
        self.has_begun = self._goes_on = self._in_loop = False
        self._seen = count_of(scheduler)
        self._peak = 0.0
        self._initial: list[dict[str, Any]] = []
        self._initial_groups: list[dict[str, Any]] = []

    def begin(self, kept: dict[str, Any], allotted: int) -> None:
        """Take up a state before the first step; ``allotted``: batches of this message."""
        self.has_begun = True
        self._seen = count_of(self.scheduler)
        # An app that carries its schedule on has told it where it is.
        if self._seen > 0:
            return
        longest = horizon(self.scheduler)
        if self._after_length and longest is not None and longest <= allotted:
            return
        self._goes_on = True
        self._initial = [_values(part) for part in tree_of(self.scheduler)]
        groups = self.scheduler.optimizer.param_groups
        self._initial_groups = [{k: g[k] for k in HYPERPARAMETERS if k in g} for g in groups]
        if kept.get("kind") != type(self.scheduler).__qualname__:
            return
        if [len(kept["parts"]), len(kept["groups"])] != [len(self._initial), len(groups)]:
            return
        for part, changed in zip(tree_of(self.scheduler), kept["parts"], strict=True):
            vars(part).update(deepcopy(changed))
        for group, initial, known in zip(groups, self._initial_groups, kept["groups"], strict=True):
            group |= {key: value for key, value in known.items() if key in initial}
            # The rate that it is a share of may be another one in this message.
            group["lr"] = group["initial_lr"] * known["share"]
        self._seen, self._peak = count_of(self.scheduler), float(kept["peak"])

    def pass_begins(self) -> None:
        """Leave out steps that were taken between two passes, as after an epoch."""
        self._seen = count_of(self.scheduler)

    def after_batch(self, *, job_is_over: bool) -> None:
        """Note whether the schedule was stepped; start over with the next job if rates fell."""
        count = count_of(self.scheduler)
        self._in_loop |= count > self._seen
        self._seen = count
        if not (self._goes_on and self._in_loop):
            return
        share = self._share()
        self._peak = max(self._peak, share)
        total = getattr(self.scheduler, "total_steps", None)
        has_ended = isinstance(total, int) and count >= total
        if has_ended or (job_is_over and share < self._peak):
            for part, values in zip(tree_of(self.scheduler), self._initial, strict=True):
                vars(part).update(deepcopy(values))
            groups = self.scheduler.optimizer.param_groups
            for group, initial in zip(groups, self._initial_groups, strict=True):
                group |= initial
            self._seen, self._peak = count_of(self.scheduler), 0.0

    def state(self) -> dict[str, Any]:
        """Return what the next message takes up; empty if the schedule starts over."""
        if not (self._goes_on and self._in_loop):
            return {}
        parts = []
        for part, initial in zip(tree_of(self.scheduler), self._initial, strict=True):
            now = _values(part)
            parts.append({k: v for k, v in now.items() if k not in initial or initial[k] != v})
        groups = []
        for group, initial in zip(
            self.scheduler.optimizer.param_groups, self._initial_groups, strict=True
        ):
            changed = {k: group[k] for k in initial if k != "lr" and group[k] != initial[k]}
            base = float(group["initial_lr"])
            groups.append({**changed, "share": float(group["lr"]) / base if base else 1.0})
        kind = type(self.scheduler).__qualname__
        return {"kind": kind, "parts": parts, "groups": groups, "peak": self._peak}

    def _share(self) -> float:
        """Return the rates, in those that a constant schedule would have."""
        groups = self.scheduler.optimizer.param_groups
        rates = sum(float(group["lr"]) for group in groups)
        base = sum(float(group.get("initial_lr", group["lr"])) for group in groups)
        return rates / base if base else 1.0


def parts_of(scheduler: Any) -> list[Any]:
    """Return the schedules that a schedule is made of."""
    return list(getattr(scheduler, "_schedulers", ()))


def tree_of(scheduler: Any) -> list[Any]:
    """Return a schedule and all that it is made of."""
    return [scheduler, *(each for part in parts_of(scheduler) for each in tree_of(part))]


def count_of(scheduler: Any) -> int:
    """Return the steps of a schedule so far."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None:
        return max(map(count_of, parts_of(scheduler)), default=0)
    return int(count)


def horizon(scheduler: Any) -> int | None:
    """Return the largest number of steps that a schedule was made with; None if it shows none."""
    found: list[int] = []
    for part in tree_of(scheduler):
        values = _values(part)
        for name in ("last_epoch", "_step_count"):
            values.pop(name, None)
        found += _whole_numbers(list(values.values()))
        for function in getattr(part, "lr_lambdas", ()):
            found += _whole_numbers(_bound(function))
    return max(found, default=None)


def _bound(function: Any) -> list[Any]:
    """Return the values that a function was made with."""
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values()]
    cells = getattr(function, "__closure__", None) or ()
    defaults = getattr(function, "__defaults__", None) or ()
    return [*(cell.cell_contents for cell in cells), *defaults, *vars(function).values()]


def _whole_numbers(values: list[Any]) -> list[int]:
    found = []
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += _whole_numbers(list(value))
    return found


def _values(scheduler: Any) -> dict[str, Any]:
    """Return the plain numbers that a schedule holds, and its lists of them."""
    found = {}
    for name, value in vars(scheduler).items():
        items = value if isinstance(value, list) else [value]
        if name != "base_lrs" and all(type(item) in (int, float) for item in items):
            found[name] = deepcopy(value)
    return found
