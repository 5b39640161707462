"""What goes on from message to message, although the app creates it in each, where torch allows it.

A message asks for a slice of the node's job. The job is what the app would do in a round of FedAvg.
An app that creates its optimizer, schedule or loss scaler in each message means them to last for
the job. So each of them takes up the state that its predecessor had at the end of the last message:

- Optimizers (FedSlice only) and loss scalers go on for the whole run.
- A schedule that is stepped in the loop over batches goes on. If it has lowered the rate, it starts
  over with the next job, as it does in FedAvg's next round. A warm-up is not repeated. A schedule
  that was made from ``len(loader)`` spans the message. One that is stepped after each epoch starts
  over in each message, because each message has all epochs.
- Averages of models (``AveragedModel``) go on until the job is over.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from hashlib import sha256
from io import BytesIO
from threading import Lock
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from flwr_hetero import keys
from flwr_hetero.client.handler import current_handler, say_once
from flwr_hetero.client.schedule import KeptSchedule, parts_of
from flwr_hetero.errors import invalid
from flwr_hetero.records import configs_in

# Flower gives an app's process its node's state in one message, of 2 GiB at most.
MOST_BYTES = 1 << 30
MOST_OPTIMIZERS = 8
"""Optimizers whose states a node keeps: those that stepped last."""
DONE = "done"
"""Entry of the kept record: batches of the present job in earlier messages."""


class Carried:
    """The torch objects of one message, and the states that they hand on to the next one.

    Where a message asks for no steps it is a whole job, and only what is named goes on.
    """

    def __init__(self, message: Message, context: Context, *, trains: bool) -> None:
        configs = configs_in(message.content).values() if message.has_content() else ()
        self._context = context
        self._goes_on = trains and any(keys.NUM_STEPS in config for config in configs)
        self._keeps = self._goes_on and any(c.get(keys.KEEP_OPTIMIZER) is True for c in configs)
        self._kept: dict[str, Any] = dict(configs_in(context.state).get(keys.CARRIED, {}))
        done: Any = self._kept.pop(DONE, 0)
        self._done: int = done
        self._named: dict[str, Any] = {}
        self._scalers: list[Any] = []
        self._averages: list[Any] = []
        self._restored: list[tuple[str, Any]] = []
        self.schedules: list[KeptSchedule] = []
        # Optimizers that were made in this message, and those that stepped in it.
        self.made: list[Any] = []
        self.stepped: list[Any] = []

    # --- what torch tells ----------------------------------------------------------------
    def note(self, made: Any) -> None:
        """Note an object that the app has just made."""
        torch: Any = sys.modules["torch"]
        if isinstance(made, torch.optim.Optimizer):
            self.made.append(made)
        elif not self._goes_on:
            return
        elif isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            # A schedule made of others steps these itself.
            inner = parts_of(made)
            self.schedules = [s for s in self.schedules if s.scheduler not in inner]
            work: Any = getattr(current_handler(), "work", None)
            self.schedules.append(KeptSchedule(made, work is not None and work.length_asked))
        elif isinstance(made, torch.amp.GradScaler):
            self._restore(f"scaler {len(self._scalers)}", made)
            self._scalers.append(made)
        else:
            self._restore(f"average {len(self._averages)}", made)
            self._averages.append(made)

    def before_step(self, optimizer: Any) -> None:
        """Give an optimizer, and its schedules, their states before its first step."""
        if any(optimizer is each for each in self.stepped):
            return
        self.stepped.append(optimizer)
        if self._keeps:
            self._restore_optimizer(optimizer)
        work: Any = getattr(current_handler(), "work", None)
        self._begin_schedules(work.allotted if work is not None else 0)

    def begin_pass(self, allotted: int) -> None:
        """Note that a pass begins in a message of so many batches."""
        self._begin_schedules(allotted)
        for schedule in self.schedules:
            # What was stepped since the last pass was stepped between the two.
            schedule.pass_begins()

    def _begin_schedules(self, allotted: int) -> None:
        """Let schedules that are new take up the states of their predecessors."""
        for number, schedule in enumerate(self.schedules):
            if not schedule.has_begun:
                kept = self._kept.get(f"schedule {number}")
                schedule.begin(_unpacked(kept) if kept else {}, allotted)

    def after_batch(self, steps: int, job_steps: int | None) -> None:
        """Note that a batch was trained on: the last one of ``steps`` in this message."""
        is_over = job_steps is not None and (self._done + steps) % job_steps == 0
        for schedule in self.schedules:
            schedule.after_batch(job_is_over=is_over)

    # --- from message to message -----------------------------------------------------------
    def keep(self, kept: Any, name: str) -> None:
        """Let an object of the app's go on, under a name."""
        known = self._named.setdefault(name, kept)
        if known is not kept:
            raise invalid("name", name, "be another one for each object", "give it a name")
        self._restore(f"named {name}", kept)

    def save(self, steps: int, job_steps: int | None) -> None:
        """Keep the states of everything that goes on; ``steps``: batches of this message."""
        is_over = job_steps is not None and self._done + steps >= job_steps
        optimizers = {k: v for k, v in self._kept.items() if k.startswith("optimizer ")}
        found = {k: v for k, v in self._kept.items() if k not in optimizers}
        if self._goes_on:
            for number, scaler in enumerate(self._scalers):
                # One that is switched off has none.
                state = scaler.state_dict()
                found[f"scaler {number}"] = _packed(state) if state else b""
            for number, average in enumerate(self._averages):
                found[f"average {number}"] = b"" if is_over else _packed(average.state_dict())
            for number, schedule in enumerate(self.schedules):
                state = schedule.state()
                found[f"schedule {number}"] = _packed(state) if state else b""
        for name, kept in self._named.items():
            found[f"named {name}"] = _packed(_checked(kept.state_dict(), name))
        for name, optimizer in self._restored:
            # The newest is the last one.
            optimizers.pop(name, None)
            optimizers[name] = _saved(optimizer)
        optimizers = dict([*optimizers.items()][-MOST_OPTIMIZERS:])
        if (size := sum(map(len, [*optimizers.values(), *found.values()]))) > MOST_BYTES:
            say_once(
                f"optimizers start over in each message: {size / 1e9:.1f} GB are too much", "size"
            )
            optimizers = {}
        entries = {name: state for name, state in (found | optimizers).items() if state}
        if entries:
            done = (self._done + steps) % job_steps if job_steps else self._done + steps
            self._context.state[keys.CARRIED] = ConfigRecord({**entries, DONE: done})
        elif keys.CARRIED in self._context.state:
            del self._context.state[keys.CARRIED]

    def _restore(self, name: str, target: Any) -> None:
        """Give an object the state that is kept under a name, if it fits."""
        if not (kept := self._kept.get(name)):
            return
        try:
            target.load_state_dict(_unpacked(kept))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            text = f"{type(target).__name__} starts over, as its kept state does not fit: {error}"
            say_once(text, about=name)

    def _restore_optimizer(self, optimizer: Any) -> None:
        """Give an optimizer the state of one of the same kind for the same parameters."""
        kind, shapes = _kind(optimizer), _shapes(optimizer)
        digest = sha256(str(shapes).encode()).hexdigest()[:16]
        alike = f"optimizer {kind} {digest} "
        name = alike + str(sum(known.startswith(alike) for known, _ in self._restored))
        self._restored.append((name, optimizer))
        kept = self._kept.get(name)
        if not kept:
            if any(known.startswith(f"optimizer {kind} ") for known in self._kept):
                say_once("an optimizer is of another model than before: it starts over")
            return
        # One that the app itself carries on has a state; some make one before their first step.
        if any(own and own.get("step") != 0 for own in optimizer.state.values()):
            return
        # Rates and the like stay those of the new one.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": _unpacked(kept), "param_groups": groups})


def _kind(optimizer: Any) -> str:
    """Return what decides which entries the state of an optimizer has."""
    switches = set()
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and (value is True or (key == "momentum" and value)):
                switches.add(key)
    return "-".join([type(optimizer).__qualname__, *sorted(switches)])


def _shapes(optimizer: Any) -> list[list[int]]:
    return [list(param.shape) for group in optimizer.param_groups for param in group["params"]]


def _saved(optimizer: Any) -> bytes:
    """Return an optimizer's state; empty if it has a NaN, with which no node would recover."""
    torch: Any = sys.modules["torch"]
    state = optimizer.state_dict()["state"]
    values = (value for entries in state.values() for value in entries.values())
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
    """Read a state; nothing but tensors and plain values is read."""
    torch: Any = sys.modules["torch"]
    return torch.load(BytesIO(kept), map_location="cpu", weights_only=True)


def _checked(state: Any, name: str) -> Any:
    """Return a state if it can be kept; ValueError names what cannot."""
    torch: Any = sys.modules["torch"]
    plain = (torch.Tensor, int, float, str, bytes, type(None))
    parts = [state]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set):
            parts += part
        elif not isinstance(part, plain):
            rule = f"be of tensors, numbers, texts, lists and dicts, in the state of {name!r}"
            raise invalid("state_dict()", type(part).__name__, rule)
    return state


# --- torch's part ------------------------------------------------------------------------
_lock = Lock()
_watching: list[ExitStack] = []
_watchers = 0


@contextmanager
def watching() -> Iterator[None]:
    """Let torch tell what is made and stepped, as long as a message is being answered.

    Torch has no hook for what is made, so that constructors are replaced meanwhile.
    """
    global _watchers
    with _lock:
        _watchers += 1
    try:
        watch_torch()
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers and _watching:
                _watching.pop().close()


def watch_torch() -> None:
    """Begin to watch, if torch is loaded by now and nobody does so yet."""
    torch: Any = sys.modules.get("torch")
    # A module that is still being imported lacks some of its parts.
    if torch is None or not hasattr(torch, "optim") or not hasattr(torch, "amp"):
        return
    with _lock:
        if _watching or not _watchers:
            return
        schedules: Any = torch.optim.lr_scheduler
        watched = [torch.optim.Optimizer, schedules.LRScheduler, torch.amp.GradScaler]
        # These do not call the constructor of their parent.
        watched += [schedules.SequentialLR, schedules.ChainedScheduler]
        watched += [torch.optim.swa_utils.AveragedModel]
        stack = ExitStack()
        for kind in watched:
            stack.callback(setattr, kind, "__init__", kind.__init__)
            kind.__init__ = _noted(kind.__init__)
        optim: Any = sys.modules["torch.optim.optimizer"]
        stack.callback(optim.register_optimizer_step_pre_hook(_before_step).remove)
        _watching.append(stack)


def _noted(make: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that tells the message that is being answered."""

    @wraps(make)
    def init(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        carried: Any = getattr(current_handler(), "carried", None)
        if carried is not None:
            carried.note(self)

    return init


def _before_step(optimizer: Any, _args: object, _kwargs: object) -> None:
    """Tell the message that is being answered; torch calls this before each step."""
    handler = current_handler()
    if handler is None or handler.carried is None:
        return
    handler.carried.before_step(optimizer)
    if handler.work is not None:
        handler.work.optimizer_steps(optimizer)
