import base64
import json
import re
from html.parser import HTMLParser

import pytest

from flwr_hetero.report.page import write_report
from flwr_hetero.report.plots import PLOTS

EVIL = "$\\frac{$<script>alert(1)</script>&'\""
VOID = {"meta", "img", "source"}


class Page(HTMLParser):
    """Collects tags and texts, and checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def evil_run(tmp_path_factory, rounds_of):
    """Write a report of a run in which every name is hostile."""
    text = json.dumps(rounds_of(12, 10))
    evil = json.dumps(EVIL)[1:-1]
    for name in ("node-3", "cd-grab", "no reply within 30 s", "herding-bound"):
        text = text.replace(name, evil + name)
    rounds = json.loads(text)
    rounds[5]["failures"] = [{"node": EVIL, "reason": EVIL}]
    path = tmp_path_factory.mktemp("evil") / "run<b>"
    path.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in rounds)
    (path / "history.jsonl").write_text(lines + '{"torn')
    config = {
        "started": "2025-01-02T03:04:05+00:00",
        "resumed": ["x"],
        "settings": {"num-server-rounds": 20, EVIL: EVIL, "cuda": False, "path": None},
        "versions": {"numpy": "2.0"},
        "command": EVIL,
    }
    (path / "config.json").write_text(json.dumps(config))
    report = write_report(path)
    return path, report.read_text(), Page(report.read_text())


def test_page_loads_and_runs_nothing(evil_run):
    _, text, page = evil_run
    links = [
        v for _, given in page.tags for k, v in given.items() if k in ("src", "href", "srcset")
    ]
    assert links
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "b"})
    assert not [k for _, given in page.tags for k in given if k.startswith("on")]
    assert not re.search(r"url\(|@import|<script", text)
    [policy] = [g["content"] for t, g in page.tags if "http-equiv" in g]
    assert policy.startswith("default-src 'none'")
    assert {EVIL, EVIL + "cd-grab", "run<b>"} <= {*page.texts}


def test_figures_on_disk_and_in_the_page(evil_run):
    path, _, page = evil_run
    inline = [given for tag, given in page.tags if tag == "img"]
    files = {file.read_bytes() for file in path.glob("*.png")}
    assert {base64.b64decode(given["src"].split(",")[1]) for given in inline} == files
    names = {file.stem for file in path.glob("*.png")}
    drawn = {plot.name for plot in PLOTS} - {"merges"}
    assert drawn < names
    assert len(names) == len(drawn) + 2
    assert all(given["alt"] and int(given["width"]) == 1440 for given in inline)
    dark = [given["srcset"] for tag, given in page.tags if tag == "source"]
    assert len(dark) == len(inline)
    assert not set(dark) & {given["src"] for given in inline}


def test_page_says_what_happened(evil_run):
    path, _, page = evil_run
    said = " ".join(page.texts)
    *_, last, _ = (path / "history.jsonl").read_text().splitlines()
    final = f"{100 * json.loads(last)['global']['accuracy']:.1f} %"
    started = "Started 2025-01-02 03:04:05 UTC, resumed once"
    settings = ("of 20 planned", "num-server-rounds", "not set")
    tiers = ("Tiers at a glance", "tier 4 (slowest)")
    note = "line 14 is torn and was left out"
    for words in (final, started, *settings, *tiers, note, "All rounds"):
        assert words in said


def test_run_without_tiers_or_metrics(make_run):
    rounds = [
        {"round": 0, "virtual_s": 0.0, "wall_s": 0.0},
        {"round": 1, "virtual_s": 2.0, "wall_s": 0.1, "selected": ["a"], "latency": {"a": 2.0}},
    ]
    path = make_run(rounds=rounds)
    text = write_report(path).read_text()
    assert write_report(path).read_text() == text
    assert not list(path.glob("*.draft"))
    assert {file.stem for file in path.glob("*.png")} == {"time", "latency", "selection"}
    said = " ".join(Page(text).texts)
    assert "Tiers at a glance" not in said
    assert "every reply was good" in said
    assert not re.search(r"\bnan\b|\binf\b|None", said)
