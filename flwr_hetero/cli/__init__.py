"""The command ``flwr-hetero``."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, NoReturn

from flwr_hetero import __version__
from flwr_hetero.cli import doctor, fleet, run, runs

# Entry points by which other packages add commands.
COMMANDS = "flwr_hetero.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error is one line on the error stream."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [fleet.SUPERNODE]:
        # all options but one are Flower's
        return fleet.supernode(given[1:])
    options = _parser().parse_args(given or ["--help"])
    try:
        return int(options.run(options) or 0)
    except (ValueError, OSError, RuntimeError) as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        return _failed(f"{package} is not installed: {doctor.hint_for(package)}")
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # Elsewhere it is a mistake of ours; of a run directory, what stands in its files.
        if not (folders := getattr(options, "directories", ())):
            raise
        where, kind = ", ".join(map(str, folders)), type(error).__name__
        return _failed(f"{where}: the history cannot be read ({kind}: {error})")


def _failed(why: str) -> int:
    print(f"flwr-hetero: error: {why}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest command, option or choice to a mistyped one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over here: the command's own parser knows its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = re.findall(r"--?[a-z][\w-]*", self.format_usage())
            self.error(f"unknown: {' '.join(unknown)}{_nearest(unknown[0], options)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Name the nearest choice."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            known = re.findall(r"[\w-]+", wrong[2])
            near = _nearest(wrong[1], known) or f" (known are {', '.join(known)})"
            message = f"unknown: {wrong[1]}{near}"
        super().error(message)


def _nearest(typed: str, known: Sequence[str]) -> str:
    close = get_close_matches(typed.partition("=")[0], known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flwr-hetero", description="Federated runs on unequal devices: run, watch, compare."
    )
    parser.add_argument("--version", action="version", version=f"flwr-hetero {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (run, runs, fleet, doctor):
        module.add(commands)
    for entry in sorted(entry_points(group=COMMANDS), key=lambda each: each.name):
        # A package whose command is broken must not take the other commands with it.
        try:
            entry.load()(commands)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            print(f"flwr-hetero: no command {entry.name} ({entry.value}): {why}", file=sys.stderr)
    return parser
