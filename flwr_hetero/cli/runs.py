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
    report = commands.add_parser(
        "report", help="rebuild the pages of runs", description=_report.__doc__
    )
    report.set_defaults(run=_report)
    compare = commands.add_parser(
        "compare", help="write a page that says which run was sooner", description=_compare.__doc__
    )
    compare.set_defaults(run=_compare)
    for command in (report, compare):
        folders = "run directory (output-dir)"
        command.add_argument("directories", nargs="+", metavar="DIR", help=folders)
    add, way = compare.add_argument, compare.add_mutually_exclusive_group().add_argument
    text = "what to compare, such as accuracy or local_steps/gamma (default: the first run's "
    add("--metric", help=f"{text}accuracy, else its loss)")
    better = {"dest": "falls", "default": None}
    text = "lower is better (default: by the metric's name, such as loss, error or bound)"
    way("--lower", action="store_true", **better, help=text)
    way("--higher", action="store_false", **better, help="higher is better")
    text = "value to reach (default: the baseline's end less a point, the end being the median "
    add("--target", type=float, help=f"{text}of the last five evaluations)")
    text = "folder of the run to measure against (default: the first)"
    add("--baseline", metavar="RUN", help=text)
    text = "what to measure by (default: the first of these that all runs have)"
    add("--clock", choices=CLOCKS, help=text)
    page, text = (
        Path("compare.html"),
        "the page, one file that works offline (default: %(default)s)",
    )
    add("--out", type=Path, default=page, metavar="PAGE.html", help=text)
    for kind in ("json", "csv"):
        text = f"write the figures as {kind.upper()}, too (default: beside the page)"
        add(f"--{kind}", type=Path, nargs="?", const=Path(), metavar="FILE", help=text)


def _report(options: argparse.Namespace) -> None:
    """Rebuild report.html of one or more runs from their histories."""
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _compare(options: argparse.Namespace) -> None:
    """Compare runs, the first being the baseline; those that differ in the seed are one kind."""
    from flwr_hetero.report.compare import compare, csv_text, figures, read_runs
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
    print("\n".join([*comparison.sentences, str(page)]))
