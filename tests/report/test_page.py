"""The page of a run: safe whatever the names, and true to the history."""

import json
import re
from base64 import b64encode
from hashlib import sha256

import numpy as np
import pytest
from markupsafe import escape

from flwr_hetero.report.curves import MAX_POINTS, Line, curve_data, panels_of
from flwr_hetero.report.history import History
from flwr_hetero.report.page import CHARTS, run_data, write_report

EVIL = "$\\frac{$</script><script>alert(1)</script>&'\""


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory, rounds_of):
    """Write a report of a run in which every name is hostile."""
    text = json.dumps(rounds_of(12, 10))
    for name in ("node-3", "cd_grab", "no reply within 30 s", "herding_bound"):
        text = text.replace(name, json.dumps(EVIL)[1:-1] + name)
    path = tmp_path_factory.mktemp("evil") / "run<b>"
    path.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in json.loads(text))
    (path / "history.jsonl").write_text(lines + '{"torn')
    settings = {"num-server-rounds": 20, EVIL: EVIL, "cuda": False, "path": None}
    config = {"started": "2025-01-02T03:04:05+00:00", "resumed": ["x"], "settings": settings}
    (path / "config.json").write_text(json.dumps(config | {"versions": {"numpy": "2.0"}}))
    return path, write_report(path).read_text()


def test_page_loads_nothing_and_runs_its_scripts_only(evil_run):
    _, page = evil_run
    tags = re.sub(r"(<(style|script)[^>]*>).*?(</\2>)", r"\1\3", page, flags=re.DOTALL)
    assert re.findall(r"\b(?:src|href)=(\S+)", tags) == ['"data:,">']
    assert re.findall(r"<script[^>]*?(?: type=\"(.*?)\"[^>]*)?>", tags) == [
        *("application/json", "text/plain", "")
    ]
    assert not re.search(r"<(iframe|object|b>)|\son\w+=", tags)
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', tags)
    assert policy.startswith("default-src 'none'")
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.count("'sha256-") == 2


def test_page_says_what_happened(evil_run):
    path, page = evil_run
    data = run_data(path)
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert drawn == json.loads(json.dumps({k: data.get(k) for k in CHARTS}, allow_nan=False))
    assert "<" not in json.dumps(data["panels"])  # plotly takes texts as markup
    cells = {text for table in data["tables"] for row in table["rows"] for text, _ in row}
    assert any(EVIL in text for text in cells)
    assert all(f">{escape(text)}</td>" in page for text in cells)
    *_, middle, _, _, _ = (path / "history.jsonl").read_text().splitlines()
    facts = {fact["label"]: (fact["value"], fact["note"]) for fact in data["facts"]}
    # Of five values that only rise the median is the third from the end.
    level = json.loads(middle)["global"]["accuracy"]
    assert facts["Final accuracy"][0] == f"{100 * level:.1f} %"
    assert facts["Rounds"] == ("12", "of 20 planned")
    assert data["where"].startswith("Started 2025-01-02 03:04:05 UTC, resumed 1x")
    assert data["notes"] == ["line 14 is incomplete and was skipped"]
    titles = [table["title"] for table in data["tables"]]
    assert titles == ["Tiers", "Nodes", "Failures", "Settings", "Versions"]
    assert "<h1>run&lt;b&gt;</h1>" in page
    lines = data["sentences"][0].split("\n")
    assert len(lines) == 3
    assert all(f">{escape(line)}</p>" in page for line in lines)


@pytest.mark.parametrize(
    ("round_s", "mark", "when"),
    [(10.0, "simulated nodes", "1 min 30 s, in round 9 of 20"), (None, "", "9 rounds")],
)
def test_first_line_says_what_was_reached_and_when(make_run, rising, round_s, mark, when):
    data = run_data(make_run(rounds=rising(round_s, simulated=bool(mark) or None)))
    expected = f"Final accuracy: 90.0 %. It reached 89.0 % after {when}."
    [text] = data["sentences"]
    assert (text.partition("\n")[0], data["mark"]) == (expected, mark)


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"selected": ["a"], "latency": {"a": 2.0}},
        {"virtual_s": 9.0, "global": {"accuracy": None, "loss": 1.5}},
        {"tifl": {"tier": None, "tier_probs": [1.0]}},
        {"selected": ["a"], "failures": [{"node": "a", "reason": "b"}] * 2},
        {"latency": {"a": 0.0, "b": None}},
        {"seconds": {"wait": {"a": None, "b": 1.0}, "train": None}},
        {"tifl": {"tier_probs": [0.5, 0.5], "credits": [1, 2, 3]}},
        {"fedbuff": {"nodes": ["a"], "staleness": [None], "age_s": [None]}},
        {"fairness": {"metric": "eval-acc", "mean": 0.5}},
    ],
)
def test_sparse_histories(make_run, record):
    for name, before in (("one", []), ("two", [{"round": 0, "wall_s": 0.1}])):
        rounds = [] if record is None else [*before, {"round": 5, "wall_s": 0.2, **record}]
        data = run_data(path := make_run(name, rounds))
        assert not re.search(r"\bnan\b|\binf\b|\bNone\b", json.dumps(data), re.IGNORECASE)
        assert bool(data["notes"]) is not bool(rounds)
        assert bool(data["sentences"]) is bool(rounds)
    assert write_report(path).read_text() == write_report(path).read_text()
    assert not list(path.glob("*.draft"))


@pytest.fixture(scope="module")
def history(rounds_of):
    return History(tuple(rounds_of(30)))


def curves(rounds, metric="accuracy"):
    line = Line("x", "#000000", [History((*rounds,))])
    return curve_data([line], metric, "virtual_s", 0.5)


def test_page_of_a_long_run_is_bounded(make_run):
    sizes = []
    for count in (1000, 4000):
        names = [f"node-{i}" for i in range(10)]
        fedbuff = {"nodes": names, "staleness": [*range(10)], "age_s": [0.5] * 10}
        rounds = [
            {"round": i, "virtual_s": i / 2, "global": {"accuracy": i / 4000}, "fedbuff": fedbuff}
            for i in range(count)
        ]
        data = run_data(make_run(f"run-{count}", rounds))
        sizes.append(len(json.dumps(data)))
    assert sizes[1] < 1.05 * sizes[0]
    curves = data["curves"]["lines"][0]["curves"]
    assert len(curves["fedbuff/staleness"]["round"]["y"]) == MAX_POINTS
    curve = curves["accuracy"]["round"]
    assert (curve["x"][0], curve["x"][-1]) == (0, 3999)
    np.testing.assert_allclose(np.divide(curve["x"], 4000), curve["y"], rtol=1e-5)


def test_charts_are_those_of_the_rounds(history):
    [chart] = panels_of(history, "virtual_s")
    [dots] = chart["traces"]
    names = [metric["key"] for metric in curves(history.rounds)["metrics"]]
    assert {"tifl/credits", "tifl/tier_accuracy"} <= {*names}
    clock = np.array([record["virtual_s"] for record in history.rounds])
    np.testing.assert_allclose(dots["y"][1:], np.diff(clock), rtol=1e-5)
