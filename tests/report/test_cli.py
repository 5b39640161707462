import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import Mock

import pytest

from flwr_hetero import cli
from flwr_hetero.cli import main

APP = Path(__file__).parents[2] / "apps" / "tifl"


@pytest.fixture
def two_runs(make_run, rising):
    return str(make_run("slow", rising(600.0))), str(make_run("[bold]fast", rising(100.0)))


def test_report_and_compare_say_where(two_runs, capsys, tmp_path, monkeypatch):
    track = Mock(side_effect=lambda items, text, total: items)
    monkeypatch.setattr(cli.runs, "tracked", track)
    assert main(["report", two_runs[0]]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/slow/report.html"]
    assert (tmp_path / "slow" / "report.html").stat().st_size > 10_000
    out = tmp_path / "page.html"
    options = ["--target", "0.4", "--clock", "round", "--out", str(out), "--json"]
    assert main(["compare", *two_runs, *options]) == 0
    assert track.call_args.args[1:] == ("Reading", 2)
    *lines, page = capsys.readouterr().out.splitlines()
    words = "[bold]fast is about as fast as slow: 4 rounds to accuracy 40.0 % instead of 4 rounds."
    assert lines[0] == words
    assert all(line.startswith("  ") for line in lines[1:])
    assert page == str(out)
    [text] = json.loads(out.with_suffix(".json").read_text())["verdict"]
    assert text.split("\n") == [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("report {}", "run directory must hold a history.jsonl"),
        ("watch {}", "run directory must hold a history.jsonl"),
        ("watch {}/none", "run directory must exist"),
        ("compare {}/slow --out a.png", "--out must end in .html, got 'a.png'"),
        ("compare {}/slow --out {}/no/a.html", "No such file or directory"),
        ("fleet down --dir {}/none", "dir must hold a fleet"),
        ("fleet up --dir {}", "dir must be empty or new"),
        ("fleet up --dir {}/new --nodes 0", "--nodes must be a whole number"),
        ("fleet up --dir {}/new --fleet warp", "fleet must be a known name"),
        ("fleet up --dir {}/new --cpu 2", "cpu must be a number in"),
        ("fleet certificates {}/keys --node a/b", "node must be a plain file name"),
        ("run APP -c num_tiers=3", "did you mean 'num-tiers'"),
        ("run APP --nodes 0", "--nodes must be a whole number of at least 1, got 0"),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_errors_are_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    typed = [word.replace("{}", str(tmp_path)) for word in arguments.split()]
    assert main([str(APP) if word == "APP" else word for word in typed]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("flwr-hetero: error: ")
    assert output.err.count("\n") == 1
    assert words.replace("{}", str(tmp_path)) in output.err
    assert typed[0] == "fleet" or output.out == ""


def test_bare_command_shows_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert "rebuild report.html" in capsys.readouterr().out


HOSTILE = {
    "not JSON": "nothing",
    "deep": '{"round": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number of nodes": '{"round": 1, "selected": 7}',
    "a number as a failure": '{"round": 1, "failures": [3]}',
    "a text as a latency": '{"round": 1, "latency": {"a": "x"}}',
    "half a tier": '{"round": 1, "selected": ["a"], "tifl": {"tiers": {"a": 0.5}}}',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_history_gives_one_line(kind, make_run, capsys):
    """A note on the page if the line is skipped, else the error of the command."""
    good = json.dumps({"round": 0, "virtual_s": 1.0, "global": {"accuracy": 0.1}})
    folder = make_run("run", [])
    (folder / "history.jsonl").write_text(f"{good}\n{HOSTILE[kind]}\n")
    (folder / "config.json").write_text('{"settings": ' + "[" * 50_000 + "]" * 50_000 + "}")
    result = main(["report", str(folder)])
    error = capsys.readouterr().err
    if kind in ("not JSON", "deep"):
        assert (result, error) == (0, "")
        assert "line 2 is not a round" in (folder / "report.html").read_text()
    elif kind == "half a tier":  # shown as it is
        assert (result, error) == (0, "")
    else:
        assert result == 2
        assert error.startswith("flwr-hetero: error: ")
        assert error.count("\n") == 1


def test_broken_command_of_another_package_is_named(monkeypatch, capsys, two_runs):
    added = []
    monkeypatch.setattr(sys.modules[__name__], "add_mine", added.append, raising=False)
    plugins = [
        EntryPoint(name, value, cli.COMMANDS)
        for name, value in (("lost", "no_such_package:add"), ("mine", f"{__name__}:add_mine"))
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: plugins)
    assert main(["report", two_runs[0]]) == 0
    assert len(added) == 1
    warning = "no command lost (no_such_package:add): ModuleNotFoundError: No module named"
    assert capsys.readouterr().err.startswith(f"flwr-hetero: {warning}")


def test_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for name in [name for name in sys.modules if name.startswith("flwr_hetero.report.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "plotly is not installed: pip install plotly, or in a checkout" in error
    assert "pip install -e '.[report]'" in error
