"""Torch objects that an app creates in each message, but that must continue from the last one.

A message asks for a slice of the node's job. The job is what the app would do in a round of FedAvg.
An app that creates its optimizer, schedule or loss scaler in each message means them to last for
the job. So each of them takes up the state that its predecessor had at the end of the last message:

- Optimizers (FedSlice only) and loss scalers continue for the whole run.
- A schedule that is stepped in the loop over batches continues. If it has lowered the rate, it
  starts over with the next job, as it does in FedAvg's next round. A warm-up is not repeated. A
  schedule that was made from ``len(loader)`` spans the message. One that is stepped after each
  epoch starts over in each message, because each message has all epochs.
- Averages of models (``AveragedModel``) continue until the job is over.
"""

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client import warn_once
from flwr_hetero.client.schedule import KeptSchedule, parts_of
from flwr_hetero.errors import invalid
from flwr_hetero.records import configs_in

# Flower sends a node's state in one message of at most 2 GiB.
MOST_BYTES = 1 << 30
MOST_OPTIMIZERS = 8  # a node keeps the states of those that stepped last
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
        self._scalers: list[Any] = []
        self._averages: list[Any] = []
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
        elif isinstance(made, torch.amp.GradScaler):
            self._restore(f"scaler {len(self._scalers)}", made)
            self._scalers.append(made)
        else:
            self._restore(f"average {len(self._averages)}", made)
            self._averages.append(made)

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
            job_is_over = job_steps is not None and done >= job_steps
            for number, scaler in enumerate(self._scalers):
                # A scaler that is switched off has no state.
                state = scaler.state_dict()
                states[f"scaler {number}"] = _packed(state) if state else b""
            for number, average in enumerate(self._averages):
                states[f"average {number}"] = b"" if job_is_over else _packed(average.state_dict())
            for number, schedule in enumerate(self._schedules):
                state = schedule.state()
                states[f"schedule {number}"] = _packed(state) if state else b""
        for name, kept in self._named.items():
            state = kept.state_dict()
            _check_plain(state, name)
            states[f"named {name}"] = _packed(state)
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


def _check_plain(state: Any, name: str) -> None:
    """Raise ValueError if a state holds anything that :func:`_unpacked` does not read."""
    torch: Any = sys.modules["torch"]
    parts = [state]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set):
            parts += part
        elif not isinstance(part, (torch.Tensor, int, float, str, bytes, type(None))):
            rule = f"be of tensors, numbers, texts, lists and dicts, in the state of {name!r}"
            raise invalid("state_dict()", type(part).__name__, rule)
