"""How commands read their options, what their help ends with, and how they show progress."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Item = TypeVar("Item")


class ExactParser(argparse.ArgumentParser):
    """A parser that refuses abbreviated options, as do those of all commands below it."""

    def __init__(self, **kwargs: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**kwargs, allow_abbrev=False, formatter_class=form)


def end_of_help(example: str, page: str = "docs/howto.md#all-commands") -> str:
    """Return an example of a command, and its page in a checkout of this project."""
    return f"example:\n  flwr-hetero {example}\n\ndocumentation: {page}"


def add_command(
    commands: Any, name: str, run: Callable[..., Any], text: str, end: str, details: str = ""
) -> Any:
    """Add a command that calls a function, with the end of its help; return its parser."""
    parser = commands.add_parser(name, help=text, description=text + details, epilog=end)
    parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser, name: str, *short: str) -> None:
    """Add an option of ``flwr run`` for the settings of an app or a simulation."""
    text = "as for flwr run: KEY=VALUE ..., with texts in quotes; may be given several times"
    names = (f"--{name}-config", *short)
    parser.add_argument(*names, action="append", default=[], metavar="KEYS", help=text)


def tracked(items: Iterable[Item], text: str, total: int) -> Iterator[Item]:
    """Yield items, and show a bar on the error stream if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # Lines that are printed meanwhile go above the bar, unless they go to a file.
    bar = Progress(console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    bar.disable = not console.is_terminal
    with bar:
        yield from bar.track(items, total, description=text)


def waiting(text: str) -> AbstractContextManager[object]:
    """Show a text on the error stream while something is done, if that is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(text)
