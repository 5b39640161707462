"""FedSlice's steps of a slice."""

from collections.abc import Sequence
from math import nan
from statistics import median, median_low
from typing import ClassVar

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.node_speeds import MeasuredSteps
from flwr_hetero.records import config_of
from flwr_hetero.server.context import Exchange, Messages
from flwr_hetero.slices.algorithm import FIXED_SHARE, Ending, equal_steps, slice_steps
from flwr_hetero.slices.workers import Usual

EQUAL_ENOUGH = 0.5
"""From how equal steps on optimizers no longer continue from slice to slice."""


class SliceSteps(MeasuredSteps):
    """Steps that fit a slice, whatever a message costs."""

    name: ClassVar[str] = "local_steps"
    called = "FedSlice"

    def __init__(self, strategy: Strategy | None, slice_steps: int, keep_optimizer: bool) -> None:
        # A node counts by its steps: late in the run all take as many.
        super().__init__(strategy, step_correction=0.0)
        self.slice_steps, self.keep_optimizer = slice_steps, keep_optimizer
        # what SliceRule sets: what is expected of new nodes, rho, and how near the end is
        self.usual = Usual()
        self.fixed_share = FIXED_SHARE
        self.ending = Ending()

    def num_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps of each node's next slice; shape (len(nodes),)."""
        if not self.ending.equal:
            return self._fitting_steps(nodes)
        # l. 7: by the slices of all nodes that are known, and not of those alone
        every = [*nodes, *(node for node in self.speeds.step_s if node not in {*nodes})]
        steps = self._fitting_steps(every)
        return equal_steps(steps, self._job_steps(every), self.ending.equal)[: len(nodes)]

    def _fitting_steps(self, nodes: Sequence[str]) -> NDArray[np.int64]:
        """Return the steps that fit each node's slice of equal time."""
        speeds, usual = self.speeds, self.usual
        known = speeds.step_s
        # l. 1
        return slice_steps(
            speeds.quick_round_s(self.slice_steps, with_link=False),
            [known.get(node, usual.step_s) for node in nodes],
            [speeds.fixed_s(node) if node in known else usual.fixed_s for node in nodes],
            self._job_steps(nodes),
            self.fixed_share,
        )

    def _job_steps(self, nodes: Sequence[str]) -> list[float]:
        jobs = self.speeds.jobs
        return [jobs[n].steps if n in jobs else self.usual.job_steps for n in nodes]

    def expect(self, *, alike: bool) -> None:
        """Expect of nodes that have not answered yet what others need, if these are alike."""
        speeds, self.usual = self.speeds, Usual()
        if alike and len(speeds.step_s) > 1:
            fixed_s = [speeds.fixed_s(node) for node in speeds.step_s]
            job_steps = [job.steps for job in speeds.jobs.values()]
            step_s = median(speeds.step_s.values())
            self.usual = Usual(step_s, float(np.median(fixed_s)), median_low(job_steps))

    def slices_s(self, nodes: Sequence[str]) -> NDArray[np.float64]:
        """Return the seconds of each node's slice with its message; NaN where unknown."""
        steps_s = [self.speeds.step_s.get(node, nan) for node in nodes]
        fixed_s = np.nan_to_num([self.speeds.fixed_s(node) for node in nodes])
        return np.asarray(self.num_steps(nodes) * steps_s + fixed_s)

    def on_instructions(self, context: Exchange, messages: Messages, grid: Grid) -> Messages:
        """Ask nodes for the steps of a slice, and to go on with their optimizers."""
        for message in super().on_instructions(context, messages, grid):
            # Momentum that is kept for as long as slices are then adds up.
            is_kept = self.keep_optimizer and self.ending.equal < EQUAL_ENOUGH
            config_of(message)[keys.KEEP_OPTIMIZER] = is_kept
        return messages
