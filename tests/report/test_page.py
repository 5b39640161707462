"""The page of a run: safe whatever the names, and true to the history."""

import json
import math
import re
from base64 import b64encode
from hashlib import sha256

import numpy as np
import pytest
from markupsafe import escape

from flwr_hetero.report.curves import MAX_POINTS
from flwr_hetero.report.history import History
from flwr_hetero.report.page import facts, render, run_data, write_report
from flwr_hetero.report.style import duration, figure, size, time_unit
from flwr_hetero.report.tables import tables_of

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
    assert drawn["curves"] == json.loads(json.dumps(data["curves"], allow_nan=False))
    cells = {text for table in data["tables"] for row in table.rows for text in row}
    assert any(EVIL in text for text in cells)
    # Scripts are not needed to read the tables.
    assert all(f">{escape(text)}</td>" in page for text in cells)
    assert all(f'class="value">{value}</p>' in page for _, value, _ in data["facts"])
    *_, middle, _, _, _ = (path / "history.jsonl").read_text().splitlines()
    # Of five values that only rise the median is the third from the end.
    level = json.loads(middle)["global"]["accuracy"]
    assert data["sentences"][0].startswith(f"Final accuracy: {100 * level:.1f} %")
    assert ("Rounds", "12", "of 20 planned") in data["facts"]
    assert data["where"].startswith("Started 2025-01-02 03:04:05 UTC, resumed 1x")
    assert data["notes"] == ["line 14 is incomplete and was skipped"]
    titles = [table.title for table in data["tables"]]
    assert titles == ["Tiers", "Nodes", "Failures", "Settings", "Versions"]
    assert "<h1>run&lt;b&gt;</h1>" in page
    names = {metric["key"] for metric in data["curves"]["metrics"]}
    assert {"tifl/credits", "tifl/tier_probs"} <= names
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


def test_run_is_judged_by_its_own_target(make_run, rising):
    settings = {"settings": {"target-accuracy": 0.5}}
    why = "accuracy 0.9 has reached target-accuracy 0.5"
    data = run_data(make_run("own", rising(10.0, stopped=why), settings))
    text = f"It reached 50.0 % after 50 s, in round 5 of 20. The run ended early: {why}."
    assert data["sentences"][0].partition("\n")[0] == f"Final accuracy: 90.0 %. {text}"
    assert [metric["target"] for metric in data["curves"]["metrics"]] == [0.5]
    loss = run_data(make_run("loss", rising(metric="loss"), settings))
    assert loss["curves"]["metrics"][0]["target"] != 0.5


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
        assert render(data)
    assert not list(path.glob("*.draft"))


def test_page_of_a_long_run_is_bounded(make_run):
    sizes = []
    for count in (1000, 4000):
        rounds = [
            {"round": i, "virtual_s": i / 2, "global": {"accuracy": i / 4000}} for i in range(count)
        ]
        data = run_data(make_run(f"run-{count}", rounds))
        sizes.append(len(json.dumps(data)))
    assert sizes[1] < 1.05 * sizes[0]
    curve = data["curves"]["lines"][0]["curves"]["accuracy"]["round"]
    assert len(curve["y"]) == MAX_POINTS
    assert (curve["x"][0], curve["x"][-1]) == (0, 3999)
    np.testing.assert_allclose(np.divide(curve["x"], 4000), curve["y"], rtol=1e-5)


def record(number, virtual_s, accuracy, latency=None, failed=(), **more):
    failures = [{"node": node, "reason": reason} for node, reason in failed]
    record = {"round": number, "virtual_s": virtual_s, "wall_s": number + 1.0}
    record |= {"global": {"accuracy": accuracy}, "latency": latency or {}, "failures": failures}
    return record | {"selected": [*(latency or {}), "node-2"] if number else []} | more


TIERS = {"node-10": 0, "node-2": 0, "node-1": 1}
PROFILED = {"node-10": 1.0, "node-2": 2.0, "node-1": 8.0, "node-7": None}
FAILED = (("node-2", "late"), ("node-9", "odd"), *[("node-1", "odd")] * 2)
ROUNDS = (
    record(0, 10.0, 0.1, tifl={"tier_probs": [0.5, 0.5], "tiers": TIERS, "latency": PROFILED}),
    record(1, 13.0, 0.7, {"node-10": 3.0}, FAILED[:1], tifl={"tier": 0}),
    record(2, 25.0, 0.6, {"node-1": 12.0}, FAILED)
    | {"tifl": {"tier": 1, "tier_accuracy": [0.8, None]}},
)


@pytest.mark.parametrize(("planned", "note"), [(2, "as planned"), (None, ""), (5, "of 5 planned")])
def test_facts_by_hand(planned, note):
    assert facts(History(ROUNDS), {"num-server-rounds": planned}) == [
        ("Rounds", "2", note),
        ("Time on the fleet's clock", "25 s", "3 s on the server's"),
        ("Nodes", "4", "2 of them trained"),
        ("Failures", "5", ""),
    ]


def test_tables_by_hand():
    tables = {table.title: table for table in tables_of(History(ROUNDS))}
    assert tables["Tiers"].rows == [
        ["0", "2", "2.5 s", "1", "80.0 %"],
        ["1", "1", "12 s", "1", "?"],
    ]
    assert tables["Nodes"].head == ["node", "tier", "median latency", "selected", "lost"]
    assert tables["Nodes"].rows == [
        ["node-2", "0", "2 s", "2", "2"],
        ["node-10", "0", "3 s", "1", "0"],
        ["node-1", "1", "12 s", "1", "0"],
        ["node-7", "", "?", "0", "0"],
    ]
    assert tables["Failures"].rows == [
        ["node-1", "odd", "2", "2", "2"],
        ["node-2", "late", "2", "1", "2"],
        ["node-9", "odd", "1", "2", "2"],
    ]
    # The caption explains no column that may be missing.
    columns = re.findall(r"(\w+): ", tables["Nodes"].caption)
    assert [name.lower() for name in columns] == tables["Nodes"].head[-2:]
    again = {"tiers": {"node-1": 0, "node-2": 1}, "latency": {"node-1": 0.5, "node-2": 0.2}}
    [_, nodes, _] = tables_of(History((*ROUNDS, {"round": 3, "tifl": again})))
    # The latest profiling counts.
    assert [row[:2] for row in nodes.rows[:2]] == [["node-1", "0"], ["node-2", "1"]]


@pytest.mark.parametrize(
    ("write", "values"),
    [
        (duration, {0: "0 s", 0.0004: "0.4 ms", 59.4: "59.4 s", 59.6: "1 min 00 s"}),
        (duration, {119.7: "2 min 00 s", 3599.7: "1 h 00 min", 86399: "1 d 0 h", math.inf: "?"}),
        (time_unit, {0: "s", 200: "min", 20_000: "h", 1e6: "d"}),
        (size, {0: "0 B", 999: "999 B", 1000: "1 kB", math.nan: "?"}),
        (lambda value: figure("accuracy", value), {87.5: "87.5", 1.0: "100.0 %", math.nan: "?"}),
    ],
)
def test_figures_have_units(write, values):
    assert {value: write(value) for value in values} == values
