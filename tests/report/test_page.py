"""The page of a run: safe whatever the names, and true to the history."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import numpy as np
import pytest

from flwr_hetero.report.curves import MAX_POINTS, Line, curve_data
from flwr_hetero.report.history import History
from flwr_hetero.report.page import run_data, write_report
from flwr_hetero.report.panels import panels_of
from flwr_hetero.report.style import GREY, tier_colours

EVIL = "$\\frac{$</script><script>alert(1)</script>&'\""


class Page(HTMLParser):
    """Collects tags and texts, and checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [] if tag in {"meta", "link"} else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.tags[-1][1].get("id", self.open[-1]), []).append(data)


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory, rounds_of):
    """Write a report of a run in which every name is hostile."""
    text = json.dumps(rounds_of(12, 10))
    evil = json.dumps(EVIL)[1:-1]
    for name in ("node-3", "cd_grab", "no reply within 30 s", "herding_bound"):
        text = text.replace(name, evil + name)
    rounds = json.loads(text)
    rounds[5]["failures"] = [{"node": EVIL, "reason": EVIL}]
    path = tmp_path_factory.mktemp("evil") / "run<b>"
    path.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in rounds)
    (path / "history.jsonl").write_text(lines + '{"torn')
    settings = {"num-server-rounds": 20, EVIL: EVIL, "cuda": False, "path": None}
    config = {"started": "2025-01-02T03:04:05+00:00", "resumed": ["x"], "settings": settings}
    config |= {"versions": {"numpy": "2.0"}, "command": EVIL}
    (path / "config.json").write_text(json.dumps(config))
    return path, Page(write_report(path).read_text())


def test_page_loads_nothing_and_runs_its_scripts_only(evil_run):
    _, page = evil_run
    links = [v for _, given in page.tags for k, v in given.items() if k in ("src", "href")]
    assert links == ["data:,"]
    assert {tag for tag, _ in page.tags}.isdisjoint({"iframe", "object", "b"})
    assert not [k for _, given in page.tags for k in given if k.startswith("on")]
    [policy] = [g["content"] for t, g in page.tags if "http-equiv" in g]
    assert policy.startswith("default-src 'none'")
    kinds = [given.get("type") for tag, given in page.tags if tag == "script"]
    assert kinds == ["application/json", "text/plain", None]
    own = b64encode(sha256("".join(page.texts["script"]).encode()).digest()).decode()
    assert f"'sha256-{own}'" in policy
    assert policy.count("'sha256-") == 2


def test_page_says_what_happened(evil_run):
    path, page = evil_run
    data = json.loads("".join(page.texts["data"]))
    assert data == json.loads(json.dumps(run_data(path), allow_nan=False))
    assert "<" not in json.dumps(data["panels"])  # plotly takes texts as markup
    assert any(EVIL in cell[0] for table in data["tables"] for row in table["rows"] for cell in row)
    *_, last, _ = (path / "history.jsonl").read_text().splitlines()
    facts = {fact["label"]: (fact["value"], fact["note"]) for fact in data["facts"]}
    assert facts["Last accuracy"][0] == f"{100 * json.loads(last)['global']['accuracy']:.1f} %"
    assert facts["Rounds"] == ("12", "of 20 planned")
    assert data["where"].startswith("Started 2025-01-02 03:04:05 UTC, resumed once")
    assert data["notes"] == ["line 14 is torn and was left out"]
    titles = [table["title"] for table in data["tables"]]
    assert titles == ["Tiers", "Nodes", "Fairness", "Failures", "Rounds", "Settings", "Versions"]
    assert "".join(page.texts["h1"]) == "run<b>"
    assert data["sentences"][0] in page.texts["p"]


RISE = [0.1 * i for i in range(9)] + [0.9] * 12


@pytest.mark.parametrize(
    ("round_s", "more", "mark", "when"),
    [
        (10.0, {"simulated": True}, "simulated nodes", "1 min 30 s, in round 9 of 20"),
        (10.0, {"simulated": False}, "real nodes", "1 min 30 s, in round 9 of 20"),
        (None, {}, "", "9 rounds"),
    ],
)
def test_first_line_says_what_was_reached_and_when(make_run, round_s, more, mark, when):
    rounds = [
        {"round": i, "virtual_s": round_s and round_s * i, "global": {"accuracy": v}, **more}
        for i, v in enumerate(RISE)
    ]
    data = run_data(make_run(rounds=rounds))
    expected = f"Accuracy 90.0 % at the end; 89.0 % is reached after {when}."
    assert (data["sentences"], data["mark"]) == ([expected], mark)


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"selected": ["a"], "latency": {"a": 2.0}},
        {"virtual_s": 9.0, "global": {"accuracy": None, "loss": 1.5}},
        {"tifl": {"tier": None, "tier_probs": [1.0]}},
        {"selected": ["a"], "failures": [{"node": "a", "reason": "b"}] * 2},
        {"latency": {"a": 0.0, "b": None}},
        {"tifl": {"tier_probs": [0.5, 0.5], "credits": [1, 2, 3]}},
        {"fedbuff": {}},
        {"fedbuff": {"nodes": ["a"], "staleness": [None], "age_s": [None]}},
        {"fairness": {"metric": "eval-acc", "mean": 0.5}},
        {"fairness": {"by_node": {"a": 0.5}, "mean": 0.5, "worst_tenth": 0.5}},
    ],
)
def test_sparse_histories(make_run, record):
    for name, before in (("one", []), ("two", [{"round": 0, "wall_s": 0.1}])):
        rounds = [] if record is None else [*before, {"round": 5, "wall_s": 0.2, **record}]
        path = make_run(name, rounds)
        data = run_data(path)
        assert not re.search(r"\bnan\b|\binf\b|\bNone\b", json.dumps(data), re.IGNORECASE)
        assert bool(data["notes"]) is not bool(rounds)
    assert write_report(path).read_text() == write_report(path).read_text()
    assert not list(path.glob("*.draft"))
    if record and "latency" in record and "selected" in record:
        titles = [panel["title"] for panel in data["panels"]]
        assert titles == ["Time of each round", "Latency of the nodes", "Who trained"]
        assert "every reply was good" in [fact["note"] for fact in data["facts"]]


def test_large_tables_and_fleets_are_cut(make_run):
    names = [f"node-{i}" for i in range(3000)]
    latency = {name: 1.0 + i for i, name in enumerate(names)}
    rounds = [{"round": i, "virtual_s": float(i)} for i in range(2000)]
    rounds[5] |= {"selected": names, "latency": latency}
    data = run_data(make_run(rounds=rounds))
    tables = {table["title"]: table for table in data["tables"]}
    assert [len(tables[key]["rows"]) for key in ("Nodes", "Rounds")] == [1000, 1000]
    assert tables["Rounds"]["rows"][0][0][0] == "1999"
    assert tables["Nodes"]["caption"].endswith("The first 1000 of 3000 rows.")
    assert max(len(t["x"]) for p in data["panels"] for t in p["traces"] if "x" in t) <= 1000


# -- curves --


@pytest.fixture(scope="module")
def history(rounds_of):
    return History(tuple(rounds_of(30)))


def curves(rounds, metric="accuracy"):
    line = Line("x", "#000000", "solid", [History((*rounds,))])
    return curve_data([line], metric, "virtual_s", 0.5)


def test_curves_show_every_value_by_every_axis(history):
    data = curves(history.rounds)
    keys = ["virtual_s", "wall_s", "round", "bytes", "device_s"]
    assert [axis["key"] for axis in data["axes"]] == keys
    found = data["lines"][0]["curves"]["accuracy"]
    expected = [record["global"]["accuracy"] for record in history.rounds]
    traffic = np.cumsum([r["bytes_up"] + r["bytes_down"] for r in history.rounds]) / 1e6
    busy_s = np.cumsum([sum(r["latency"].values()) for r in history.rounds])
    for key, x in (("round", range(31)), ("bytes", traffic), ("device_s", busy_s / 60)):
        np.testing.assert_allclose(found[key]["x"], x, rtol=1e-5)
        np.testing.assert_allclose(found[key]["y"], expected, rtol=1e-5)
    labels = [axis["label"] for axis in data["axes"]][3:]
    assert labels == ["bytes sent and received (MB)", "device-minutes"]


def test_long_curves_are_spans_with_their_range():
    values = np.tile([0.2, 0.4, 0.9, 0.5], 1000)
    rounds = ({"round": i, "global": {"accuracy": value}} for i, value in enumerate(values))
    curve = curves(rounds)["lines"][0]["curves"]["accuracy"]["round"]
    assert len(curve["y"]) == MAX_POINTS
    assert (curve["x"][0], curve["y"][0]) == (4.5, pytest.approx(0.46))  # rounds 0 to 9
    assert ({*curve["low"]}, {*curve["high"]}) == ({0.2}, {0.9})


def test_figures_of_a_new_wrapper_need_no_code():
    others = {"text": "x", "mixed": [1, "x"], "empty": [], "unknown": None}
    rounds = [
        {
            **{"round": i, "train": {"zeros": 0, "loss": 1.0}},
            "new": others | {"pair": [i, None], "steps": {f"node-{j}": j + i for j in range(4)}},
        }
        for i in range(1, 5)
    ]
    data = curves(rounds, metric=None)
    assert [metric["key"] for metric in data["metrics"]] == ["loss", "new/pair", "new/steps"]
    assert [(m["section"], m["label"]) for m in data["metrics"]][-1] == ("new", "Steps")
    steps = data["lines"][0]["curves"]["new/steps"]["round"]
    assert (steps["y"], steps["low"]) == ([2.5, 3.5, 4.5, 5.5], [1, 2, 3, 4])


# -- other charts --


def panels(rounds):
    return {panel["title"]: panel for panel in panels_of(History((*rounds,)), "virtual_s")}


def test_charts_are_those_of_the_rounds(history):
    found = panels(history.rounds)
    drawn = found["Tier that trained"]
    for tier, trace in enumerate(drawn["traces"]):
        places = [x for x, y in zip(drawn["x"]["round"], trace["y"], strict=True) if y is not None]
        assert places == [r["round"] for r in history.rounds if r["tifl"]["tier"] == tier]
    assert drawn["layout"]["yaxis"]["ticktext"][0] == "tier 0 (fastest)"
    [dots] = found["Time of each round"]["traces"]
    clock = np.array([record["virtual_s"] for record in history.rounds])
    np.testing.assert_allclose(dots["y"][1:], np.diff(clock), rtol=1e-5)
    good, lost = found["Who trained"]["traces"]
    asked = [name for record in history.rounds for name in record["selected"]]
    failed = [fault["node"] for record in history.rounds for fault in record["failures"]]
    assert lost["y"] == [failed.count(name) for name in lost["x"]] != [0] * len(lost["x"])
    assert np.add(good["y"], lost["y"]).tolist() == [asked.count(name) for name in good["x"]]
    typical, profiled = found["Latency of the nodes"]["traces"]
    tiers, latency = (history.rounds[0]["tifl"][key] for key in ("tiers", "latency"))
    colours = dict(enumerate(tier_colours(5)))
    known = [colours.get(tiers.get(name), GREY) for name in typical["x"]]  # one dropped out
    assert typical["marker"]["color"] == known
    for name, seconds in zip(profiled["x"], profiled["y"], strict=True):
        assert seconds == (latency[name] and pytest.approx(latency[name], rel=1e-5))


def test_chances_and_credits_are_those_of_the_draw(history):
    def with_tifl(key, values):
        told = zip(history.rounds, values, strict=True)
        return panels([{**r, "tifl": r["tifl"] | {key: value}} for r, value in told])

    assert "Chance of each tier" not in panels(history.rounds)
    chances = [[1.0], *[[0, 0.5, 0.5, 0, 0]] * 30]  # at first one tier: nothing, and no gap
    traces = with_tifl("tier_chances", chances)["Chance of each tier"]["traces"]
    assert [trace["y"][:2] for trace in traces] == [[0, 0], [0, 0.5], [0, 0.5], [0, 0], [0, 0]]
    assert "Credits left" in with_tifl("credits", [[1.0], *[[3.0] * 5] * 30])
    # one tier before nodes are timed, and no limit after
    assert "Credits left" not in with_tifl("credits", [[1.0], *[[None] * 5] * 30])
