"""Keep what a run leaves behind: history, model, report, and a checkpoint to resume from."""

from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Any, ClassVar, Protocol

from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.strategy.checkpoint import load_checkpoint, plain_settings, save_checkpoint
from flwr_hetero.strategy.rounds import Run
from flwr_hetero.strategy.wrapper import Wrapper


class RunKeeper(Protocol):
    """What :class:`Recorded` needs of a run directory; ``flwr_hetero.report`` has one."""

    @property
    def checkpoint_dir(self) -> Path:
        """Existing folder for the checkpoint."""

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a round's line to the history."""

    def cut_after(self, last_round: int) -> None:
        """Drop lines of rounds after the one that a resumed run continues from."""

    def save_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the global model."""

    def finish(self) -> Any:
        """Build the report; returns where it is."""


class Recorded(Wrapper):
    """Record every round in a run directory; put it outside all other wrappers.

    Parameters
    ----------
    strategy : Strategy, optional
        What runs; FedAvg if left out.
    run_dir : RunKeeper
        For instance ``flwr_hetero.report.RunDirectory("/data/runs/first", config)``.
    checkpoint_every : int
        Rounds between two checkpoints; the last round always gets one.
    resume : bool
        Continue from the directory's checkpoint, if there is one.

    Raises
    ------
    ValueError
        If ``checkpoint_every`` is below 1.

    Notes
    -----
    The checkpoint holds the model, the round, all metrics so far, the clock, the state of each
    wrapper and of Flower's strategy, and Python's generator, which Flower's sampling uses. It
    is replaced in one step, so a run that is killed continues from the last whole one.

    Examples
    --------
    >>> import tempfile
    >>> from flwr_hetero.report import RunDirectory
    >>> from flwr_hetero.strategy import TiFL
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     strategy = Recorded(TiFL(), run_dir=RunDirectory(f"{folder}/first", {"seed": 0}))
    """

    name: ClassVar[str] = "recorded"
    decides = frozenset({"the record"})
    outermost = True

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        run_dir: RunKeeper,
        checkpoint_every: int = 1,
        resume: bool = False,
    ) -> None:
        if checkpoint_every < 1:
            raise invalid("checkpoint_every", checkpoint_every, "be at least 1", "1 is the safest")
        super().__init__(strategy)
        self.run_dir = run_dir
        self.checkpoint_every = checkpoint_every
        self.resume = resume
        self._fresh = plain_settings(self)
        self._begun = False

    def on_start(self, run: Run) -> None:
        """Continue from the checkpoint if that is wanted; a refused one leaves all as it was."""
        if self.resume and load_checkpoint(self.run_dir.checkpoint_dir, run):
            self.run_dir.cut_after(run.round)
            log(INFO, "Resumed after round %d", run.round)
        self._begun = True

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Write the round's line and, if it is due, the checkpoint."""
        self.run_dir.append_round(record)
        if run.round % self.checkpoint_every == 0 or run.round == run.num_rounds:
            save_checkpoint(self.run_dir.checkpoint_dir, run, self._fresh)

    def on_finish(self, run: Run) -> None:
        """Save the model, build the report and say where it is, if the run has begun."""
        if not self._begun:
            return
        self.run_dir.save_model({name: array.numpy() for name, array in run.arrays.items()})
        log(INFO, "Run directory: %s", self.run_dir.finish())
