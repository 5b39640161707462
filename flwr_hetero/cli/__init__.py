"""The command ``flwr-hetero``."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from flwr_hetero import __version__
from flwr_hetero.cli import doctor, fleet, run, runs
from flwr_hetero.cli.parsing import ExactParser, end_of_help

# Entry points by which other packages add commands.
COMMANDS = "flwr_hetero.commands"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error or an interrupt is one line on the error stream."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("flwr-hetero: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    # The options of this command are those of Flower, which parses them.
    if words[:1] == [fleet.SUPERNODE]:
        return fleet.supernode(words[1:])
    options = _parser().parse_args(words or ["--help"])
    try:
        return int(options.run(options) or 0)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        return _fail(f"{package} is not installed: {doctor.hint_for(package)}")
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # A command on run directories fails like this if their files hold nonsense. Anywhere
        # else it is a bug, which needs its traceback.
        if "directories" not in options:
            raise
        folders = ", ".join(map(str, options.directories))
        return _fail(f"{folders}: the history cannot be read ({type(error).__name__}: {error})")


def _fail(reason: str) -> int:
    print(f"flwr-hetero: error: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    text = "Federated learning on devices of unequal speed: run apps, watch and compare runs."
    end = end_of_help("compare /tmp/fedavg /tmp/fedslice")
    parser = ExactParser(prog="flwr-hetero", description=text, epilog=end)
    parser.add_argument("--version", action="version", version=f"flwr-hetero {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (run, runs, fleet, doctor):
        module.add(commands)
    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        # A package whose command is broken must not disable the other commands.
        try:
            entry.load()(commands)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(
                f"flwr-hetero: no command {entry.name} ({entry.value}): {reason}", file=sys.stderr
            )
    return parser
