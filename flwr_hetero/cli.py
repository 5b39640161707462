"""The command ``flwr-hetero``: rebuild reports, compare runs, start real fleets."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_hetero import __version__
from flwr_hetero.errors import invalid
from flwr_hetero.report.history import CLOCKS

if TYPE_CHECKING:
    from flwr_hetero.report.compare import Comparison

FORMATS = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["fleet"]:  # has a command line of its own
        from flwr_hetero.fleet.cli import main as fleet

        return fleet(words[1:], "flwr-hetero fleet")
    options = _parser().parse_args(words)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"flwr-hetero: error: {error}", file=sys.stderr)
        return 2
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        where, kind = ", ".join(map(str, options.directories)), type(error).__name__
        print(f"flwr-hetero: error: {where}: what no run writes ({kind}: {error})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        hint = "pip install 'flwr-hetero[report]'"
        print(f"flwr-hetero: error: {error.name} is not installed: {hint}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flwr-hetero", description="Reports of federated runs on unequal devices."
    )
    parser.add_argument("--version", action="version", version=f"flwr-hetero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report", help="rebuild report.html and the plots of runs", description=_report.__doc__
    )
    report.set_defaults(run=_report)
    compare = commands.add_parser(
        "compare", help="show several runs on one axis", description=_compare.__doc__
    )
    compare.set_defaults(run=_compare)
    for command in (report, compare):
        command.add_argument(
            "directories", nargs="+", metavar="DIR", help="run directory (output-dir)"
        )
    compare.add_argument(
        "--metric",
        help="what to compare, such as accuracy or herding/herding-bound (default: "
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
        help="value to reach (default: 1 %% short of what all runs hold at their end, each "
        "judged by the median of its last five evaluations)",
    )
    compare.add_argument(
        "--baseline", metavar="RUN", help="run to measure against (default: the first)"
    )
    compare.add_argument(
        "--clock",
        choices=[clock.removesuffix("_s") for clock in CLOCKS],
        default="virtual",
        help="what to measure by (default: virtual)",
    )
    compare.add_argument(
        "--out", type=Path, default=Path("compare.png"), help="the figure (default: compare.png)"
    )
    commands.add_parser("fleet", help="start, inspect and end a real fleet on this machine")
    return parser


def _report(options: argparse.Namespace) -> None:
    """Rebuild report.html and the plots of one or more runs from their histories."""
    from flwr_hetero.report.page import write_report

    for directory in options.directories:
        print(write_report(directory))


def _compare(options: argparse.Namespace) -> None:
    """Compare runs by the time that each needs to reach the same quality."""
    from flwr_hetero.report.compare import compare, draw_comparison, read_runs
    from flwr_hetero.report.style import LIGHT

    if options.out.suffix not in FORMATS:
        raise invalid("--out", str(options.out), f"end in {', '.join(FORMATS)}")
    comparison = compare(
        read_runs(options.directories),
        options.metric,
        options.target,
        baseline=options.baseline,
        clock=next(clock for clock in CLOCKS if clock.startswith(options.clock)),
        falls=options.falls,
    )
    _print_table(comparison, options.target is None)
    with LIGHT.applied():
        draw_comparison(comparison).savefig(options.out)
    print(options.out.absolute())


def _print_table(comparison: "Comparison", target_is_default: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flwr_hetero.report.compare import clock_text, cost_text, units
    from flwr_hetero.report.nodes import last_fairness
    from flwr_hetero.report.style import figure, words

    metric, clock, counted = comparison.metric, comparison.clock, units(comparison.runs)
    table = Table(
        title=f"{words(metric)} against {clock_text(clock, comparison.runs)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run", overflow="fold")
    for name in (" or ".join(counted), "final", "best", "in all", "to target", "speed-up"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        reached = cost_text(clock, row.to_target, counted[0])
        speed_up = "" if row.speed_up is None else f"{row.speed_up:.3g} x"
        quality = (figure(metric, row.final), figure(metric, row.best))
        total = cost_text(clock, row.total, counted[0])
        table.add_row(Text(row.name), str(row.rounds), *quality, total, reached, speed_up)
    console = Console()
    console.print(table)
    why = "1 % short of what all runs hold at their end" if target_is_default else "as asked"
    target = f"{figure(metric, comparison.target)} ({comparison.target:.6g})"
    console.print(
        Text(f"Target: {words(metric)} {target}, {why}. Baseline: {comparison.baseline}.")
    )
    for name, run in comparison.runs.items():
        if (found := last_fairness(run)) is not None:
            worst, mean = (figure(found.metric, value) for value in (found.worst, found.mean))
            said = f"{words(found.metric)} {worst} on the worst tenth, {mean} on all"
            console.print(
                Text(f"{name}: {said} {found.nodes} nodes, {run.unit} {found.round}."),
                soft_wrap=True,
            )
