import json
import sys

import pytest

from flwr_hetero.cli import main


@pytest.fixture
def two_runs(make_run, rising):
    return str(make_run("slow", rising(600.0))), str(make_run("[bold]fast", rising(100.0)))


def test_report_and_compare_say_where(two_runs, capsys, tmp_path):
    assert main(["report", two_runs[0]]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/slow/report.html"]
    assert (tmp_path / "slow" / "report.html").stat().st_size > 10_000
    out = tmp_path / "page.html"
    options = ["--target", "0.4", "--clock", "round", "--out", str(out), "--json"]
    assert main(["compare", *two_runs, *options]) == 0
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
        ("report {}/none", "run directory must exist"),
        ("compare {}/slow --out a.png", "--out must end in .html, got 'a.png'"),
        ("compare {}/slow --out {}/no/a.html", "No such file or directory"),
        ("fleet status --dir {}/none", "dir must hold a fleet"),
        ("fleet up --dir {}", "dir must be empty or new"),
        ("fleet up --dir {}/new --nodes 0", "--nodes must be a whole number"),
        ("fleet up --dir {}/new --fleet warp", "fleet must be a known name"),
        ("fleet up --dir {}/new --cpu 2", "cpu must be a number in"),
        ("fleet certificates {}/keys --node a/b", "node must be a plain file name"),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_errors_are_one_line(arguments, words, capsys, tmp_path):
    typed = [word.replace("{}", str(tmp_path)) for word in arguments.split()]
    assert main(typed) == 2
    output = capsys.readouterr()
    assert output.err.startswith("flwr-hetero: error: ")
    assert output.err.count("\n") == 1
    assert words.replace("{}", str(tmp_path)) in output.err
    assert typed[0] == "fleet" or output.out == ""


def test_bare_command_shows_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert "rebuild report.html" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["nothing", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_a_line_that_is_no_round_is_noted_on_the_page(line, make_run, rising):
    folder = make_run("run", rising())
    with (folder / "history.jsonl").open("a") as file:
        file.write(f"{line}\n")
    (folder / "config.json").write_text('{"settings": ' + "[" * 50_000 + "]" * 50_000 + "}")
    assert main(["report", str(folder)]) == 0
    assert "line 22 is not a round" in (folder / "report.html").read_text()


def test_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for name in [name for name in sys.modules if name.startswith("flwr_hetero.report.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "plotly is not installed: in a checkout" in error
    assert "pip install -e '.[report]'" in error
