"""The run directory: history, settings, versions, model, checkpoint."""

import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import check_count, install_hint, invalid
from flwr_hetero.files import replace
from flwr_hetero.report import history as files
from flwr_hetero.report.masking import masked

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

# Packages of the extra ``report`` without which a run would fail before or at its end.
NEEDED = ("filelock", "safetensors", "jinja2", "plotly")
# Distributions whose versions config.json records.
PACKAGES = ("flwr-hetero", "flwr", "numpy", "torch")
# A resume waits so many seconds for the previous run, which may still be making its report.
ENDING_S = 30.0


class RunDirectory:
    """Record a run, round by round, so that a crash loses nothing that was written.

    Parameters
    ----------
    path : str or Path
        Absolute path of the folder; ``~`` is the home directory. It is made if it does not exist.
    config : mapping, optional
        Settings and seeds. Values that may be secrets, by their names or form, are not written.
    resume : bool, keyword-only
        Continue the run in the folder. Its history is cut back to the checkpoint.
    argument : str, keyword-only
        What errors call the path.

    Raises
    ------
    ValueError
        If the path is relative or cannot be written to, if another run uses it (a resume waits
        half a minute first), if it holds a run and ``resume`` is False, or if it holds no
        checkpoint and ``resume`` is True.
    ModuleNotFoundError
        If packages of the extra ``report`` are not installed.

    Examples
    --------
    >>> RunDirectory("runs/first", {})
    Traceback (most recent call last):
    ...
    ValueError: path must be an absolute path, got 'runs/first'.
    """

    def __init__(
        self,
        path: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        argument: str = "path",
    ) -> None:
        missing = [name for name in NEEDED if util.find_spec(name) is None]
        if missing:
            hint = install_hint("report", *missing)
            raise ModuleNotFoundError(f"a run directory needs {missing[0]}: {hint}")
        self.path = Path(path).expanduser()
        self.resume = resume
        self.checkpoint_dir = self.path / files.CHECKPOINT
        self._history = self.path / files.HISTORY
        if not self.path.is_absolute():
            raise invalid(argument, str(path), "be an absolute path")
        if not resume and self._has_history():
            raise invalid(argument, str(path), "not hold another run", "resume=True continues it")
        if resume and not any(self.checkpoint_dir.glob("*.npz")):
            hint = "correct the path, or start a new run in another folder without resume"
            raise invalid(argument, str(path), "hold a checkpoint to resume from", hint)
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock(argument)
            self._config = self._make_config(config or {})
            # The checkpoint may still be refused: a resume writes nothing before cut_after().
            if not resume:
                replace(self.path / files.CONFIG, self._config)
            # Keep the time of an old file: a run counts as ended if its model is newer.
            if not self._history.exists():
                self._history.touch()
        except OSError as error:
            raise invalid(argument, str(path), f"be a folder to write to ({error})") from error

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add the line of a round to the history; it is on disk when this returns.

        NumPy values become plain numbers, and numbers that are not finite become null. ValueError
        if ``round`` is not a whole number of at least 0.
        """
        line = files.plain(record)
        check_count("round", line.get("round"))
        with self._history.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cut_after(self, last_round: int) -> None:
        """Drop the rounds after this one, -1 for all; ValueError if one up to it is missing."""
        kept: dict[int, str] = {}
        with self._history.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                # Drop lines that are not a round; the others stay as they were written.
                with suppress(ValueError):
                    kept[files.parse(line)["round"]] = line.rstrip("\n") + "\n"
        for number in range(last_round + 1):
            if number not in kept:
                raise ValueError(
                    f"{self._history} lacks round {number}, but the checkpoint is of round "
                    f"{last_round}: put the file back, or start a run in another folder."
                )
        text = "".join(kept[number] for number in range(last_round + 1))
        replace(self._history, text.encode())
        replace(self.path / files.CONFIG, self._config)

    def save_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the global model, name to array, as ``model.safetensors`` in one step."""
        from safetensors.numpy import save

        # safetensors stores the memory as it is, so strided arrays are copied first.
        contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        replace(self.path / files.MODEL, save(contiguous))

    def finish(self) -> Path:
        """Build the report, or log why that failed; return the directory's absolute path."""
        try:
            from flwr_hetero.report.page import write_report

            write_report(self.path)
        except Exception:
            logger.exception(
                "The report could not be built. To try again: flwr-hetero report %s", self.path
            )
        return self.path

    def close(self) -> None:
        """Let another run use the directory."""
        self._lock.release()

    def _take_lock(self, argument: str) -> "FileLock":
        from filelock import FileLock, Timeout

        wait_s = ENDING_S if self.resume else 0.0
        lock = FileLock(self.path / files.LOCK, wait_s, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            rule = "be in use by one run only"
            hint = "end that run first, or choose another folder"
            raise invalid(argument, str(self.path), rule, hint) from None
        return lock

    def _has_history(self) -> bool:
        return self._history.is_file() and self._history.stat().st_size > 0

    def _make_config(self, config: Mapping[str, Any]) -> bytes:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        versions = {}
        for name in PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        settings = {str(key).replace("_", "-"): files.plain(value) for key, value in config.items()}
        started = now
        resumed: list[str] = []
        if self._has_history():
            previous = files.read_config(self.path)
            started = previous.get("started", now)
            resumed = [*previous.get("resumed", []), now]
        content = {
            "started": started,
            "resumed": resumed,
            "settings": masked(settings),
            "versions": versions,
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        return (json.dumps(content, indent=2) + "\n").encode()
