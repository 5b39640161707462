import json
import subprocess
import sys

import pytest

from flwr_hetero import __version__
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "0.4"), "[bold]fast reaches accuracy 40.0 % 6.0x sooner than slow (3 min"),
        (("--clock", "round"), "as soon as slow (2 rounds instead of 2 rounds)"),
    ],
)
def test_compare_prints_and_writes(two_runs, capsys, tmp_path, options, words):
    out = tmp_path / "page.html"
    assert main(["compare", *two_runs, *options, "--out", str(out), "--csv", "--json"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"\n{out}\n")
    assert words in said.splitlines()[-2]
    assert said.splitlines()[-2] in json.loads(out.with_suffix(".json").read_text())["verdict"]
    head, *rows = out.with_suffix(".csv").read_text().splitlines()
    assert head.startswith("label,directory,seed,rounds,last,best,end,to_target,")
    assert [row.split(",")[0] for row in rows] == ["slow", "[bold]fast"]


@pytest.mark.parametrize(
    ("way", "best"), [((), 8.0), (("--lower",), 2.0), (("--higher",), 8.0)], ids=str
)
def test_compare_is_told_which_way_is_better(make_run, tmp_path, way, best):
    rounds = [
        {"round": number, "virtual_s": number, "cd-grab": {"pairs": value}}
        for number, value in enumerate((5, 2, 8, 4))
    ]
    run, out, figures = (
        str(make_run("run", rounds)),
        *map(str, (tmp_path / "c.html", tmp_path / "f")),
    )
    options = ["--metric", "cd-grab/pairs", *way, "--out", out, "--json", figures]
    assert main(["compare", run, *options]) == 0
    [group] = json.loads((tmp_path / "f").read_text())["groups"]
    assert group["runs"][0]["best"] == best


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "{tmp}/nowhere"], "run directory must exist, got '{tmp}/nowhere'"),
        (["report", "{tmp}"], "did you mean {tmp}/[bold]fast {tmp}/slow"),
        (["compare", "{tmp}/slow", "--metric", "f1"], "slow has accuracy, got 'f1'"),
        (["compare", "{tmp}/slow", "--baseline", "x"], "baseline must be one of slow"),
        (["compare", "{tmp}/slow", "--target", "nan"], "target must be a number in"),
        (["compare", "{tmp}/slow", "--out", "a.png"], "--out must end in .html, got 'a.png'"),
        (["compare", "--json", "{tmp}/slow", "{tmp}/slow"], "FILE must be a file, not a folder"),
        (["compare", "{tmp}/slow", "--out", "{tmp}/no/a.html"], "No such file or directory"),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_errors_are_one_line(arguments, words, capsys, tmp_path):
    assert main([word.format(tmp=tmp_path) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("flwr-hetero: error: ")
    assert said.count("\n") == 1
    assert words.format(tmp=tmp_path) in said


HOSTILE = {
    "deep": '{"round": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "400 digits": '{"round": 1, "virtual_s": ' + "9" * 400 + "}",
    "a round of 400 digits": '{"round": ' + "9" * 400 + "}",
    "infinite": '{"round": 1, "virtual_s": 1e999, "latency": {"a": -1e999}}',
    "a number of nodes": '{"round": 1, "selected": 7}',
    "a list as a node": '{"round": 1, "selected": [["a"]]}',
    "a number as a failure": '{"round": 1, "failures": [3]}',
    "a text as a latency": '{"round": 1, "latency": {"a": "x"}}',
    "a list of tiers": '{"round": 1, "tifl": {"tiers": [1]}}',
    "tiers without end": '{"round": 1, "tifl": {"tiers": {"a": 100000000000000}}}',
    "a number of chances": '{"round": 1, "tifl": {"tier": 0, "tier_probs": 7}}',
    "nodes of a merge": '{"round": 1, "fedbuff": {"nodes": 3}}',
    "an evaluated round": '{"round": 1, "evaluate": {"evaluated-round": [1]}, "fairness": '
    '{"by-node": {"a": 0.1}, "mean": 0.1, "worst-tenth": 0.1}}',
}
CONFIGS = ['{"resumed": 7, "settings": [1]}', '{"settings": ' + "[" * 50_000 + "]" * 50_000 + "}"]


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_history_gives_one_line(kind, make_run, capsys, tmp_path):
    """In the page's notes where the line is left out, else as the command's error."""
    good = json.dumps({"round": 0, "virtual_s": 1.0, "global": {"accuracy": 0.1}})
    folder = make_run("run", [])
    (folder / "history.jsonl").write_text(f"{good}\n{HOSTILE[kind]}\n")
    (folder / "config.json").write_text(CONFIGS[len(kind) % 2])
    results = [
        main(["report", str(folder)]),
        main(["compare", str(folder), "--out", str(tmp_path / "compare.html")]),
    ]
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") == sum(result == 2 for result in results)
    if kind == "an evaluated round":
        assert results == [2, 2]
        assert f"flwr-hetero: error: {folder}: what no run writes (TypeError" in said
    elif kind != "infinite":
        assert results == [0, 0]
        assert "line 2 " in (folder / "report.html").read_text()


def test_help_names_a_metric_that_exists(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    metric = "cd_grab/own_share"
    assert metric in "".join(capsys.readouterr().out.split())


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"flwr-hetero {__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_missing_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for name in [name for name in sys.modules if name.startswith("flwr_hetero.report.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "plotly is not installed: pip install plotly, or in a checkout" in error
    assert "pip install -e '.[report]'" in error


def test_writing_a_run_needs_no_plotly():
    code = "import sys, flwr_hetero.report; assert not {'plotly', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
