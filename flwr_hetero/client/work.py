"""What goes on from message to message: steps, the place in the pass, torch's optimizers."""

import sys
import time
from functools import cache
from io import BytesIO
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client.data_pass import Passes, Place
from flwr_hetero.client.handler import current_handler, say_once
from flwr_hetero.records import configs_in

LOCAL_EPOCHS = "local-epochs"
"""Key of the run-config in Flower's own examples; only until the app has passed over its data."""
PLACE = "place"  # in the node's state: where it is in its pass over the data
# Flower gives an app's process its node's state in one message, of 2 GiB at most
MOST_BYTES = 1 << 30


class Work:
    """Count the steps of a message; all loaders of a message share one."""

    def __init__(self, context: Context | None = None, message: Any = None) -> None:
        # passes that share the message's steps
        self.context, self.planned = context, 1
        self.optimizers: KeptOptimizers | None = None
        self.place: Place | None = None
        # without a mod there is no context, and no state from message to message
        if context is not None:
            kept: Any = configs_in(context.state).get(keys.PASS, {})
            # as many as the app made last time, else as its run-config says
            planned = kept.get(keys.PASSES) or context.run_config.get(LOCAL_EPOCHS)
            self.planned = planned if type(planned) is int and planned > 0 else 1
            self.place = Place(*kept[PLACE]) if kept.get(PLACE) else None
            records = configs_in(message.content).values()
            if any(record.get(keys.KEEP_OPTIMIZER) is True for record in records):
                self.optimizers = KeptOptimizers(context)
        # passes that gave all they had to give, batches given and their examples
        self.passes = self.steps = self.examples = 0
        self._has_sizes, self._is_asked = True, False
        self._begun, self._left, self._full = 0, 0, -1
        self._job_steps: int | None = None
        self._since_s, self._step_s = time.monotonic(), list[float]()

    def allotment(self, asked: int) -> int:
        """Return the batches of one pass."""
        return max(1, asked // self.planned)

    def begin_pass(self, asked: int | None, full: int) -> int:
        """Begin a pass; return the batches that it gives. ``full``: those of the data, or -1."""
        self._begun, self._full, self._left = self._begun + 1, full, full
        self._is_asked, self._since_s = asked is not None, time.monotonic()
        if asked is not None:
            self._left = self.allotment(asked)
            # one too many gives what those before have left, as a look at one
            if self._begun > self.planned:
                self._left = max(0, self._left * self.planned - self.steps)
            self.passes += self._left == 0
        return self._left

    def count(self, size: int | None) -> None:
        """Count a batch that is given."""
        self.steps, self.examples = self.steps + 1, self.examples + (size or 0)
        self._has_sizes &= size is not None
        self._left -= 1
        # here and not at the end of the loop, which trainers break off after the last batch
        self.passes += self._left == 0

    def step_done(self) -> None:
        """Note that the next batch is wanted: from wish to wish is a step, evaluation is none."""
        now_s = time.monotonic()
        self._step_s.append(now_s - self._since_s)
        self._since_s = now_s

    def end_pass(self) -> None:
        """Note that a loader had no more to give."""
        self.passes += self._left != 0
        self._left = 0

    def state(self, steps: int, batch_size: int | None, job_steps: int | None) -> None:
        """Record what an app reports without a loader: its steps."""
        self._begun, self._is_asked, self._job_steps = 1, True, job_steps
        self.passes, self.steps, self.examples = 1, steps, steps * (batch_size or 0)
        self._has_sizes, self._since_s = batch_size is not None, time.monotonic()

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        found = {keys.NUM_STEPS: self.steps}
        return found | ({keys.EXAMPLES_PROCESSED: self.examples} if self._has_sizes else {})

    def enter(self, passes: Passes) -> Place:
        """Return where the node is in its pass over the data, or begin a pass over other data."""
        if self.place is None or self.place[:2] != (passes.size, passes.batch_size):
            self.place = passes.first_place()
        return self.place

    def finish(self) -> dict[str, dict[str, int | float]]:
        """Keep the place and the passes; return the record for the reply, if there were any."""
        if not self._begun or self.context is None:
            return {}
        if self.optimizers is not None:
            self.optimizers.save()
        # none if each was broken off
        passes = max(1, self.passes)
        place = list(self.place or ())
        self.context.state[keys.PASS] = ConfigRecord({PLACE: place, keys.PASSES: passes})
        found: dict[str, int | float] = {**self.metrics, keys.PASSES: passes}
        # what the app would have done by itself
        job_steps = self._job_steps if self._full < 0 else passes * self._full
        if (job_steps := job_steps if self._is_asked else self.steps) is not None:
            found[keys.JOB_STEPS] = job_steps
        # the first step, which warms up, counts only if it is alone
        if warm := self._step_s[1:] or self._step_s:
            found[keys.STEP_TIME] = sum(warm) / len(warm)
        elif self.steps:
            # stated by the app, or cut short: what there is, is the time since the beginning
            found[keys.STEP_TIME] = (time.monotonic() - self._since_s) / self.steps
        return {keys.WORK: found}


def current_work() -> Work | None:
    """Return the work of the message that is being answered; None without one of our mods."""
    if (handler := current_handler()) is None:
        return None
    handler.work = work = handler.work or Work(handler.context, handler.message)
    return work


class KeptOptimizers:
    """The optimizers of a message, in the order of their first steps."""

    def __init__(self, context: Context) -> None:
        self._context, self._seen = context, list[Any]()
        if optim := sys.modules.get("torch.optim.optimizer"):
            _be_told_by(optim)

    def see(self, optimizer: Any) -> None:
        """Note an optimizer that is about to step; give it its state before its first step."""
        if optimizer in self._seen:
            return
        kept: Any = configs_in(self._context.state).get(keys.OPTIMIZER, {})
        state = kept.get(str(len(self._seen)))
        self._seen.append(optimizer)
        # A new one begins with the state that its predecessor of the last message had. One that the
        # app itself carries on has its own; some make a state before their first step.
        has_own = any(own and own.get("step") != 0 for own in optimizer.state.values())
        if state and not has_own:
            _load(optimizer, state)

    def save(self) -> None:
        """Keep the states of all optimizers seen in the node's state."""
        kept: dict[str, Any] = {str(i): _saved(each) for i, each in enumerate(self._seen)}
        if (size := sum(map(len, kept.values()))) > MOST_BYTES:
            say_once(f"optimizers start over in each message: {size / 1e9:.1f} GB are too much")
            kept = {}
        if self._seen:
            self._context.state[keys.OPTIMIZER] = ConfigRecord(kept)


@cache
def _be_told_by(optim: Any) -> None:
    """Let torch call us before each step of an optimizer; once in a process."""
    optim.register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, _args: object, _kwargs: object) -> None:
    """Tell the message that is being answered; torch calls this before each step."""
    work: Any = getattr(current_handler(), "work", None)
    if work is not None and work.optimizers is not None:
        work.optimizers.see(optimizer)


def _saved(optimizer: Any) -> bytes:
    """Return an optimizer's state with the shapes of its parameters; empty if it has a NaN."""
    import torch

    state, buffer = optimizer.state_dict()["state"], BytesIO()
    values = (value for entries in state.values() for value in entries.values())
    # with a NaN in its state the node would never recover
    if not all(bool(value.isfinite().all()) for value in values if torch.is_tensor(value)):
        return b""
    torch.save((_shapes(optimizer), state), buffer)
    return buffer.getvalue()


def _load(optimizer: Any, kept: bytes) -> None:
    """Give an optimizer the state of one before, if that is of the same parameters."""
    import torch

    shapes, state = torch.load(BytesIO(kept), map_location="cpu", weights_only=True)
    if shapes != _shapes(optimizer):
        say_once("an optimizer is of another model than in the last message: it starts over")
        return
    # rates and the like stay those of the new one
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shapes(optimizer: Any) -> list[list[int]]:
    return [list(param.shape) for group in optimizer.param_groups for param in group["params"]]
