"""Torch objects that an app creates in each message, but that must continue from the last one.

A message asks for a slice of the node's job. The job is what the app would do in a round of FedAvg.
An app that creates its optimizer, schedule or loss scaler in each message means them to last for
the job. So each of them takes up the state that its predecessor had at the end of the last message:

- Optimizers (FedSlice only) and loss scalers continue for the whole run.
- A schedule that is stepped in the loop over batches continues. If it has lowered the rate, it
  starts over with the next job, as it does in FedAvg's next round. A warm-up is not repeated. A
  schedule that was made from ``len(loader)`` spans the message. One that is stepped after each
  epoch starts over in each message, because each message has all epochs.
"""

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from hashlib import sha256
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client import warn_once
from flwr_hetero.errors import invalid
from flwr_hetero.records import configs_in

# Flower sends a node's state in one message of at most 2 GiB.
MOST_BYTES = 1 << 30
MOST_OPTIMIZERS = 8  # a node keeps the states of those that stepped last
# Entries of an optimizer's groups that torch's schedules change.
HYPERPARAMETERS = ("lr", "momentum", "betas")
DONE = "done"  # entry of the kept record: batches of the present job in earlier messages


class Carried:
    """The torch objects of one message, and the states that they pass on to the next one.

    A message that asks for no steps is a whole job. In it only named objects continue.
    """

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], context: Context | None, *, trains: bool
    ) -> None:
        self._context = context
        self._is_slice = trains and any(keys.NUM_STEPS in config for config in configs)
        self._keeps_optimizers = self._is_slice and any(
            config.get(keys.KEEP_OPTIMIZER) is True for config in configs
        )
        self._kept: dict[str, Any] = {}
        if context is not None:
            self._kept.update(configs_in(context.state).get(keys.CARRIED, {}))
        self._done: int = self._kept.pop(DONE, 0)
        self._named: dict[str, Any] = {}
        self._schedules: list[KeptSchedule] = []
        # Optimizers that stepped, by the names under which their states are kept.
        self._optimizers: dict[str, Any] = {}
        # Optimizers that were made, and those that stepped, in this message.
        self.made: list[Any] = []
        self.stepped: list[Any] = []
        # Whether the app has asked for ``len(loader)``.
        self.length_asked = False

    def note(self, made: Any) -> None:
        """Note an object that the app has just made."""
        torch: Any = sys.modules["torch"]
        if isinstance(made, torch.optim.Optimizer):
            self.made.append(made)
        elif not self._is_slice:
            return
        elif isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            # A schedule made of others steps these itself.
            parts = parts_of(made)
            self._schedules = [s for s in self._schedules if s.scheduler not in parts]
            self._schedules.append(KeptSchedule(made, after_length=self.length_asked))
        else:
            scaler = torch.amp.GradScaler
            number = sum(isinstance(kept, scaler) for kept in self._named.values())
            self.keep(made, f"scaler {number}")

    def before_step(self, optimizer: Any, allotted: int) -> None:
        """Give an optimizer and new schedules their states before the optimizer's first step."""
        if any(optimizer is other for other in self.stepped):
            return
        self.stepped.append(optimizer)
        if self._keeps_optimizers:
            self._restore_optimizer(optimizer)
        self._begin_schedules(allotted)

    def begin_pass(self, allotted: int) -> None:
        """Note that a pass begins in a message of ``allotted`` batches."""
        self._begin_schedules(allotted)
        for schedule in self._schedules:
            # Steps since the last pass were taken between the two passes.
            schedule.skip_steps()

    def _begin_schedules(self, allotted: int) -> None:
        """Give new schedules the states of their predecessors."""
        for number, schedule in enumerate(self._schedules):
            if not schedule.has_begun:
                kept = self._kept.get(f"schedule {number}")
                schedule.begin(_unpacked(kept) if kept else {}, allotted)

    def after_batch(self, steps: int, job_steps: int | None) -> None:
        """Note that the app has trained on a batch, the last one of ``steps`` in this message."""
        is_over = job_steps is not None and (self._done + steps) % job_steps == 0
        for schedule in self._schedules:
            schedule.after_batch(job_is_over=is_over)

    def keep(self, kept: Any, name: str) -> None:
        """Let an object of the app continue, under a name."""
        if self._named.setdefault(name, kept) is not kept:
            raise invalid("name", name, "be another one for each object", "give it a name")
        self._restore(f"named {name}", kept)

    def save(self, steps: int, job_steps: int | None) -> None:
        """Keep all states for the next message; ``steps``: batches of this message."""
        done = self._done + steps
        states = {k: v for k, v in self._kept.items() if not k.startswith("optimizer ")}
        if self._is_slice:
            for number, schedule in enumerate(self._schedules):
                state = schedule.state()
                states[f"schedule {number}"] = _packed(state) if state else b""
        for name, kept in self._named.items():
            packed = _packed(kept.state_dict())
            try:
                _unpacked(packed)
            except UnpicklingError as error:
                rule = f"be of tensors, numbers, texts, lists and dicts, in the state of {name!r}"
                raise invalid("state_dict()", type(kept).__name__, rule) from error
            states[f"named {name}"] = packed
        optimizers = {k: v for k, v in self._kept.items() if k.startswith("optimizer ")}
        for name, optimizer in self._optimizers.items():
            # The newest state is the last one.
            optimizers.pop(name, None)
            optimizers[name] = _optimizer_state(optimizer)
        optimizers = dict(list(optimizers.items())[-MOST_OPTIMIZERS:])
        size = sum(len(state) for state in [*optimizers.values(), *states.values()])
        if size > MOST_BYTES:
            text = f"optimizers start over in each message: {size / 1e9:.1f} GB are too much"
            warn_once(text, topic="size")
            optimizers = {}
        entries = {name: state for name, state in (states | optimizers).items() if state}
        assert self._context is not None
        if entries:
            entries[DONE] = done % job_steps if job_steps else done
            self._context.state[keys.CARRIED] = ConfigRecord(entries)
        elif keys.CARRIED in self._context.state:
            del self._context.state[keys.CARRIED]

    def _restore(self, name: str, target: Any) -> None:
        """Give an object the state that is kept under a name, if it fits."""
        kept = self._kept.get(name)
        if not kept:
            return
        try:
            target.load_state_dict(_unpacked(kept))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            text = f"{type(target).__name__} starts over, as its kept state does not fit: {error}"
            warn_once(text, topic=name)

    def _restore_optimizer(self, optimizer: Any) -> None:
        """Give an optimizer the state of one of the same kind for the same parameters."""
        # These settings decide which entries a state has.
        switches = set()
        shapes = []
        for group in optimizer.param_groups:
            shapes += [list(param.shape) for param in group["params"]]
            for key, value in group.items():
                if key != "params" and (value is True or (key == "momentum" and value)):
                    switches.add(key)
        kind = "optimizer " + "-".join([type(optimizer).__qualname__, *sorted(switches)]) + " "
        prefix = kind + sha256(str(shapes).encode()).hexdigest()[:16] + " "
        name = prefix + str(sum(other.startswith(prefix) for other in self._optimizers))
        self._optimizers[name] = optimizer
        kept = self._kept.get(name)
        if not kept:
            if any(other.startswith(kind) for other in self._kept):
                warn_once("an optimizer is of another model than before: it starts over")
            return
        # An optimizer that the app itself continues has a state. Some optimizers make one before
        # their first step.
        if any(entries and entries.get("step") != 0 for entries in optimizer.state.values()):
            return
        # Rates and the like stay those of the new optimizer.
        new_groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": _unpacked(kept), "param_groups": new_groups})


def _optimizer_state(optimizer: Any) -> bytes:
    """Return an optimizer's state; empty if it has a NaN, from which no node would recover."""
    torch: Any = sys.modules["torch"]
    state = optimizer.state_dict()["state"]
    values = [value for entries in state.values() for value in entries.values()]
    if not all(bool(value.isfinite().all()) for value in values if torch.is_tensor(value)):
        return b""
    return _packed(state)


def _packed(state: Any) -> bytes:
    """Write a state as torch does."""
    torch: Any = sys.modules["torch"]
    buffer = BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(kept: bytes) -> Any:
    """Read a state; torch reads nothing but tensors and plain values."""
    torch: Any = sys.modules["torch"]
    return torch.load(BytesIO(kept), map_location="cpu", weights_only=True)


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
