"""Commands on run directories: ``report`` and ``compare``."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_hetero.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.report.compare.groups import Comparison

CLOCKS = {"virtual": "virtual_s", "wall": "wall_s", "round": "round"}
"""As typed, and in the history."""


def add(commands: Any) -> None:
    """Add the commands to the command line."""
    report = commands.add_parser(
        "report", help="rebuild the pages of runs", description=_report.__doc__
    )
    report.set_defaults(run=_report)
    compare = commands.add_parser(
        "compare", help="write a page that says which run was sooner", description=_compare.__doc__
    )
    compare.set_defaults(run=_compare)
    for command in (report, compare):
        command.add_argument(
            "directories", nargs="+", metavar="DIR", help="run directory (output-dir)"
        )
    compare.add_argument(
        "--metric",
        help="what to compare, such as accuracy or cd_grab/own_share (default: "
        "the first run's accuracy, else its loss)",
    )
    way = compare.add_mutually_exclusive_group()
    way.add_argument(
        "--lower",
        dest="falls",
        action="store_true",
        default=None,
        help="lower is better (default: by the metric's name, such as loss, error or bound)",
    )
    way.add_argument(
        "--higher", dest="falls", action="store_false", default=None, help="higher is better"
    )
    compare.add_argument(
        "--target",
        type=float,
        help="value to reach (default: the baseline's end less a point, the end being the median "
        "of the last five evaluations)",
    )
    compare.add_argument(
        "--baseline",
        metavar="RUN",
        help="folder of the run to measure against (default: the first)",
    )
    compare.add_argument(
        "--clock",
        choices=CLOCKS,
        help="what to measure by (default: the first of these that all runs have)",
    )
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("compare.html"),
        metavar="PAGE.html",
        help="the page, one file that works offline (default: compare.html)",
    )
    for kind in ("json", "csv"):
        compare.add_argument(
            f"--{kind}",
            type=Path,
            nargs="?",
            const=Path(),
            metavar="FILE",
            help=f"write the figures as {kind.upper()}, too (default: beside the page)",
        )


def _report(options: argparse.Namespace) -> None:
    """Rebuild report.html of one or more runs from their histories."""
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _compare(options: argparse.Namespace) -> None:
    """Compare runs, the first being the baseline; those that differ in the seed are one kind."""
    from flwr_hetero.report.compare.groups import compare, csv_text, figures, read_runs
    from flwr_hetero.report.compare.page import write_page

    outs = (options.out, options.json, options.csv)
    if options.out.suffix != ".html":
        raise invalid("--out", str(options.out), "end in .html")
    if folders := [str(out) for out in outs if out not in (None, Path()) and out.is_dir()]:
        raise invalid("FILE", folders[0], "be a file, not a folder", "put it behind the folders")
    comparison = compare(
        read_runs(options.directories),
        options.metric,
        options.target,
        baseline=options.baseline,
        clock=CLOCKS.get(options.clock),
        falls=options.falls,
    )
    page = write_page(comparison, options.out)
    for kind, file in (("json", options.json), ("csv", options.csv)):
        if file is not None:
            path = options.out.with_suffix(f".{kind}") if file == Path() else file
            is_json = kind == "json"
            text = json.dumps(figures(comparison), indent=2) if is_json else csv_text(comparison)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    _print_table(comparison)
    print("\n".join([*comparison.sentences, str(page)]))


def _print_table(comparison: "Comparison") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flwr_hetero.report.compare.verdict import cost_text, mean_of, times
    from flwr_hetero.report.style import figure, words

    judge = comparison.judge
    target = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("runs", f"to {target}", "speed-up", "end"):
        table.add_column(name, justify="right")
    for group in comparison.groups:
        cost = mean_of([run.cost for run in group.results if run.cost is not None])
        end = mean_of([run.end for run in group.results])
        table.add_row(
            Text(group.label),
            str(len(group.runs)),
            cost_text(judge.clock, cost, group.pace.unit),
            times(group.speed.factor) if group.speed else "",
            figure(judge.metric, end or 0.0),
        )
    Console().print(table)
