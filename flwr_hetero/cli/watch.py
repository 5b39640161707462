"""The command ``watch``: the page of a run in progress, made again after each round."""

import argparse
import time
from pathlib import Path
from typing import Any

from flwr_hetero.report.history import HISTORY, LOCK, MODEL, REPORT

# Seconds between two looks at the run, and after which a browser reads the page again.
LOOK_S, REFRESH_S = 1.0, 5
KILLED = "The run was killed: its process is gone. resume=true continues from its checkpoint."


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "make the page of a run in progress again after each round"
    parser = commands.add_parser("watch", help=text, description=text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory (output-dir)")
    parser.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import run_data, write_page, write_report

    folder = options.directory.expanduser().absolute()
    history, known = folder / HISTORY, 0
    print(f"{(folder / REPORT).as_uri()}  (ends with the run, or by Ctrl-C)", flush=True)
    try:
        while _is_locked(folder / LOCK):
            if history.is_file() and (size := history.stat().st_size) != known:
                write_page(run_data(folder) | {"refresh": REFRESH_S}, folder / REPORT)
                known = size
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return
    # without what makes a browser read it again
    write_report(folder)
    print(f"The run has ended: {folder}" if has_ended(folder) else KILLED, flush=True)


def has_ended(folder: Path) -> bool:
    """Return whether a run has saved its model, which it does at its end."""
    model, history = folder / MODEL, folder / HISTORY
    return model.is_file() and model.stat().st_mtime >= history.stat().st_mtime


def _is_locked(path: Path) -> bool:
    """Return whether a run's process is alive: it holds the lock until it ends."""
    from filelock import FileLock, Timeout

    try:
        # To look must not make the file.
        if path.exists():
            FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False
