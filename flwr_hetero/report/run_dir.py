"""Where a run comes from: versions, platform, command, and settings as plain JSON."""

import json
import logging
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid
from flwr_hetero.report.history import (
    CHECKPOINT,
    CONFIG,
    HISTORY,
    MODEL,
    read_config,
    read_history,
    replace,
)

PACKAGES = ("flwr-hetero", "flwr", "numpy", "torch")
"""Distributions whose versions a run notes."""


SECRET = re.compile(r"token|password|passwd|secret|api[-_]?key", re.IGNORECASE)


HIDDEN = "(hidden)"


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | PurePath):
        return [plain(item) for item in value]
    return str(value)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make a run's settings fit to be written down."""
    return {
        str(key).replace("_", "-"): HIDDEN if SECRET.search(str(key)) else plain(value)
        for key, value in config.items()
    }


def command_line(arguments: Iterable[str]) -> str:
    """Write a command as one would type it, without its secrets."""
    words: list[str] = []
    hide_next = False
    for word in arguments:
        option, equals, _ = word.partition("=")
        is_secret = word.startswith("-") and bool(SECRET.search(option))
        if hide_next:
            words.append(shlex.quote(HIDDEN))
        elif is_secret and equals:
            words.append(f"{option}={shlex.quote(HIDDEN)}")
        else:
            words.append(shlex.quote(word))
        hide_next = is_secret and not equals and not hide_next
    return " ".join(words)


def surroundings() -> dict[str, Any]:
    """Note what a run runs on."""
    return {
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": command_line(sys.argv),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


logger = logging.getLogger(__name__)


class RunDirectory:
    """Write down a run while it goes on; what is written survives a crash.

    Parameters
    ----------
    path : str or Path
        Absolute path of the folder; ``~`` is the home directory. Made if it is missing.
    config : mapping
        Settings and seeds. What looks like a token or a password is not written down.
    resume : bool, keyword-only
        Continue the run that is in the folder. Its history is cut back to the checkpoint, so
        that no round stands twice. Its settings are replaced then, and not before: a run that
        refuses the checkpoint leaves them as they were.

    Raises
    ------
    ValueError
        If the path is relative (a ServerApp does not run where you typed the command), is no
        folder that can be written to, or holds another run and ``resume`` is not set.

    Examples
    --------
    >>> RunDirectory("runs/first", {})
    Traceback (most recent call last):
    ...
    ValueError: output-dir must be an absolute path, got 'runs/first': begin it with / or ~.
    """

    def __init__(
        self, path: str | Path, config: Mapping[str, Any] | None = None, *, resume: bool = False
    ) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_absolute():
            raise invalid("output-dir", str(path), "be an absolute path", "begin it with / or ~")
        if not resume and self._has_history():
            raise invalid(
                "output-dir",
                str(path),
                "not hold another run",
                "choose a new folder, or resume that run",
            )
        self._last_round = -1
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._config: bytes | None = self._make_config({} if config is None else config)
            if not self._has_history():
                self._write_config()
            (self.path / HISTORY).touch()
            if self._has_history():
                has_checkpoint = any(self.checkpoint_dir.iterdir())
                self._cut_after(read_history(self.path).last_round if has_checkpoint else -1)
        except OSError as error:
            raise invalid(
                "output-dir", str(path), f"be a folder to write to ({error})", "choose another"
            ) from error

    @property
    def checkpoint_dir(self) -> Path:
        """Folder for what is needed to resume."""
        return self.path / CHECKPOINT

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a round's line to the history; it is on disk when this returns.

        Parameters
        ----------
        record : mapping
            Facts of the round, see :mod:`flwr_hetero.report.history`; at least ``round``.
            NumPy values become plain numbers, numbers that are not finite become null. Lines of
            this round and of later ones, left by a run that is being resumed, are dropped.

        Raises
        ------
        ValueError
            If ``round`` is not an integer from 0.
        """
        facts = plain(record)
        number = facts.get("round")
        if type(number) is not int or number < 0:
            raise invalid("round", number, "be an integer from 0", "number the rounds")
        self._write_config()
        if number <= self._last_round:
            self._cut_after(number - 1)
        with (self.path / HISTORY).open("a", encoding="utf-8") as file:
            file.write(_line(facts))
            file.flush()
            os.fsync(file.fileno())
        self._last_round = number

    def cut_after(self, last_round: int) -> None:
        """Drop the lines of rounds after the one that a resumed run continues from.

        Parameters
        ----------
        last_round : int
            The last round to keep; -1 drops all.
        """
        self._write_config()
        self._cut_after(last_round)

    def _cut_after(self, last_round: int) -> None:
        kept = [r for r in read_history(self.path).rounds if r["round"] <= last_round]
        replace(self.path / HISTORY, "".join(map(_line, kept)).encode())
        self._last_round = kept[-1]["round"] if kept else -1

    def save_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the global model as ``model.safetensors``, whole or not at all.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            Name to parameters, any shape and numeric dtype.
        """
        from safetensors.numpy import save  # an extra: a run without a model needs it not

        whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        replace(self.path / MODEL, save(whole))

    def finish(self) -> Path:
        """Build the report from what is on disk.

        Returns
        -------
        Path
            Absolute path of the run directory; ``report.html`` lies in it.

        Notes
        -----
        A report that cannot be built is logged and never takes the run's result away;
        ``flwr-hetero report DIR`` builds it later.
        """
        try:
            from flwr_hetero.report.page import write_report

            write_report(self.path)
        except Exception:
            logger.exception("no report: mend this, then run: flwr-hetero report %s", self.path)
        return self.path

    def _has_history(self) -> bool:
        path = self.path / HISTORY
        return path.is_file() and path.stat().st_size > 0

    def _make_config(self, config: Mapping[str, Any]) -> bytes:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        facts: dict[str, Any] = {"started": now, "resumed": []}
        if self._has_history():
            before = read_config(self.path)
            facts["started"] = before.get("started", now)
            facts["resumed"] = [*before.get("resumed", []), now]
        facts |= {"settings": settings_of(config), **surroundings()}
        return (json.dumps(facts, indent=2) + "\n").encode()

    def _write_config(self) -> None:
        if self._config is not None:
            replace(self.path / CONFIG, self._config)
            self._config = None


def _line(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, allow_nan=False) + "\n"
