"""The committed page of verdicts: what its lines say, of every experiment there is."""

from pathlib import Path

from flwr_hetero_studies.core import coverage
from flwr_hetero_studies.core.catalogue import find

DOCS = Path(__file__).parents[3] / "docs"
LINES = coverage.read(DOCS / "coverage.jsonl")


def test_page_is_what_its_lines_say():
    assert coverage.page(find(), LINES) == (DOCS / "coverage.md").read_text(encoding="utf-8")


def test_every_experiment_that_can_be_run_was_run():
    known = {(line["paper"], line["name"]) for line in LINES}
    every = {(each.paper, each.name): each for each in find()}
    assert known <= every.keys()
    missing = every.keys() - known
    assert len(every) >= 30
    assert len(missing) <= len(every) / 5
    assert all(every[key].why for key in missing), "a reason for each that was not run"
