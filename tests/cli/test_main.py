"""What all commands share: options are spelled out, and an interrupt is one line."""

import argparse

import pytest

from flwr_hetero import cli
from flwr_hetero.cli import runs


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
