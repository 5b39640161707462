"""Commands on run directories: ``report``, ``watch`` and ``compare``."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from flwr_hetero.cli.run import add_command
from flwr_hetero.errors import invalid
from flwr_hetero.files import replace
from flwr_hetero.report.history import HISTORY, LOCK, MODEL, REPORT, HistoryReader

# As typed, and in the history.
CLOCKS = {"virtual": "virtual_s", "wall": "wall_s", "round": "round"}
# Seconds between two looks at the run, and after which a browser reads the page again.
LOOK_S, REFRESH_S = 1.0, 5
# Most part of a processor that pages of a run in progress may take.
WATCH_SHARE = 0.1
KILLED = "The run was killed: its process is gone. resume=true continues from its checkpoint."


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    folder = "run directory (output-dir)"
    text = "rebuild report.html of runs from their histories"
    report = add_command(commands, "report", _report, text)
    report.add_argument("directories", nargs="+", metavar="DIR", help=folder)
    text = "make the page of a run in progress again after each round"
    watch = add_command(commands, "watch", _watch, text)
    watch.add_argument("directory", type=Path, metavar="DIR", help=folder)
    text = "write a page that says which run was sooner; runs that differ in the seed are one kind"
    add = add_command(commands, "compare", _compare, text).add_argument
    add("directories", nargs="+", metavar="DIR", help=f"{folder}, that of the baseline first")
    text = "what to compare, such as accuracy or cd_grab/pairs (default: the first run's "
    add("--metric", help=f"{text}accuracy, else its loss)")
    text = "value to reach; 85 is read as 85 %% of a metric from 0 to 1 (default: the baseline's "
    text += "end less a point, the end being the median of the last five evaluations, or with "
    add("--target", type=float, help=f"{text}fewer than five the last one)")
    text = "what to measure by (default: the first of these that all runs have)"
    add("--clock", choices=CLOCKS, help=text)
    text = "the page, one file that works offline (default: %(default)s)"
    add("--out", type=Path, default=Path("compare.html"), metavar="PAGE.html", help=text)
    add("--json", action="store_true", help="write the figures as JSON, too, beside the page")


def _report(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _watch(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import run_data, write_page

    folder = options.directory.expanduser().absolute()
    history, reader, known, pause_s = folder / HISTORY, HistoryReader(folder), (0, 0), 0.0
    # a folder without a run is refused before a page of it is promised
    reader.read()
    print(f"{(folder / REPORT).as_uri()}  (ends with the run, or by Ctrl-C)", flush=True)
    try:
        while _is_locked(folder / LOCK):
            pause_s -= LOOK_S
            status = history.stat() if pause_s <= 0 and history.is_file() else None
            if status and (now := (status.st_ino, status.st_size)) != known:
                began_s, known = time.process_time(), now
                data = run_data(folder, reader.read())
                write_page(data | {"refresh": REFRESH_S}, folder / REPORT)
                # the page of a long run takes its time
                pause_s = (time.process_time() - began_s) / WATCH_SHARE
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return
    # without what makes a browser read it again
    write_page(run_data(folder, reader.read()), folder / REPORT)
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


def _compare(options: argparse.Namespace) -> None:
    from flwr_hetero.report.compare import compare, figures, read_runs
    from flwr_hetero.report.compare.page import write_page

    # Anything else may be a run directory that stands behind the option by mistake.
    if options.out.suffix != ".html":
        raise invalid("--out", str(options.out), "end in .html")
    clock = CLOCKS.get(options.clock)
    runs = read_runs(options.directories)
    comparison = compare(runs, options.metric, options.target, clock=clock)
    page = write_page(comparison, options.out)
    if options.json:
        text = json.dumps(figures(comparison), indent=2) + "\n"
        replace(page.with_suffix(".json"), text.encode())
    print("\n".join([*comparison.sentences, str(page)]))
