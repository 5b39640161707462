"""What a node does for a message: passes over its data, steps, examples, and their times."""

import time
from typing import Any

from flwr.app import ConfigRecord, Context

from flwr_hetero import keys
from flwr_hetero.client.data_pass import LoaderPass, OptimizerSteps, Passes, Place
from flwr_hetero.client.handler import current_handler, say_once
from flwr_hetero.records import configs_in

LOCAL_EPOCHS = ("local-epochs", "local_epochs")
"""Keys of Flower's own examples, in a message's config or in the run-config."""
PLACE, UNIT, TOTAL, SAID, IDLE = "place-", "unit", "total", "said", "idle"
"""In the node's state: the places of loaders in their passes; batches of an optimizer step, and of
the last message; the local epochs that were said; whether no optimizer stepped in that message."""
LOOP_STEPS = "loop-steps"
"""In the node's state: steps of a loop that counts them itself, whatever it is given."""
MOST_PLACES = 16
"""Loaders whose places a node keeps."""
MANY_PASSES = 3
"""Only above so many passes may a loop be one that counts steps."""
LONGEST = 100
"""A pass of unknown length is prolonged to so many times the batches asked for, at most."""


class Work:
    """Count the steps of a message; all loaders of a message share one."""

    def __init__(self, context: Context | None = None, message: Any = None) -> None:
        handler = current_handler()
        self.context = context
        self.carried = None if handler is None else handler.carried
        self.places: dict[str, Place] = {}
        self.length_asked = False
        """Whether the app has asked for ``len(loader)``."""
        self.loader_made = False
        """Whether the server asks for steps, and the app has called ``hetero.batches`` for them."""
        self._kept: Any = {}
        self._said = 0
        # Without a mod there is no context, and no state from message to message.
        if context is not None:
            self._kept = configs_in(context.state).get(keys.PASS, {})
            records: list[Any] = [*configs_in(message.content).values(), context.run_config]
            said: list[Any] = [record.get(key) for record in records for key in LOCAL_EPOCHS]
            self._said = next((n for n in said if type(n) is int and n > 0), 0)
            names = [name for name in self._kept if name.startswith(PLACE)]
            self.places = {name: Place(*self._kept[name]) for name in names}
        # What the app did last time counts, unless it is told another number by now.
        is_same = keys.PASSES in self._kept and self._kept[SAID] == self._said
        self.planned: int = self._kept[keys.PASSES] if is_same else self._said or 1
        self._unit: int = self._kept.get(UNIT, 1)
        self._passes: list[LoaderPass] = []
        self._looks: list[LoaderPass] = []
        self._optimizers: dict[int, OptimizerSteps] = {}
        self._has_sizes = True
        self._data_size = 0
        self._stated: dict[str, int] | None = None
        self.job_steps: int | None = None
        """Steps that the app would take unasked, where they are known."""
        self._counts_steps = False
        self._since_s = time.monotonic()

    # --- how many batches a pass gives ------------------------------------------------------
    def allotment(self, asked: int) -> int:
        """Return the batches of one pass: whole optimizer steps, and one at least."""
        return max(self._unit, asked // self.planned // self._unit * self._unit)

    @property
    def allotted(self) -> int:
        """Batches of all planned passes of this message; 0 if none was asked for."""
        return (self._passes[0].asked or 0) * self.planned if self._passes else 0

    def begin_pass(self, loader: Any, asked: int | None, full: int) -> LoaderPass:
        """Begin a pass; ``asked``: batches of the message, ``full``: of the loader's own pass."""
        for each in self._optimizers.values():
            each.after_end = 0
        self._since_s = time.monotonic()
        last = self._passes[-1] if self._passes else None
        if last is not None and last.is_open and last.loader is not loader:
            if not last.beside:
                last.given_alone = last.given
            last.beside.append(LoaderPass(loader, last.asked, full, leader=last))
            return last.beside[-1]
        self._take_out_look()
        one = LoaderPass(loader, None, full, dict(self.places))
        if asked is not None:
            one.asked = self.allotment(asked)
            if len(self._passes) >= self.planned:
                # One pass too many gets what those before have left, and is never empty.
                one.asked = max(self._unit, one.asked * self.planned - self.steps)
        self._passes.append(one)
        if self.carried is not None:
            self.carried.begin_pass(self.allotted)
        return one

    def wants_more(self, one: LoaderPass) -> bool:
        """Return whether a pass must go on, as it holds no whole step of an optimizer yet."""
        if one.leader is not None:
            return one.leader.given > one.given
        if not self._has_optimizers or one is not self._passes[-1]:
            return False
        if one.given >= (one.full if one.full > 0 else LONGEST * (one.asked or 1)):
            return False
        if not one.optimizer_steps:
            return True
        # A node's first message shows after how many batches each of its optimizers steps.
        if UNIT in self._kept or len(self._passes) > 1:
            return False
        made = [] if self.carried is None else self.carried.made
        known = {id(each): OptimizerSteps() for each in made} | self._optimizers
        most = max(each.count for each in known.values())
        return any(
            each.count < 2 and (each.count < most or one.given > each.last)
            for each in known.values()
        )

    @property
    def _has_optimizers(self) -> bool:
        """Whether this app has torch optimizers that step."""
        if self.carried is None or IDLE in self._kept:
            return False
        return bool(self.carried.made or self._optimizers or UNIT in self._kept)

    def _take_out_look(self) -> None:
        """Count no pass without an optimizer step, and go back to where it began."""
        if self._has_optimizers and self._passes and not self._passes[-1].optimizer_steps:
            look = self._passes.pop()
            self._looks.append(look)
            for name, place in self.places.items():
                start = place._replace(number=0, position=0)
                self.places[name] = look.places.get(name, start)

    # --- what happens -------------------------------------------------------------------------
    def enter(self, passes: Passes, index: int) -> tuple[str, Place]:
        """Return the name and the place of a loader; ``index``: among those that are alike."""
        name = f"{PLACE}{passes.size}-{passes.batch_size}-{index}"
        if name not in self.places:
            self.places[name] = passes.first_place()
        return name, self.places[name]

    def alike_before(self, one: LoaderPass, sizes: object) -> int:
        """Return how many loaders of these sizes run beside a pass and began before it."""
        if one.leader is None:
            return 0
        before = one.leader.beside[: one.leader.beside.index(one)]
        others = [each.loader for each in [one.leader, *before] if each.loader is not one.loader]
        return sum(each.sizes == sizes for each in others)

    def count(self, one: LoaderPass, size: int | None) -> None:
        """Count a batch that is given."""
        one.given += 1
        one.examples += size or 0
        self._has_sizes &= size is not None

    def step_done(self, one: LoaderPass) -> None:
        """Note that the loop is done with a batch: from wish to wish is a step."""
        now_s = time.monotonic()
        one.step_s.append(now_s - self._since_s)
        self._since_s = now_s
        self._after_batch(one)

    def end_pass(self, one: LoaderPass, *, has_ended: bool) -> None:
        """Note that a pass is over: it has given all, or the loop was left."""
        one.is_open = False
        one.has_ended = has_ended
        if not has_ended:
            # A loop that breaks off does not ask for the next batch.
            self._after_batch(one)

    def _after_batch(self, one: LoaderPass) -> None:
        """Let what goes on see that the loop is done with a batch."""
        if self.carried is not None:
            self.carried.after_batch(self.steps, self.planned * one.full if one.full > 0 else None)

    def optimizer_steps(self, optimizer: Any) -> None:
        """Note that an optimizer steps."""
        known = self._optimizers.setdefault(id(optimizer), OptimizerSteps())
        known.count += 1
        if not self._passes:
            # A loop over hetero.num_steps: what was stepped since the last step was so in the loop.
            if self._stated is not None and self.carried is not None:
                self.carried.after_batch(known.count - 1, self.job_steps)
            return
        one = self._passes[-1]
        one.optimizer_steps += 1
        known.after_end += one.has_ended
        # A step after the loop says nothing of how many batches a step in it takes.
        if one.is_open:
            known.gaps.append(self.steps - known.last)
        known.last = self.steps

    def know_data(self, size: int) -> None:
        """Note how many examples the data of a loader have."""
        self._data_size = max(self._data_size, size)

    def state(self, steps: int, batch_size: int | None, job_steps: int | None) -> None:
        """Record what an app reports without a loader: its steps."""
        examples = {keys.EXAMPLES_PROCESSED: steps * batch_size} if batch_size else {}
        self._stated = {keys.NUM_STEPS: steps, **examples}
        self.job_steps = job_steps
        self._since_s = time.monotonic()

    # --- what is said of it ---------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Batches that count as steps so far."""
        return sum(each.steps for each in self._passes)

    @property
    def metrics(self) -> dict[str, int]:
        """Steps and examples so far."""
        if self._stated is not None:
            return self._stated
        every = [each for one in self._passes for each in [one, *one.beside]]
        examples = {keys.EXAMPLES_PROCESSED: sum(each.examples for each in every)}
        return {keys.NUM_STEPS: self.steps, **(examples if self._has_sizes else {})}

    def finish(self) -> dict[str, dict[str, int | float]]:
        """Keep what goes on; return the record for the reply, if there is anything to report."""
        if self.context is None or not (self._passes or self._looks or self._stated):
            self._check_loader()
            return {}
        self._sort_out_looks()
        if self._stated is not None and self.carried is not None:
            self.carried.after_batch(self._stated[keys.NUM_STEPS], self.job_steps)
        # None is complete if each was broken off.
        passes = max(1, sum(each.is_complete for each in self._passes))
        asked = self._stated is not None or any(each.asked for each in self._passes)
        job_steps = self.job_steps if asked else self.steps
        if asked and self._passes and (full := self._passes[-1].full) >= 0:
            job_steps = passes * full
        if asked and (loop_steps := self._loop_steps(passes)):
            passes = 1
            job_steps = loop_steps
        self.job_steps = job_steps
        self._keep(passes, asked=asked)
        found: dict[str, int | float] = {**self.metrics, keys.PASSES: passes}
        if self._unit > 1:
            found[keys.STEP_BATCHES] = self._unit
        if job_steps is not None:
            found[keys.JOB_STEPS] = job_steps
        if self._stated is None:
            found[keys.DATA_SIZE] = self._data_size
        # The first step, which warms up, counts only if it is alone.
        step_s = [seconds for each in self._passes for seconds in each.step_s]
        if warm := step_s[1:] or step_s:
            found[keys.STEP_TIME] = sum(warm) / len(warm)
        elif steps := found[keys.NUM_STEPS]:
            # The app stated its steps: all that is known is the time since then.
            found[keys.STEP_TIME] = (time.monotonic() - self._since_s) / steps
        return {keys.WORK: found}

    def _check_loader(self) -> None:
        """Raise if the app trained on another loader than the one that it was given."""
        if self.loader_made and self.carried is not None and self.carried.stepped:
            raise RuntimeError(
                "hetero.batches(loader, msg) was called, but optimizers stepped on batches of "
                "another loader. Call it on the loader that the training loop iterates, with "
                "Opacus after make_private(...)"
            )

    def _sort_out_looks(self) -> None:
        """Tell passes of training from others, now that all optimizer steps are known."""
        if not self._optimizers or not any(each.optimizer_steps for each in self._passes):
            # An app that steps no optimizer trains in a way of its own, or not at all.
            self._passes = [*self._looks, *self._passes]
            self._looks = []
            return
        looks = [each for each in self._passes if not each.optimizer_steps]
        self._passes = [each for each in self._passes if each.optimizer_steps]
        if any(each.asked and each.given for each in [*self._looks, *looks]):
            say_once(
                "a pass over hetero.batches had no optimizer step, so its batches do not count as "
                "training. Test on the DataLoader itself or with torch.no_grad(), and wrap it "
                "right at the training loop",
                about="passes without a step",
            )

    def _loop_steps(self, passes: int) -> int:
        """Return the steps of a loop that counts them itself; 0 if it ends with its batches."""
        most = max((each.after_end for each in self._optimizers.values()), default=0)
        line = "for _ in range(hetero.num_steps(msg, default={0})): ..."
        if most > 1:
            say_once(
                f"{most} optimizer steps were taken after hetero.batches had given its batches, as "
                "with itertools.cycle, and do not count. A loop by steps takes those that the "
                f"server asks for so: {line.format(most + self.steps)}",
                about="steps after the batches",
            )
        if not self.steps:
            return 0
        last = self._kept.get(keys.PASSES, 1)
        is_same_total = self._kept.get(TOTAL) == self.steps
        is_new = min(passes, last) > MANY_PASSES and passes != last and is_same_total
        if not is_new and self._kept.get(LOOP_STEPS) != self.steps:
            return 0
        self._counts_steps = True
        say_once(
            f"the app takes {self.steps} batches, however few hetero.batches gives in a pass. A "
            f"loop by steps takes those that the server asks for so: {line.format(self.steps)}",
            about="loop by steps",
        )
        return self.steps

    def _keep(self, passes: int, *, asked: bool) -> None:
        """Write what the next message goes on with."""
        assert self.context is not None
        places = [(name, list(place)) for name, place in self.places.items()]
        kept: dict[str, Any] = dict(places[-MOST_PLACES:])
        kept |= {keys.PASSES: passes, SAID: self._said}
        if self._counts_steps:
            kept[LOOP_STEPS] = self.steps
        if asked:
            kept[TOTAL] = self.steps
        if self._optimizers:
            # The fewest batches between two steps: the first ones may be fetched ahead. Of one that
            # stepped once they are known from messages before.
            all_gaps = [each.gaps for each in self._optimizers.values() if each.gaps]
            units = [min(gaps[1:]) if gaps[1:] else max(self._unit, *gaps) for gaps in all_gaps]
            self._unit = max([1, *units])
            kept[UNIT] = self._unit
        elif asked and (self._has_optimizers or IDLE in self._kept):
            kept[IDLE] = True
            say_once(
                f"no optimizer has stepped in a message of {self.steps} batches. A slice of steps "
                "may end before the app's next optimizer step: see slice_steps of FedSlice",
                about="no step",
            )
        elif UNIT in self._kept:
            kept[UNIT] = self._kept[UNIT]
        self.context.state[keys.PASS] = ConfigRecord(kept)


def current_work() -> Work | None:
    """Return the work of the message that is being answered; None without one of our mods."""
    if (handler := current_handler()) is None:
        return None
    handler.work = work = handler.work or Work(handler.context, handler.message)
    return work
