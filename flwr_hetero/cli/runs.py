"""Commands on run directories: ``report``, ``watch`` and ``compare``."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from flwr_hetero.cli.parsing import add_command, end_of_help, tracked
from flwr_hetero.errors import invalid
from flwr_hetero.files import replace
from flwr_hetero.report.history import HISTORY, LOCK, MODEL, REPORT, read_history

# Names of the clocks on the command line and in the history.
CLOCKS = {"virtual": "virtual_s", "wall": "wall_s", "round": "round"}
# Seconds between two looks at the run.
LOOK_S = 1.0
# Seconds after which a browser loads the page of a running run again.
REFRESH_S = 5
# The share of a processor that making pages of a running run may take.
WATCH_SHARE = 0.1
KILLED = "The run was killed: its process is gone. resume=true continues from its checkpoint."


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    folder = "run directory (output-dir)"
    end = end_of_help("report /tmp/fedavg /tmp/fedslice")
    report = add_command(commands, "report", _report, "rebuild report.html of runs", end)
    report.add_argument("directories", nargs="+", metavar="DIR", help=folder)

    text = "rebuild report.html after each round while a run is going on"
    watch = add_command(commands, "watch", _watch, text, end_of_help("watch /tmp/fedslice"))
    watch.add_argument("directory", type=Path, metavar="DIR", help=folder)

    text = "compare runs and write a page; runs that differ only in the seed are grouped"
    example = "compare /tmp/fedavg /tmp/fedslice --target 85"
    end = end_of_help(example, "docs/howto.md#compare-runs")
    compare = add_command(commands, "compare", _compare, text, end)
    compare.add_argument("directories", nargs="+", metavar="DIR", help=f"{folder}, baseline first")
    text = (
        "metric to compare, such as accuracy or cd_grab/pairs (default: accuracy of the first "
        "run, or its loss)"
    )
    compare.add_argument("--metric", help=text)
    text = (
        "value to reach; 85 means 85 %% for a metric from 0 to 1 (default: the baseline's final "
        "accuracy minus one percentage point; the final accuracy is the median of the last five "
        "evaluations, or the last of fewer)"
    )
    compare.add_argument("--target", type=float, help=text)
    text = "clock to compare by (default: the first of these that all runs have)"
    compare.add_argument("--clock", choices=CLOCKS, help=text)
    text = "the page, one file that works offline (default: %(default)s)"
    out = Path("compare.html")
    compare.add_argument("--out", type=Path, default=out, metavar="PAGE.html", help=text)
    text = "also write the figures as JSON beside the page"
    compare.add_argument("--json", action="store_true", help=text)


def _report(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _watch(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import run_data, write_page

    folder = options.directory.expanduser().absolute()
    # Refuse a folder without a run before announcing its page.
    read_history(folder)
    print(f"{(folder / REPORT).as_uri()}  (stops with the run, or with Ctrl-C)", flush=True)
    drawn = None
    pause_s = 0.0
    try:
        while _is_locked(folder / LOCK):
            pause_s -= LOOK_S
            status = (folder / HISTORY).stat()
            written = (status.st_ino, status.st_size)
            if pause_s <= 0 and written != drawn:
                drawn = written
                began_s = time.process_time()
                write_page(run_data(folder) | {"refresh": REFRESH_S}, folder / REPORT)
                # The page of a long run takes a while to make.
                pause_s = (time.process_time() - began_s) / WATCH_SHARE
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return
    # The last page is not to be loaded again.
    write_page(run_data(folder), folder / REPORT)
    print(f"The run has ended: {folder}" if has_ended(folder) else KILLED, flush=True)


def has_ended(folder: Path) -> bool:
    """Return whether a run has saved its model, which it does at its end."""
    model = folder / MODEL
    return model.is_file() and model.stat().st_mtime >= (folder / HISTORY).stat().st_mtime


def _is_locked(path: Path) -> bool:
    """Return whether a run's process is alive: it holds the lock until it ends."""
    from filelock import FileLock, Timeout

    # FileLock would make the file.
    if not path.exists():
        return False
    try:
        FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False


def _compare(options: argparse.Namespace) -> None:
    from flwr_hetero.report.compare import compare, figures, read_runs
    from flwr_hetero.report.compare.page import write_page

    # A name without .html may be a run directory that was put behind the option by mistake.
    if options.out.suffix != ".html":
        raise invalid("--out", str(options.out), "end in .html")
    runs = read_runs(options.directories, lambda paths: tracked(paths, "Reading", len(paths)))
    clock = CLOCKS.get(options.clock)
    comparison = compare(runs, options.metric, options.target, clock=clock)
    page = write_page(comparison, options.out)
    if options.json:
        text = json.dumps(figures(comparison), indent=2) + "\n"
        replace(page.with_suffix(".json"), text.encode())
    texts = [text.replace("\n", "\n  ") for text in comparison.sentences]
    print("\n".join([*texts, str(page)]))
