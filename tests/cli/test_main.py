"""What all commands share: options are spelled out, and an interrupt is one line."""

import argparse
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from flwr_hetero import cli
from flwr_hetero.cli import fleet, runs
from flwr_hetero.cli.parsing import tracked, waiting

ROOT = Path(__file__).parents[2]


def parsers_below(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_below(command)


def test_no_command_takes_abbreviated_options():
    parsers = list(parsers_below(cli._parser()))
    names = {parser.prog for parser in parsers}
    assert {"flwr-hetero fleet up", "flwr-hetero advise", "flwr-hetero study"} <= names
    assert not [parser.prog for parser in parsers if parser.allow_abbrev]


def anchors(page):
    """Name the headings of a page as GitHub does."""
    heads = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_help_ends_with_an_example_and_a_page(monkeypatch, capsys):
    monkeypatch.setattr("flwr_hetero.fleet.supernode.main", lambda arguments: print("Flower's"))
    for parser in parsers_below(cli._parser()):
        words = parser.prog.split()
        is_of_flower = words[-1] == fleet.SUPERNODE
        with nullcontext() if is_of_flower else pytest.raises(SystemExit):
            cli.main([*words[1:], "--help"])
        said = capsys.readouterr().out
        example, page = re.search(r"example:\n  (.*)\n\ndocumentation: (.*)\n", said).groups()
        assert example.startswith(parser.prog)
        assert is_of_flower or cli._parser().parse_args(shlex.split(example)[1:])
        page, _, anchor = page.partition("#")
        assert not anchor or anchor in anchors(page)
        assert (ROOT / page).is_file()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(is_terminal, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with waiting("Checking"):
        shown = list(tracked(iter("ab"), "Reading", 2))
    output = capsys.readouterr()
    assert (shown, output.out) == (["a", "b"], "")
    assert [text in output.err for text in ("Checking", "Reading")] == [is_terminal] * 2


@pytest.mark.parametrize("command", [["fleet", "up"], ["run", "apps/tifl"]])
def test_abbreviated_option_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command, "--node", "5"])
    assert "unrecognized arguments: --node 5" in capsys.readouterr().err


def test_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_report", interrupt)
    assert cli.main(["report", "folder"]) == 130
    assert capsys.readouterr().err == "flwr-hetero: interrupted\n"
