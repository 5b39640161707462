"""Commands on run directories: ``report`` and ``compare``."""

import argparse
import json
from pathlib import Path
from typing import Any

from flwr_hetero.errors import invalid

# As typed, and in the history.
CLOCKS = {"virtual": "virtual_s", "wall": "wall_s", "round": "round"}


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    text = "rebuild report.html of runs from their histories"
    report = commands.add_parser("report", help=text, description=text)
    report.set_defaults(run=_report)
    text = "write a page that says which run was sooner; runs that differ in the seed are one kind"
    compare = commands.add_parser("compare", help=text, description=text)
    compare.set_defaults(run=_compare)
    for command, folders in (
        (report, "run directory (output-dir)"),
        (compare, "run directory (output-dir), that of the baseline first"),
    ):
        command.add_argument("directories", nargs="+", metavar="DIR", help=folders)
    add = compare.add_argument
    text = "what to compare, such as accuracy or cd_grab/pairs (default: the first run's "
    add("--metric", help=f"{text}accuracy, else its loss)")
    text = "value to reach (default: the baseline's end less a point, the end being the median "
    add("--target", type=float, help=f"{text}of the last five evaluations)")
    text = "what to measure by (default: the first of these that all runs have)"
    add("--clock", choices=CLOCKS, help=text)
    text = "the page, one file that works offline (default: %(default)s)"
    add("--out", type=Path, default=Path("compare.html"), metavar="PAGE.html", help=text)
    text = "write the figures as JSON, too, beside the page"
    add("--json", action="store_true", help=text)


def _report(options: argparse.Namespace) -> None:
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _compare(options: argparse.Namespace) -> None:
    from flwr_hetero.report.compare import compare, figures, read_runs
    from flwr_hetero.report.compare.page import write_page

    # Anything else may be a run directory that stands behind the option by mistake.
    if options.out.suffix != ".html":
        raise invalid("--out", str(options.out), "end in .html")
    clock = CLOCKS.get(options.clock)
    comparison = compare(
        read_runs(options.directories), options.metric, options.target, clock=clock
    )
    page = write_page(comparison, options.out)
    if options.json:
        text = json.dumps(figures(comparison), indent=2) + "\n"
        page.with_suffix(".json").write_text(text, encoding="utf-8")
    print("\n".join([*comparison.sentences, str(page)]))
