import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flwr_hetero import __version__, cli
from flwr_hetero.cli import main
from flwr_hetero.strategy import LocalSteps

APP = Path(__file__).parents[2] / "apps" / "tifl"


@pytest.fixture
def two_runs(make_run):
    def rounds(round_s):
        return [
            {"round": i, "virtual_s": round_s * i, "global": {"accuracy": 0.2 * i}}
            for i in range(5)
        ]

    return str(make_run("slow", rounds(600.0))), str(make_run("[bold]fast", rounds(100.0)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "0.4"), "[bold]fast reaches accuracy 40.0 % 6.0x sooner than slow (3 min"),
        (("--clock", "round"), "as soon as slow (2 rounds instead of 2 rounds)"),
    ],
)
def test_report_and_compare_say_where(two_runs, capsys, tmp_path, options, words):
    assert main(["report", two_runs[0]]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/slow/report.html"]
    assert (tmp_path / "slow" / "report.html").stat().st_size > 10_000
    out = tmp_path / "page.html"
    assert main(["compare", *two_runs, *options, "--out", str(out), "--csv", "--json"]) == 0
    sentence, page = capsys.readouterr().out.splitlines()
    assert words in sentence
    assert page == str(out)
    assert json.loads(out.with_suffix(".json").read_text())["verdict"] == [sentence]
    head, *rows = out.with_suffix(".csv").read_text().splitlines()
    assert head.startswith("label,directory,seed,unit,rounds,last,best,end,to_target,")
    assert [row.split(",")[0] for row in rows] == ["slow", "[bold]fast"]


@pytest.mark.parametrize(
    ("way", "best"), [((), 8.0), (("--lower",), 2.0), (("--higher",), 8.0)], ids=str
)
def test_compare_is_told_which_way_is_better(make_run, tmp_path, way, best):
    rounds = [
        {"round": number, "virtual_s": number, "cd-grab": {"pairs": value}}
        for number, value in enumerate((5, 2, 8, 4))
    ]
    run, out, figures = map(str, (make_run("run", rounds), tmp_path / "c.html", tmp_path / "f"))
    options = ["--metric", "cd_grab/pairs", *way, "--out", out, "--json", figures]
    assert main(["compare", run, *options]) == 0
    [group] = json.loads((tmp_path / "f").read_text())["groups"]
    assert group["runs"][0]["best"] == best


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("report {}/nowhere", "run directory must exist, got '{}/nowhere'"),
        ("report {}", "did you mean {}/[bold]fast {}/slow"),
        ("compare {}/slow --metric f1", "slow has accuracy, got 'f1'"),
        ("compare {}/slow --baseline x", "baseline must be one of slow"),
        ("compare {}/slow --target nan", "target must be a number in"),
        ("compare {}/slow --out a.png", "--out must end in .html, got 'a.png'"),
        ("compare --json {}/slow {}/slow", "FILE must be a file, not a folder"),
        ("compare {}/slow --out {}/no/a.html", "No such file or directory"),
        ("fleet down --dir {}/none", "dir must hold a fleet"),
        ("fleet status --dir {}/none", "dir must hold a fleet"),
        ("fleet up --dir {}", "dir must be empty or new"),
        ("fleet up --dir {}/new --nodes 0", "--nodes must be a whole number"),
        ("fleet up --dir {}/new --fleet warp", "fleet must be a known name"),
        ("fleet up --dir {}/new --cpu 2", "cpu must be a number in"),
        ("fleet certificates {}/keys --node a/b", "node must be a plain file name"),
        ("run APP -c num_tiers=3", "did you mean 'num-tiers'"),
        ("run APP --nodes 0", "--nodes must be a whole number of at least 1, got 0"),
        ("doctor --superlink nowhere", "superlink must be one of "),
    ],
)
@pytest.mark.usefixtures("two_runs")
def test_errors_are_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    typed = [word.replace("{}", str(tmp_path)) for word in arguments.split()]
    assert main([str(APP) if word == "APP" else word for word in typed]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("flwr-hetero: error: ")
    assert said.err.count("\n") == 1
    assert words.replace("{}", str(tmp_path)) in said.err
    assert typed[0] == "doctor" or said.out == ""


HOSTILE = {
    "deep": '{"round": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a round of 400 digits": '{"round": ' + "9" * 400 + "}",
    "a number of nodes": '{"round": 1, "selected": 7}',
    "a list as a node": '{"round": 1, "selected": [["a"]]}',
    "a number as a failure": '{"round": 1, "failures": [3]}',
    "a list as a failed node": '{"round": 1, "failures": [{"node": ["a"]}]}',
    "a text as a latency": '{"round": 1, "latency": {"a": "x"}}',
    "a list of tiers": '{"round": 1, "tifl": {"tiers": [1]}}',
    "tiers without end": '{"round": 1, "tifl": {"tiers": {"a": 100000000000000}}}',
    "half a tier": '{"round": 1, "tifl": {"tiers": {"a": 0.5}}}',
    "a number of chances": '{"round": 1, "tifl": {"tier": 0, "tier_probs": 7}}',
    "nodes of an update": '{"round": 1, "fedbuff": {"nodes": 3}}',
    "infinite": '{"round": 1, "virtual_s": 1e999, "latency": {"a": -1e999}}',
    "400 digits": '{"round": 1, "virtual_s": ' + "9" * 400 + "}",
    "an evaluated round": '{"round": 1, "evaluate": {"evaluated-round": [1]}, "fairness": '
    '{"by-node": {"a": 0.1}, "mean": 0.1, "worst-tenth": 0.1}}',
}
UNKNOWN = ("infinite", "400 digits")
"""Numbers that are as good as none; the line counts."""
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
    else:
        assert results == [0, 0]
        assert ("line 2 " in (folder / "report.html").read_text()) == (kind not in UNKNOWN)


def test_help_names_a_metric_that_exists(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    metric = f"{LocalSteps.name.replace('-', '_')}/gamma"
    assert metric in "".join(capsys.readouterr().out.split())


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"flwr-hetero {__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


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
    said = "no command lost (no_such_package:add): ModuleNotFoundError: No module named"
    assert capsys.readouterr().err.startswith(f"flwr-hetero: {said}")


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
