"""The command ``reproduce``: an experiment of a paper beside the paper's numbers."""

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from flwr_hetero.cli.parsing import add_command, end_of_help

if TYPE_CHECKING:
    from flwr_hetero_studies.core.experiment import Experiment
    from flwr_hetero_studies.core.plan import Options

WIDTH = 120
"""Columns of tables that go to a file."""


def add(commands: Any) -> None:
    text = "run an experiment of one of the papers and print it beside the paper's numbers"
    end = end_of_help("reproduce tifl figure-3 --fast", "flwr_hetero_studies/papers/report.md")
    parser = add_command(commands, "reproduce", _reproduce, text, end)
    add = parser.add_argument
    add("paper", nargs="?", default="all", help="tifl, biased-local-sgd, cd-grab, mercury, pgd")
    one = "as --list has it, such as figure-3 (default: all)"
    add("figure", nargs="?", default="all", help=one)
    add("--fast", action="store_true", help="some minutes on two cores, with smaller data")
    add("--data", default="", help="Parquet folder; by default data that need no download")
    add("--seed", type=int, default=0, help="the first of ten where training is random")
    add("--list", action="store_true", help="print a line per experiment and end")


def _reproduce(given: argparse.Namespace) -> None:
    from flwr_hetero_studies.core.plan import Options
    from flwr_hetero_studies.papers.cases import find

    chosen = find(given.paper, given.figure)
    width = max((len(f"{each.paper} {each.name}") for each in chosen), default=0)
    for each in chosen:
        if given.list:
            name = f"{each.paper} {each.name}".ljust(width)
            print(f"{name}  {each.title}{'' if each.run else ' (not run)'}")
        else:
            _run(each, Options({}, given.data, [given.seed], given.fast))


def _run(experiment: "Experiment", options: "Options") -> None:
    from flwr_hetero_studies.core.bench import execute
    from flwr_hetero_studies.core.experiment import NOT_RUN
    from flwr_hetero_studies.core.plan import Data
    from flwr_hetero_studies.papers.cases import trial_of

    print(f"{experiment.paper} {experiment.name}: {experiment.title}")
    if experiment.run is None:
        print(f"{NOT_RUN}: {experiment.why}\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        data = Data(options.data, scratch)
        # This is the only run, so torch may use all its threads.
        line = execute("papers", trial_of(experiment, options), data, threads=None)
    found = line["metrics"]
    if "not_here" in found:
        print(f"{NOT_RUN}: {found['not_here']}\n")
        return
    _print(found)
    print(f"{found['verdict']}, {found['took_s']:.0f} s")
    notes = experiment.notes(found["verdict"], fast=options.fast)
    print("\n".join(f"{kind}: {note}" for kind, note in notes.items()), end="\n\n")


def _print(found: "dict[str, Any]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from flwr_hetero_studies.core.criteria import Claim
    from flwr_hetero_studies.core.experiment import CLAIMS

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, width=width)
    claims = [Claim(**claim) for claim in found["claims"]]
    for head, rows in ((found["head"], found["rows"]), (CLAIMS, claims)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)
