"""Counts what a node does for a message: passes over its data, steps, examples, and times."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client import warn_once
from flwr_hetero.client.carried import Carried
from flwr_hetero.client.data_pass import LoaderPass, OptimizerSteps, Passes, Place, batch_length
from flwr_hetero.records import configs_in

# Keys of Flower's own examples, in a message's config or in the run-config.
LOCAL_EPOCHS = ("local-epochs", "local_epochs")
# Entries of the record keys.PASS in the node's state, beside keys.PASSES.
PLACE = "place-"  # and the sizes of a loader: where it is in its pass
UNIT = "unit"  # batches of one optimizer step
TOTAL = "total"  # batches of the last message
SAID = "said"  # local epochs that the message or the run-config stated
IDLE = "idle"  # present if no optimizer stepped in the last message
LOOP_STEPS = "loop-steps"  # steps of a loop that counts them itself

MOST_PLACES = 16  # a node keeps the places of this many loaders
MANY_PASSES = 3  # a loop with no more passes than this is not taken for one that counts steps
LONGEST = 100  # a pass of unknown length gives at most this many times the batches asked for

OTHER_LOADER = (
    "hetero.batches(loader, msg) was called, but optimizers stepped on batches of another loader. "
    "Call it on the loader that the training loop iterates, with Opacus after make_private(...)"
)


class Work:
    """Count the steps of a message; all loaders of a message share one."""

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], context: Context | None, carried: Carried
    ) -> None:
        self.context = context
        self.carried = carried
        # Whether the app has called hetero.batches or hetero.num_steps.
        self.is_used = False
        # Whether the server asks for steps, and the app has called hetero.batches for them.
        self.loader_made = False
        # Steps that the app would take unasked, if they are known.
        self.job_steps: int | None = None
        # Examples of the largest data set that a loader passes over; 0 if unknown.
        self.data_size = 0
        # Loaders are numbered, because a reference would keep their worker processes alive.
        self.num_loaders = 0
        self.places: dict[str, Place] = {}
        self._kept: Any = {}
        self._stated_epochs = 0
        if context is not None:
            self._kept = configs_in(context.state).get(keys.PASS, {})
            all_configs = [*configs, context.run_config]
            stated: list[Any] = [config.get(key) for config in all_configs for key in LOCAL_EPOCHS]
            valid = [epochs for epochs in stated if type(epochs) is int and epochs > 0]
            self._stated_epochs = valid[0] if valid else 0
            for name, place in self._kept.items():
                if name.startswith(PLACE):
                    self.places[name] = Place(*place)
        # The app is expected to make the passes of the last message, unless another number is
        # stated now.
        self.planned: int = self._stated_epochs or 1
        if keys.PASSES in self._kept and self._kept[SAID] == self._stated_epochs:
            self.planned = self._kept[keys.PASSES]
        self._unit: int = self._kept.get(UNIT, 1)
        self._passes: list[LoaderPass] = []
        # Passes without an optimizer step, which do not count as training.
        self._looks: list[LoaderPass] = []
        self._optimizers: dict[int, OptimizerSteps] = {}
        self._has_sizes = True
        # What an app without a loader has stated of its steps.
        self._stated: dict[str, int] | None = None
        self._since_s = time.monotonic()

    def allotment(self, asked: int) -> int:
        """Return the batches of one pass: whole optimizer steps, and at least one."""
        return max(self._unit, asked // self.planned // self._unit * self._unit)

    @property
    def allotted(self) -> int:
        """Batches of all planned passes of this message; 0 if none was asked for."""
        return (self._passes[0].asked or 0) * self.planned if self._passes else 0

    def begin_pass(self, loader: int, asked: int | None, full: int) -> LoaderPass:
        """Begin a pass; ``asked``: batches of the message, ``full``: of the loader's own pass."""
        for steps in self._optimizers.values():
            steps.after_end = 0
        self._since_s = time.monotonic()
        if self._passes:
            last = self._passes[-1]
            if last.is_open and last.loader != loader:
                if not last.beside:
                    last.given_alone = last.given
                last.beside.append(LoaderPass(loader, last.asked, full, leader=last))
                return last.beside[-1]
        if self._has_optimizers and self._passes and not self._passes[-1].optimizer_steps:
            # The last pass was only a look at the data: go back to where it began.
            look = self._passes.pop()
            self._looks.append(look)
            for name, place in self.places.items():
                self.places[name] = look.places.get(name, place._replace(number=0, position=0))
        begun = LoaderPass(loader, None, full, places=dict(self.places))
        if asked is not None:
            begun.asked = self.allotment(asked)
            if len(self._passes) >= self.planned:
                # A pass beyond the planned ones gets the batches that are left, or one step.
                begun.asked = max(self._unit, begun.asked * self.planned - self.steps)
        self._passes.append(begun)
        self.carried.begin_pass(self.allotted)
        return begun

    def wants_more(self, current: LoaderPass) -> bool:
        """Return whether a pass must go on because it holds no whole optimizer step yet."""
        if current.leader is not None:
            return current.leader.given > current.given
        if not self._has_optimizers or current is not self._passes[-1]:
            return False
        longest = current.full if current.full > 0 else LONGEST * (current.asked or 1)
        if current.given >= longest:
            return False
        if not current.optimizer_steps:
            return True
        # A node's first message shows after how many batches each of its optimizers steps.
        if UNIT in self._kept or len(self._passes) > 1:
            return False
        made = {id(optimizer): OptimizerSteps() for optimizer in self.carried.made}
        all_steps = list((made | self._optimizers).values())
        most = max(steps.count for steps in all_steps)
        return any(
            steps.count < 2 and (steps.count < most or current.given > steps.last)
            for steps in all_steps
        )

    @property
    def _has_optimizers(self) -> bool:
        """Whether this app has torch optimizers that step."""
        if IDLE in self._kept:
            return False
        return bool(self.carried.made or self._optimizers or UNIT in self._kept)

    def enter(self, passes: Passes, index: int) -> tuple[str, Place]:
        """Return the name and the place of a loader; ``index``: among those of equal sizes."""
        name = f"{PLACE}{passes.size}-{passes.batch_size}-{index}"
        if name not in self.places:
            self.places[name] = passes.first_place()
        return name, self.places[name]

    def give(self, current: LoaderPass, batches: Iterable[Any]) -> Iterator[Any]:
        """Give the batches of a pass, and count them with their examples and times."""
        try:
            for batch in batches:
                current.given += 1
                size = batch_length(batch)
                current.examples += size or 0
                if size is None:
                    self._has_sizes = False
                yield batch
                # A step takes the time from one request for a batch to the next.
                now_s = time.monotonic()
                current.step_s.append(now_s - self._since_s)
                self._since_s = now_s
                self._after_batch(current)
            current.has_ended = True
        finally:
            current.is_open = False
            if not current.has_ended:
                # A loop that breaks off does not ask for the next batch.
                self._after_batch(current)

    def _after_batch(self, current: LoaderPass) -> None:
        job_steps = self.planned * current.full if current.full > 0 else None
        self.carried.after_batch(self.steps, job_steps)

    def optimizer_steps(self, optimizer: Any) -> None:
        """Note that an optimizer steps."""
        if not self.is_used:
            return
        steps = self._optimizers.setdefault(id(optimizer), OptimizerSteps())
        steps.count += 1
        if not self._passes:
            # In a loop over hetero.num_steps, a batch ends with the next optimizer step.
            if self._stated is not None:
                self.carried.after_batch(steps.count - 1, self.job_steps)
            return
        current = self._passes[-1]
        current.optimizer_steps += 1
        if current.has_ended:
            steps.after_end += 1
        # A step after the loop does not show how many batches a step in it takes.
        if current.is_open:
            steps.gaps.append(self.steps - steps.last)
        steps.last = self.steps

    def state(self, steps: int, batch_size: int | None, job_steps: int | None) -> None:
        """Record the steps of an app without a loader."""
        self._stated = {keys.NUM_STEPS: steps}
        if batch_size:
            self._stated[keys.EXAMPLES_PROCESSED] = steps * batch_size
        self.job_steps = job_steps
        self._since_s = time.monotonic()

    @property
    def steps(self) -> int:
        """Batches that count as steps so far."""
        return sum(each.steps for each in self._passes)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        if self._stated is not None:
            return self._stated
        metrics = {keys.NUM_STEPS: self.steps}
        if self._has_sizes:
            loader_passes = [one for leader in self._passes for one in [leader, *leader.beside]]
            metrics[keys.EXAMPLES_PROCESSED] = sum(one.examples for one in loader_passes)
        return metrics

    def finish(self) -> dict[str, dict[str, int | float]]:
        """Keep what continues; return the record for the reply, if there is anything to report."""
        if not (self._passes or self._looks or self._stated):
            # The app may have trained on another loader than the one that it was given.
            if self.loader_made and self.carried.stepped:
                raise RuntimeError(OTHER_LOADER)
            return {}
        self._sort_out_looks()
        if self._stated is not None:
            self.carried.after_batch(self._stated[keys.NUM_STEPS], self.job_steps)
        # If each pass was broken off, they count as one.
        num_passes = max(1, sum(each.is_complete for each in self._passes))
        asked = self._stated is not None or any(each.asked for each in self._passes)
        if not asked:
            self.job_steps = self.steps
        elif self._passes and self._passes[-1].full >= 0:
            self.job_steps = num_passes * self._passes[-1].full
        loop_steps = self._loop_steps(num_passes) if asked else 0
        if loop_steps:
            num_passes = 1
            self.job_steps = loop_steps
        self._keep(num_passes, loop_steps, asked=asked)
        report: dict[str, int | float] = {**self.metrics, keys.PASSES: num_passes}
        if self._unit > 1:
            report[keys.STEP_BATCHES] = self._unit
        if self.job_steps is not None:
            report[keys.JOB_STEPS] = self.job_steps
        if self._stated is None:
            report[keys.DATA_SIZE] = self.data_size
        step_s = [seconds for each in self._passes for seconds in each.step_s]
        # The first step, which warms up, counts only if there is no other one.
        warm_s = step_s[1:] or step_s
        if warm_s:
            report[keys.STEP_TIME] = sum(warm_s) / len(warm_s)
        elif report[keys.NUM_STEPS]:
            # The app stated its steps, so only the time since then is known.
            report[keys.STEP_TIME] = (time.monotonic() - self._since_s) / report[keys.NUM_STEPS]
        return {keys.WORK: report}

    def _sort_out_looks(self) -> None:
        """Separate passes of training from others, now that all optimizer steps are known."""
        trained = [each for each in self._passes if each.optimizer_steps]
        if not self._optimizers or not trained:
            # An app that steps no optimizer trains in a way of its own, or not at all.
            self._passes = [*self._looks, *self._passes]
            self._looks = []
            return
        looks = self._looks + [each for each in self._passes if not each.optimizer_steps]
        self._passes = trained
        if any(look.asked and look.given for look in looks):
            warn_once(
                "a pass over hetero.batches had no optimizer step, so its batches do not count as "
                "training. Test on the DataLoader itself or with torch.no_grad(), and wrap it "
                "right at the training loop",
                topic="passes without a step",
            )

    def _loop_steps(self, num_passes: int) -> int:
        """Return the steps of a loop that counts them itself; 0 if it ends with its batches."""
        line = "for _ in range(hetero.num_steps(msg, default={0})): ..."
        most = max((steps.after_end for steps in self._optimizers.values()), default=0)
        if most > 1:
            warn_once(
                f"{most} optimizer steps were taken after hetero.batches had given its batches, as "
                "with itertools.cycle, and do not count. A loop by steps takes those that the "
                f"server asks for so: {line.format(most + self.steps)}",
                topic="steps after the batches",
            )
        if not self.steps:
            return 0
        # A loop that counts steps takes as many in each message, in more or fewer passes.
        last = self._kept.get(keys.PASSES, 1)
        has_other_passes = min(num_passes, last) > MANY_PASSES and num_passes != last
        is_new = has_other_passes and self._kept.get(TOTAL) == self.steps
        if not is_new and self._kept.get(LOOP_STEPS) != self.steps:
            return 0
        warn_once(
            f"the app takes {self.steps} batches, however few hetero.batches gives in a pass. A "
            f"loop by steps takes those that the server asks for so: {line.format(self.steps)}",
            topic="loop by steps",
        )
        return self.steps

    def _keep(self, num_passes: int, loop_steps: int, *, asked: bool) -> None:
        """Write into the node's state what the next message continues with."""
        assert self.context is not None
        places = list(self.places.items())[-MOST_PLACES:]
        kept: dict[str, Any] = {name: list(place) for name, place in places}
        kept |= {keys.PASSES: num_passes, SAID: self._stated_epochs}
        if loop_steps:
            kept[LOOP_STEPS] = loop_steps
        if asked:
            kept[TOTAL] = self.steps
        if self._optimizers:
            # The fewest batches between two steps are a unit. Those before the first step may
            # have been fetched ahead, so they count only if there was no other step.
            units = [1]
            for steps in self._optimizers.values():
                if len(steps.gaps) > 1:
                    units.append(min(steps.gaps[1:]))
                elif steps.gaps:
                    units.append(max(self._unit, steps.gaps[0]))
            self._unit = max(units)
            kept[UNIT] = self._unit
        elif asked and (self._has_optimizers or IDLE in self._kept):
            kept[IDLE] = True
            warn_once(
                f"no optimizer has stepped in a message of {self.steps} batches. A slice of steps "
                "may end before the app's next optimizer step: see slice_steps of FedSlice",
                topic="no step",
            )
        elif UNIT in self._kept:
            kept[UNIT] = self._kept[UNIT]
        self.context.state[keys.PASS] = ConfigRecord(kept)
