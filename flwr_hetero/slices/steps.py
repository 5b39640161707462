"""FedSlice's steps of a slice."""

from collections.abc import Hashable, Sequence
from logging import WARNING
from math import inf, nan
from statistics import median, median_low
from typing import ClassVar, NamedTuple

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero._flwr import log
from flwr_hetero.biased_local_sgd.node_speeds import MeasuredSteps
from flwr_hetero.client.carried import MOST_BYTES
from flwr_hetero.exchange.context import Exchange, Messages
from flwr_hetero.exchange.nodes import Figure
from flwr_hetero.records import config_of, num_parameters
from flwr_hetero.server.loop import Run
from flwr_hetero.slices.algorithm import (
    FIXED_SHARE,
    Ending,
    are_alike,
    equal_steps,
    quick_steps,
    slice_steps,
    spread_of,
    usual_slice,
)

EQUAL_ENOUGH = 0.5
"""From how equal steps on optimizers no longer continue from slice to slice."""


class Usual(NamedTuple):
    """What is expected of a node that has not answered yet; NaN and infinity: nothing."""

    step_s: float = nan
    fixed_s: float = nan
    job_steps: float = inf


class Stage(NamedTuple):
    """What the steps of slices depend on beside the speeds of the nodes."""

    ending: Ending = Ending()
    """How far the run has gone over to equal steps."""
    fixed_share: float = FIXED_SHARE
    """Rho, the largest share of a message's fixed cost in a slice."""
    usual: Usual = Usual()
    """What is expected of nodes that have not answered yet."""


class SliceSteps(MeasuredSteps):
    """Steps that fit a slice, whatever a message costs."""

    name: ClassVar[str] = "local_steps"
    called = "FedSlice"

    def __init__(self, strategy: Strategy | None, slice_steps: int, keep_optimizer: bool) -> None:
        # A node counts by its steps: late in the run all take as many.
        super().__init__(strategy, step_correction=0.0)
        self.slice_steps = slice_steps
        self.keep_optimizer = keep_optimizer
        # SliceRule sets it before it draws nodes.
        self.stage = Stage()
        self._quick = Figure[float]()
        self._spread = Figure[float]()
        self._usual_slice_s = Figure[float]()
        self._are_similar = Figure[bool]()
        self._usual_of_others = Figure[Usual]()

    def on_start(self, run: Run) -> None:
        """Say if the model is too large for nodes to keep the state of an optimizer."""
        super().on_start(run)
        adam_bytes = 8 * num_parameters(run.arrays)
        if self.keep_optimizer and adam_bytes > MOST_BYTES and not run.continues:
            text = "FedSlice: optimizers start over in each message where their state exceeds %.1f "
            log(WARNING, text + "GB. Adam's has %.1f GB here", MOST_BYTES / 1e9, adam_bytes / 1e9)

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node's next slice; shape (len(nodes),)."""
        steps = self._fitting_steps(nodes)
        equal = self.stage.ending.equal
        if not equal:
            return steps
        # l. 7: by the slices of all nodes that are known, and not of those alone
        quick = self._quick.of(
            lambda: quick_steps(self._fitting_steps(self._known())),
            *self._changes(),
            key=(self.stage.fixed_share, self.stage.usual),
        )
        return equal_steps(steps, self._job_steps(nodes), quick, equal)

    def spread(self) -> float:
        """Return how many steps of a slice a quick node takes, in means of all nodes."""
        return self._spread.of(
            lambda: spread_of(self.num_steps(self._known())), *self._changes(), key=self._key()
        )

    def usual_slice_s(self) -> float:
        """Return the seconds of a short slice that is usual, with its message; 0 if unknown."""
        return self._usual_slice_s.of(
            lambda: usual_slice(self.slices_s(self._known())), *self._changes(), key=self._key()
        )

    def are_similar(self, ratio: float) -> bool:
        """Return whether the nodes that are known take about as long for a step."""
        return self._are_similar.of(
            lambda: are_alike(list(self.speeds.step_s.values()), ratio),
            *self._changes(),
            key=ratio,
        )

    def _known(self) -> list[str]:
        return list(self.speeds.step_s)

    def _changes(self) -> tuple[int, int]:
        return self.speeds.changes, len(self.speeds.step_s)

    def _key(self) -> Hashable:
        """Return what figures of all slices depend on beside the speeds."""
        # Slices become equal little by little.
        return self.stage.fixed_share, self.stage.usual, round(self.stage.ending.equal, 2)

    def _fitting_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps that fit each node's slice of equal time."""
        speeds = self.speeds
        usual = self.stage.usual
        known = speeds.step_s
        # l. 1
        return slice_steps(
            speeds.quick_round_s(self.slice_steps, with_link=False),
            [known.get(node, usual.step_s) for node in nodes],
            [speeds.fixed_s(node) if node in known else usual.fixed_s for node in nodes],
            self._job_steps(nodes),
            self.stage.fixed_share,
        )

    def _job_steps(self, nodes: Sequence[str]) -> list[float]:
        jobs = self.speeds.jobs
        usual = self.stage.usual.job_steps
        return [jobs[node].steps if node in jobs else usual for node in nodes]

    def usual_of_others(self) -> Usual:
        """Return what the nodes that have answered need, which others like them will need, too."""
        return self._usual_of_others.of(self._look_at_others, *self._changes())

    def _look_at_others(self) -> Usual:
        speeds = self.speeds
        if len(speeds.step_s) < 2:
            return Usual()
        fixed_s = [speeds.fixed_s(node) for node in speeds.step_s]
        job_steps = [job.steps for job in speeds.jobs.values()]
        step_s = median(speeds.step_s.values())
        return Usual(step_s, float(np.median(fixed_s)), median_low(job_steps))

    def slices_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return the seconds of each node's slice with its message; NaN where unknown."""
        steps_s = [self.speeds.step_s.get(node, nan) for node in nodes]
        fixed_s = np.nan_to_num([self.speeds.fixed_s(node) for node in nodes])
        return np.asarray(self.num_steps(nodes) * steps_s + fixed_s)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Ask nodes for the steps of a slice, and to go on with their optimizers."""
        for message in super().on_instructions(context, messages, grid):
            # Momentum that is kept for as long as slices are then adds up.
            is_kept = self.keep_optimizer and self.stage.ending.equal < EQUAL_ENOUGH
            config_of(message)[keys.KEEP_OPTIMIZER] = is_kept
        return messages
