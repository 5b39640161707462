"""The steps of a message: how many are left, where the pass goes on, what the reply says."""

import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client.handler import Handler, current_handler
from flwr_hetero.client.steps.optimizers import KeptOptimizers, wants_state
from flwr_hetero.client.steps.place import Place, Shape, from_record, to_record
from flwr_hetero.client.steps.source import Source, first_place

LOCAL_EPOCHS = "local-epochs"
"""Key of the run-config in Flower's own examples; only until the app has passed over its data."""
MOST_PASSES = 10_000


class Work:
    """Count the steps of a message; all loaders of a message share one.

    Attributes
    ----------
    planned : int or None
        Passes that share the message's steps; None without a mod, where the first takes them all.
    passes, steps, examples : int
        Passes that gave all they had to give, batches given and their examples.
    optimizers : KeptOptimizers or None
        Those whose state goes on, if the server asks for that.
    """

    def __init__(self, context: Context | None = None, message: object = None) -> None:
        self._context = context
        keeps = wants_state(message)
        self.optimizers = KeptOptimizers(context) if keeps and context is not None else None
        self.planned = None if context is None else planned_passes(context)
        self.passes = self.steps = self.examples = 0
        self._has_sizes, self._is_used = True, False
        self._begun, self._left, self._is_asked = 0, 0, False
        self._job_steps: int | None = None
        self._full: int | None = None
        self._place: Place | None = None
        self._shape = Shape()
        self._clock = StepClock()

    # --- steps -------------------------------------------------------------------------

    def allotment(self, asked: int) -> int:
        """Return the batches of one pass."""
        return asked if self.planned is None else max(1, asked // self.planned)

    def begin_pass(self, asked: int | None, full: int | None) -> int:
        """Begin a pass; return the batches that it gives. ``full``: those that the data have.

        A pass that was not planned gives what those before it have left, as a look at one batch.
        """
        self._is_used, self._begun, self._full = True, self._begun + 1, full
        self._is_asked = asked is not None
        self._clock.begin()
        if asked is None:
            self._left = -1 if full is None else full
            return self._left
        share = self.allotment(asked)
        if self.planned is not None and self._begun <= self.planned:
            self._left = share
        else:
            self._left = max(0, share * (self.planned or 1) - self.steps)
        self.passes += self._left == 0
        return self._left

    def count(self, size: int | None) -> None:
        """Count a batch that is given."""
        self.steps, self.examples = self.steps + 1, self.examples + (size or 0)
        self._has_sizes &= size is not None
        self._left -= 1
        self.passes += self._left == 0

    def end_pass(self) -> None:
        """Note that a loader had no more to give."""
        self.passes += self._left != 0
        self._left = 0

    def step_done(self) -> None:
        """Note that the next batch is wanted."""
        self._clock.step_done()

    def state(self, steps: int, batch_size: int | None, job_steps: int | None) -> None:
        """Take down what an app says that it does: steps without a loader."""
        self._is_used, self.passes, self.steps, self._job_steps = True, 1, steps, job_steps
        self.examples, self._has_sizes = steps * (batch_size or 0), batch_size is not None
        self._clock.begin()

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        found = {keys.NUM_STEPS: self.steps}
        return found | ({keys.EXAMPLES_PROCESSED: self.examples} if self._has_sizes else {})

    # --- from message to message -------------------------------------------------------

    def place(self, source: Source) -> Place:
        """Return where the node is in its pass over the data, or begin a pass over other data."""
        if self._place is None or self._shape != source.shape:
            kept = None if self._context is None else _kept(self._context)
            self._place = from_record(kept, source.shape) or first_place(source)
            self._shape = source.shape
        return self._place

    def move(self, place: Place) -> None:
        """Note the place after a batch that is given."""
        self._place = place

    def finish(self) -> Mapping[str, Mapping[str, Any]]:
        """Keep the place and the passes; return the record for the reply, if there were any."""
        if not self._is_used or self._context is None:
            return {}
        if self.optimizers is not None:
            self.optimizers.save()
        passes = max(1, self.passes)  # none if each was broken off
        record = ConfigRecord(dict(_kept(self._context) or {}))
        if self._place is not None:
            record = to_record(self._place, self._shape)
        record[keys.PASSES] = passes
        self._context.state[keys.PASS] = record
        found: dict[str, int | float] = {**self.metrics, keys.PASSES: passes}
        if (job_steps := self._steps_unasked(passes)) is not None:
            found[keys.JOB_STEPS] = job_steps
        if (seconds := self._clock.seconds_a_step(self.steps)) is not None:
            found[keys.STEP_TIME] = seconds
        return {keys.WORK: found}

    def _steps_unasked(self, passes: int) -> int | None:
        """Return the steps that the app would have taken by itself; None if that is unknown."""
        if self._begun and not self._is_asked:
            return self.steps
        return self._job_steps if self._full is None else passes * self._full


class StepClock:
    """Measure steps: from one wish for a batch to the next; evaluation between passes is none."""

    def __init__(self) -> None:
        self._began_s = self._since_s = time.monotonic()
        self._steps: list[float] = []

    def begin(self) -> None:
        """Begin a pass."""
        self._since_s = time.monotonic()

    def step_done(self) -> None:
        """End a step and begin the next one."""
        now_s = time.monotonic()
        self._steps.append(now_s - self._since_s)
        self._since_s = now_s

    def seconds_a_step(self, num_steps: int) -> float | None:
        """Return the mean; the first step, which warms up, only where it is alone."""
        if not self._steps:  # told, or cut short: what there is, is the time since the beginning
            return (time.monotonic() - self._since_s) / num_steps if num_steps else None
        warm = self._steps[1:] or self._steps
        return sum(warm) / len(warm)


def current_work() -> Work | None:
    """Return the work of the message that is being answered; None without one of our mods."""
    handler: Handler | None = current_handler()
    if handler is None or handler.context is None:
        return None
    if handler.work is None:
        handler.work = Work(handler.context, handler.message)
    assert isinstance(handler.work, Work)
    return handler.work


def planned_passes(context: Context) -> int:
    """Return how often the app passes over its data: as last time, else as its run-config says."""
    for source, key in ((_kept(context), keys.PASSES), (context.run_config, LOCAL_EPOCHS)):
        value = None if source is None else source.get(key)
        if type(value) is int and 1 <= value <= MOST_PASSES:
            return value
    return 1


def _kept(context: Context) -> Mapping[str, Any] | None:
    return context.state.config_records.get(keys.PASS)
