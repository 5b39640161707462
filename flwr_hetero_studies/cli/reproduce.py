"""The command ``reproduce``: an experiment of a paper, ours beside theirs."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_hetero_studies.core.experiment import Experiment
    from flwr_hetero_studies.core.plan import Options
    from flwr_hetero_studies.core.record import Line

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


def _reproduce(given: argparse.Namespace) -> None:
    from flwr_hetero.errors import invalid
    from flwr_hetero_studies.core import page, record
    from flwr_hetero_studies.core.bench import page_of
    from flwr_hetero_studies.core.plan import Options
    from flwr_hetero_studies.papers.cases import find

    if given.page:
        # an empty record would be a page of experiments that were not run
        if not any(path.exists() for path in record.files_of(given.page)):
            raise invalid("results", str(given.page), "hold the lines that --results writes")
        return print(page_of("papers", record.read(given.page), given.page.parent), end="")
    chosen = find(given.paper, given.figure)
    if given.list:
        return _list(chosen)
    options, done = Options({}, given.data, [given.seed], given.fast), []
    for each in chosen:
        if (line := _run(each, options)) is None:
            continue
        done.append((each, line))
        if given.results:
            _keep(given.results, line)
        if given.html:
            page.write(done, given.html)
    return None


def _list(chosen: "Sequence[Experiment]") -> None:
    width = max((len(f"{each.paper} {each.name}") for each in chosen), default=0)
    for each in chosen:
        name = f"{each.paper} {each.name}".ljust(width)
        print(f"{name}  {each.title}{'' if each.run else ' (not run)'}")


def _keep(path: Path, line: "Line") -> None:
    """Write a line in the place of an older one of the same experiment."""
    from flwr_hetero_studies.core import record

    names = {key: line["case"][key] for key in ("experiment", "name")}
    lines = record.read(path)
    # the fast form and the full one are the same experiment
    older = record.of(lines, **names)
    record.pack(path, [*(each for each in lines if each not in older), line])


def _run(experiment: "Experiment", options: "Options") -> "Line | None":
    """Run one, and print it; None if it cannot be run."""
    from flwr_hetero_studies.core.bench import execute
    from flwr_hetero_studies.core.experiment import NOT_RUN
    from flwr_hetero_studies.core.page import notes_of
    from flwr_hetero_studies.core.plan import Data
    from flwr_hetero_studies.papers.cases import trial_of

    print(f"{experiment.paper} {experiment.name}: {experiment.title}")
    if experiment.run is None:
        print(f"{NOT_RUN}: {experiment.why}\n")
        return None
    with tempfile.TemporaryDirectory() as scratch:
        data = Data(options.data, scratch)
        # with torch's own threads: nothing else goes on beside it
        line = execute("papers", trial_of(experiment, options), data, threads=None)
    found = line["metrics"]
    if "not_here" in found:
        print(f"{NOT_RUN}: {found['not_here']}\n")
        return None
    _print(found)
    print(f"{found['verdict']}, {found['took_s']:.0f} s")
    print("\n".join(notes_of(experiment, line)), end="\n\n")
    return line


def _print(found: "dict[str, Any]") -> None:
    """Print the table and the claims."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from flwr_hetero_studies.core.experiment import CLAIMS, Claim

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, width=width)
    claims = [Claim(**claim).cells for claim in found["claims"]]
    for head, rows in ((found["head"], found["rows"]), (CLAIMS, claims)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)
