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

# What the extra ``report`` installs, and a run needs before its end.
NEEDED = ("filelock", "safetensors", "jinja2", "plotly")
# Distributions whose versions a run notes.
PACKAGES = ("flwr-hetero", "flwr", "numpy", "torch")
# Seconds for which a resume waits for the run before, which may be at its report.
ENDING_S = 30.0


class RunDirectory:
    """Record a run, round by round; what is written survives a crash.

    ValueError if the path is relative, is no folder that can be written to, is in use by another
    run (for a resume: still after half a minute), holds a run without ``resume``, or no checkpoint;
    ModuleNotFoundError without the packages of the extra ``report``.

    Parameters
    ----------
    path : str or Path
        Absolute path of the folder; ``~`` is the home directory. Made if it is missing.
    config : mapping
        Settings and seeds. What may be a secret by its name or form is not written.
    resume : bool, keyword-only
        Continue the run in the folder, whose history is cut back to the checkpoint.
    argument : str, keyword-only
        What the caller calls the path, for errors.

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
        if missing := [name for name in NEEDED if util.find_spec(name) is None]:
            hint = install_hint("report", *missing)
            raise ModuleNotFoundError(f"a run directory needs {missing[0]}: {hint}")
        self.path, self.resume = Path(path).expanduser(), resume
        self.checkpoint_dir, self._history = self.path / files.CHECKPOINT, self.path / files.HISTORY
        if not self.path.is_absolute():
            raise invalid(argument, str(path), "be an absolute path")
        if not resume and self._has_history():
            raise invalid(argument, str(path), "not hold another run", "resume=True continues it")
        if resume and not any(self.checkpoint_dir.glob("*.npz")):
            hint = "correct the path, or leave resume out to start a run in a folder of its own"
            raise invalid(argument, str(path), "hold a checkpoint to resume from", hint)
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock(argument)
            self._config = self._make_config(config or {})
            # A resume that is refused leaves the settings: it writes them when it cuts the history.
            if not resume:
                replace(self.path / files.CONFIG, self._config)
            # a resume that is refused leaves its time: a run has ended if its model is newer
            if not self._history.exists():
                self._history.touch()
        except OSError as error:
            raise invalid(argument, str(path), f"be a folder to write to ({error})") from error

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a round's line to the history; it is on disk when this returns.

        NumPy values become plain numbers, numbers that are not finite become null. A ValueError
        refuses a ``round`` that is no integer from 0.
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
                # An incomplete line is dropped; the others stay as they were written.
                with suppress(ValueError):
                    kept[files.parse(line)["round"]] = line.rstrip("\n") + "\n"
        lost = next((number for number in range(last_round + 1) if number not in kept), None)
        if lost is not None:
            raise ValueError(
                f"{self._history} lacks round {lost}, the checkpoint is of round "
                f"{last_round}: put the file back, or start a run in another folder."
            )
        text = "".join(kept[number] for number in range(last_round + 1))
        replace(self._history, text.encode())
        replace(self.path / files.CONFIG, self._config)

    def save_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the global model, name to array, as ``model.safetensors`` in one step."""
        from safetensors.numpy import save  # an extra, needed for a model only

        # The format stores memory as it lies: strided arrays are copied first.
        whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        replace(self.path / files.MODEL, save(whole))

    def finish(self) -> Path:
        """Build the report, or log why it cannot be; return the directory's absolute path."""
        try:
            from flwr_hetero.report.page import write_report  # and plotly

            write_report(self.path)
        except Exception:
            logger.exception("no report; to build it later: flwr-hetero report %s", self.path)
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
            rule, hint = "be in use by one run only", "end that run first, or choose another folder"
            raise invalid(argument, str(self.path), rule, hint) from None
        return lock

    def _has_history(self) -> bool:
        return self._history.is_file() and self._history.stat().st_size > 0

    def _make_config(self, config: Mapping[str, Any]) -> bytes:
        now, versions = datetime.now(UTC).isoformat(timespec="seconds"), {}
        for name in PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        settings = {str(key).replace("_", "-"): files.plain(value) for key, value in config.items()}
        before = files.read_config(self.path) if self._has_history() else {}
        content = {
            "started": before.get("started", now),
            "resumed": [*before.get("resumed", []), now] if self._has_history() else [],
            "settings": masked(settings),
            "versions": versions,
            "python": platform.python_version(),
            "platform": platform.platform(),
        }
        return (json.dumps(content, indent=2) + "\n").encode()
