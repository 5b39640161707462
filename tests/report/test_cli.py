import subprocess
import sys

import pytest

from flwr_hetero import __version__
from flwr_hetero.cd_grab.herding_meter import HerdingMeter
from flwr_hetero.cli import main


@pytest.fixture
def two_runs(make_run):
    def rounds(round_s):
        return [
            {"round": i, "virtual_s": round_s * i, "global": {"accuracy": 0.2 * i}}
            for i in range(5)
        ]

    return str(make_run("slow", rounds(600.0))), str(make_run("[bold]fast", rounds(100.0)))


def test_report_rebuilds_and_says_where(two_runs, capsys, tmp_path):
    assert main(["report", two_runs[0]]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/slow/report.html"]
    assert (tmp_path / "slow" / "report.html").stat().st_size > 10_000


def test_compare_prints_a_table_and_draws(two_runs, capsys, tmp_path):
    out = tmp_path / "compare.png"
    assert main(["compare", *two_runs, "--target", "0.4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "[bold]fast" in said
    assert "20 min 00 s" in said
    assert "3 min 20 s" in said
    assert "6 x" in said
    assert "Target: accuracy 40.0 % (0.4), as asked. Baseline: slow." in said
    assert said.endswith(f"{out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_compare_says_which_target_it_chose(two_runs, capsys, tmp_path):
    out = tmp_path / "compare.svg"
    assert main(["compare", *two_runs, "--clock", "round", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Target: accuracy 39.6 % (0.396), 1 % short of what all runs hold at their end." in said
    assert "2 rounds" in said
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("way", "best"), [((), "8"), (("--lower",), "2"), (("--higher",), "8")], ids=str
)
def test_compare_is_told_which_way_is_better(make_run, capsys, tmp_path, way, best):
    rounds = [
        {"round": number, "virtual_s": number, "cd-grab": {"pairs": value}}
        for number, value in enumerate((5, 2, 8, 4))
    ]
    run, out = str(make_run("run", rounds)), str(tmp_path / "compare.svg")
    assert main(["compare", run, "--metric", "cd-grab/pairs", *way, "--out", out]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "3", "4", best] in [row[:4] for row in rows]


def test_the_metric_that_help_names_exists(make_run, rounds_of, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "herding/herding-bound" in "".join(capsys.readouterr().out.split())
    run, out = str(make_run("run", rounds_of(5))), str(tmp_path / "compare.svg")
    metric = f"{HerdingMeter.name}/herding-bound"
    assert main(["compare", run, "--metric", metric, "--out", out]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "{tmp}/nowhere"], "run directory must exist, got '{tmp}/nowhere'"),
        (["report", "{tmp}"], "did you mean {tmp}/[bold]fast {tmp}/slow"),
        (["compare", "{tmp}/slow", "--metric", "f1"], "slow has accuracy, got 'f1'"),
        (["compare", "{tmp}/slow", "--baseline", "x"], "baseline must be one of slow"),
        (["compare", "{tmp}/slow", "--target", "nan"], "target must be a number in"),
        (["compare", "{tmp}/slow", "--out", "a.jpg"], "--out must end in .png, .svg, .pdf"),
        (["compare", "{tmp}/slow", "--out", "{tmp}/no/a.png"], "No such file or directory"),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_errors_are_one_line(arguments, words, capsys, tmp_path):
    assert main([word.format(tmp=tmp_path) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flwr-hetero: error: ")
    assert said.count("\n") == 1
    assert words.format(tmp=tmp_path) in said


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"flwr-hetero {__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_a_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("flwr_hetero.report.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'flwr-hetero[report]'" in capsys.readouterr().err


def test_writing_a_run_needs_no_matplotlib():
    code = (
        "import sys, flwr_hetero.report; print('matplotlib' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
