"""A learning-rate schedule of torch that continues from message to message."""

from copy import deepcopy
from functools import partial
from typing import Any

HYPERPARAMETERS = ("lr", "momentum", "betas")
"""Entries of an optimizer's groups that torch's schedules change."""


class KeptSchedule:
    """A schedule of one message, and whether and how it continues in the next one.

    ``after_length``: whether the app had asked for ``len(loader)`` before it made the schedule.
    """

    def __init__(self, scheduler: Any, *, after_length: bool) -> None:
        self.scheduler = scheduler
        self.has_begun = False
        self._after_length = after_length
        self._continues = False
        # Whether the schedule is stepped in the loop over batches.
        self._in_loop = False
        self._last_count = count_of(scheduler)
        # Highest ratio of this job's rates to those of a constant schedule.
        self._peak = 0.0
        self._initial: list[dict[str, Any]] = []
        self._initial_groups: list[dict[str, Any]] = []

    def begin(self, kept: dict[str, Any], allotted: int) -> None:
        """Take up a state before the first step; ``allotted``: batches of this message."""
        self.has_begun = True
        self.skip_steps()
        # An app that continues its schedule itself has set its position.
        if self._last_count > 0:
            return
        longest = horizon(self.scheduler)
        if self._after_length and longest is not None and longest <= allotted:
            return
        self._continues = True
        parts = tree_of(self.scheduler)
        groups = self.scheduler.optimizer.param_groups
        self._initial = [_numbers_of(part) for part in parts]
        self._initial_groups = [{k: g[k] for k in HYPERPARAMETERS if k in g} for g in groups]
        self._peak = self._rate_ratio()
        if kept.get("kind") != type(self.scheduler).__qualname__:
            return
        if len(kept["parts"]) != len(parts) or len(kept["groups"]) != len(groups):
            return
        for part, changed in zip(parts, kept["parts"], strict=True):
            vars(part).update(deepcopy(changed))
        for group, initial, saved in zip(groups, self._initial_groups, kept["groups"], strict=True):
            group |= {key: value for key, value in saved.items() if key in initial}
            # The app may set another initial rate in this message.
            group["lr"] = group["initial_lr"] * saved["share"]
        self.skip_steps()
        self._peak = float(kept["peak"])

    def skip_steps(self) -> None:
        """Ignore the steps so far: those between two passes are steps after an epoch."""
        self._last_count = count_of(self.scheduler)

    def after_batch(self, *, job_is_over: bool) -> None:
        """Note whether the schedule was stepped; start over with the next job if rates fell."""
        count = count_of(self.scheduler)
        if count > self._last_count:
            self._in_loop = True
        self._last_count = count
        if not (self._continues and self._in_loop):
            return
        ratio = self._rate_ratio()
        self._peak = max(self._peak, ratio)
        total = getattr(self.scheduler, "total_steps", None)
        has_ended = isinstance(total, int) and count >= total
        if has_ended or (job_is_over and ratio < self._peak):
            for part, values in zip(tree_of(self.scheduler), self._initial, strict=True):
                vars(part).update(deepcopy(values))
            groups = self.scheduler.optimizer.param_groups
            for group, initial in zip(groups, self._initial_groups, strict=True):
                group |= initial
            self.skip_steps()
            self._peak = self._rate_ratio()

    def state(self) -> dict[str, Any]:
        """Return what the next message takes up; empty if the schedule starts over."""
        if not (self._continues and self._in_loop):
            return {}
        parts = []
        for part, initial in zip(tree_of(self.scheduler), self._initial, strict=True):
            numbers = _numbers_of(part)
            parts.append({k: v for k, v in numbers.items() if k not in initial or initial[k] != v})
        groups = []
        all_groups = self.scheduler.optimizer.param_groups
        for group, initial in zip(all_groups, self._initial_groups, strict=True):
            changed = {k: group[k] for k in initial if k != "lr" and group[k] != initial[k]}
            base = float(group["initial_lr"])
            changed["share"] = float(group["lr"]) / base if base else 1.0
            groups.append(changed)
        kind = type(self.scheduler).__qualname__
        return {"kind": kind, "parts": parts, "groups": groups, "peak": self._peak}

    def _rate_ratio(self) -> float:
        """Return the ratio of the rates to those of a constant schedule."""
        groups = self.scheduler.optimizer.param_groups
        rates = sum(float(group["lr"]) for group in groups)
        base = sum(float(group.get("initial_lr", group["lr"])) for group in groups)
        return rates / base if base else 1.0


def parts_of(scheduler: Any) -> list[Any]:
    """Return the schedules that a schedule is made of."""
    return list(getattr(scheduler, "_schedulers", ()))


def tree_of(scheduler: Any) -> list[Any]:
    """Return a schedule and all that it is made of, at any depth."""
    tree = [scheduler]
    for part in parts_of(scheduler):
        tree += tree_of(part)
    return tree


def count_of(scheduler: Any) -> int:
    """Return the number of steps of a schedule so far."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None:
        return max(map(count_of, parts_of(scheduler)), default=0)
    return int(count)


def horizon(scheduler: Any) -> int | None:
    """Return the largest number of steps that a schedule was made with; None if it shows none."""
    values: list[Any] = []
    for part in tree_of(scheduler):
        numbers = _numbers_of(part)
        values += [v for name, v in numbers.items() if name not in ("last_epoch", "_step_count")]
        for function in getattr(part, "lr_lambdas", ()):
            values += _values_in(function)
    return max(_whole_numbers(values), default=None)


def _values_in(function: Any) -> list[Any]:
    """Return the values that a function was made with."""
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values()]
    cells = getattr(function, "__closure__", None) or ()
    defaults = getattr(function, "__defaults__", None) or ()
    return [*(cell.cell_contents for cell in cells), *defaults, *vars(function).values()]


def _whole_numbers(values: list[Any]) -> list[int]:
    """Return the whole numbers among values, also those in lists."""
    numbers = []
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            numbers.append(value)
        elif isinstance(value, list | tuple | dict):
            numbers += _whole_numbers(list(value))
    return numbers


def _numbers_of(scheduler: Any) -> dict[str, Any]:
    """Return the plain numbers that a schedule holds, and its lists of them, by attribute."""
    numbers = {}
    for name, value in vars(scheduler).items():
        items = value if isinstance(value, list) else [value]
        if name != "base_lrs" and all(type(item) in (int, float) for item in items):
            numbers[name] = deepcopy(value)
    return numbers
