"""How commands read their options, what their help ends with, and how they show progress."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

Item = TypeVar("Item")
HOWTO = "docs/howto.md#all-commands"


class ExactParser(argparse.ArgumentParser):
    """A parser that refuses abbreviated options, as do those of all commands below it.

    Its help ends with an example, and with the page of the documentation.
    """

    def __init__(self, *, example: str = "", page: str = HOWTO, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self.example = example
        self.page = page

    def format_help(self) -> str:
        """Return the help, with the example in a line of its own, so that it can be copied."""
        return super().format_help() + end_of_help(f"{self.prog} {self.example}", self.page)


def end_of_help(example: str, page: str) -> str:
    """Return the example of a command, and its page in a checkout of this project."""
    return f"\nexample:\n  {example}\n\ndocumentation: {page}\n"


def add_command(
    commands: Any,
    name: str,
    run: Callable[..., Any],
    text: str,
    example: str,
    page: str = HOWTO,
    details: str = "",
) -> Any:
    """Add a command that calls a function; return its parser.

    Its help ends with ``example``, which are arguments of the command, and ``page``.
    """
    description = text + details
    parser = commands.add_parser(
        name, help=text, description=description, example=example, page=page
    )
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
    redirect = sys.stdout.isatty()
    is_hidden = not console.is_terminal
    bar = Progress(console=console, transient=True, redirect_stdout=redirect, disable=is_hidden)
    with bar:
        yield from bar.track(items, total, description=text)


def waiting(text: str) -> AbstractContextManager[object]:
    """Show a text on the error stream while something is done, if that is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(text)
