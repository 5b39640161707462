import json
import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from flwr_hetero.cli import main, runs

APP = Path(__file__).parents[2] / "apps" / "tifl"


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
        ("watch {}", "run directory must hold a history.jsonl"),
        ("compare {}/slow --out a.png", "--out must end in .html, got 'a.png'"),
        ("compare {}/slow --out {}/no/a.html", "No such file or directory"),
        ("fleet status --dir {}/none", "dir must hold a fleet"),
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
def test_errors_are_one_line(arguments, words, capsys, tmp_path):
    typed = [
        word.replace("{}", str(tmp_path)).replace("APP", str(APP)) for word in arguments.split()
    ]
    assert main(typed) == 2
    output = capsys.readouterr()
    assert output.err.startswith("flwr-hetero: error: ")
    assert output.err.count("\n") == 1
    assert words.replace("{}", str(tmp_path)) in output.err
    assert typed[0] == "fleet" or output.out == ""


def test_page_follows_the_run(make_run, rounds_of, monkeypatch, capsys):
    folder = make_run("run", rounds_of(5))
    pages = []
    lock = FileLock(folder / ".lock", thread_local=False)

    def sleep(seconds):
        pages.append((folder / "report.html").read_text())
        if len(pages) == 1:
            with (folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(rounds_of(6)[-1]) + "\n")
        if len(pages) == 3:
            lock.release()

    monkeypatch.setattr(runs.time, "sleep", sleep)
    lock.acquire()
    assert main(["watch", str(folder)]) == 0
    first, second, same = pages
    assert all('http-equiv="refresh"' in page for page in pages)
    assert first != second == same
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert capsys.readouterr().out.startswith(f"file://{folder}/report.html ")


@pytest.mark.parametrize(
    ("model_after_s", "words"),
    [(1, "The run has ended: "), (-1, runs.KILLED), (None, runs.KILLED)],
    ids=["ended", "killed, with the model of the run before", "killed"],
)
def test_watch_says_how_the_run_ended(model_after_s, words, make_run, rounds_of, capsys):
    folder = make_run("run", rounds_of(5))
    if model_after_s is not None:
        written_s = (folder / "history.jsonl").stat().st_mtime
        (folder / "model.safetensors").touch()
        os.utime(folder / "model.safetensors", 2 * (written_s + model_after_s,))
    assert main(["watch", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(words)


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
    assert "plotly is not installed: pip install plotly, or in a checkout" in error
    assert "pip install -e '.[report]'" in error
