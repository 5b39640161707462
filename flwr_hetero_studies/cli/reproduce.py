"""The command ``reproduce``: an experiment of a paper, ours beside theirs."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_hetero_studies.core.experiment import Experiment, Options, Outcome

WIDTH = 120
"""Columns of tables that go to a file."""


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "run an experiment of one of the papers and print it beside the paper's numbers"
    parser = commands.add_parser("reproduce", help=text, description=text)
    add = parser.add_argument
    add("paper", nargs="?", default="all", help="tifl, biased-local-sgd, cd-grab, mercury, pgd")
    add(
        "figure", nargs="?", default="all", help="as --list has it, such as figure-3 (default: all)"
    )
    add("--fast", action="store_true", help="within ten minutes on two cores, with smaller data")
    add("--data", default="", help="Parquet folder; by default data that need no download")
    add("--seed", type=int, default=0)
    add("--list", action="store_true", help="print a line per experiment and end")
    add("--html", type=Path, metavar="PAGE", help="draw curves and tables on a page")
    add("--results", type=Path, metavar="JSONL", help="keep what was found in this file")
    page = "write such a file's page of verdicts, in Markdown, and end"
    add("--page", type=Path, metavar="JSONL", help=page)
    parser.set_defaults(run=_reproduce)


def _reproduce(options: argparse.Namespace) -> None:
    from flwr_hetero_studies.core import coverage, page
    from flwr_hetero_studies.core.catalogue import find
    from flwr_hetero_studies.core.experiment import Options

    if options.page:
        return print(coverage.page(find(), coverage.read(options.page)), end="")
    chosen = find(options.paper, options.figure)
    if options.list:
        width = max((len(f"{each.paper} {each.name}") for each in chosen), default=0)
        for each in chosen:
            name = f"{each.paper} {each.name}".ljust(width)
            print(f"{name}  {each.title}{'' if each.run else ' (not run)'}")
        return None
    how = Options(options.fast, options.data, options.seed)
    form, done = "fast" if how.fast else "full", []
    for each in chosen:
        if (found := _run(each, how)) is None:
            continue
        outcome, took_s = found
        done.append((each, outcome))
        if options.results:
            line = coverage.line_of(each, outcome, form=form, took_s=took_s)
            coverage.keep(options.results, line)
        if options.html:
            page.write(done, how.fast, options.html)
    return None


def _run(experiment: "Experiment", how: "Options") -> "tuple[Outcome, float] | None":
    """Run one, and print it; None if it cannot be run."""
    from flwr_hetero._flwr import only_errors
    from flwr_hetero_studies.core.experiment import NOT_RUN, NotHereError

    print(f"{experiment.paper} {experiment.name}: {experiment.title}")
    if experiment.run is None:
        print(f"{NOT_RUN}: {experiment.why}\n")
        return None
    start_s = time.perf_counter()
    try:
        with only_errors():
            outcome = experiment.run(how)
    except NotHereError as error:
        print(f"{NOT_RUN}: {error}\n")
        return None
    took_s = time.perf_counter() - start_s
    _print(outcome)
    print(f"{outcome.verdict}, {took_s:.0f} s")
    for name, text in experiment.notes(outcome.verdict, fast=how.fast).items():
        print(f"{name}: {text}")
    print()
    return outcome, took_s


def _print(outcome: "Outcome") -> None:
    """Print the table and the claims."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from flwr_hetero_studies.core.experiment import CLAIMS

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, width=width)
    claims = [claim.cells for claim in outcome.claims]
    for head, rows in ((outcome.head, outcome.rows), (CLAIMS, claims)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)
