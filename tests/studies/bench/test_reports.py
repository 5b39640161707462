"""Pages from the results: how costs, gains and misses are read; the committed pages stand."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from flwr_hetero_studies.core import bench
from flwr_hetero_studies.core.experiment import PAPERS
from flwr_hetero_studies.core.record import read
from flwr_hetero_studies.objectives import report as objectives
from flwr_hetero_studies.papers import report as papers
from flwr_hetero_studies.papers.cases import folder_of


@pytest.mark.parametrize("claim", bench.CLAIMS)
def test_committed_page_is_what_its_results_say(claim, tmp_path, monkeypatch):
    if claim != "asynchrony":  # one is enough to see that figures can be written: it takes seconds
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: Path(path).touch())
    folder = bench.CLAIMS[claim]
    text = bench.page_of(claim, read(folder), tmp_path)
    assert text == (folder / "report.md").read_text(encoding="utf-8")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in folder.glob("*.png")}
    assert all(f"({name})" in text for name in drawn)
    # the papers' report also writes the pages of papers without a study of their own
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*/*.md")}
    assert len(pages) == (4 if claim == "papers" else 0)
    for name, page in pages.items():
        assert page == (folder / name / "report.md").read_text(encoding="utf-8")


def test_every_claim_is_counted_and_listed():
    found = papers.best(read(bench.CLAIMS["papers"]))
    rows = {paper: papers.rows_of(paper, found) for paper in PAPERS}
    count = sum(map(len, rows.values()))
    page = (bench.CLAIMS["papers"] / "report.md").read_text(encoding="utf-8")
    assert f"Of {count} claims: " in page
    for paper, own in rows.items():
        page = bench.CLAIMS["papers"] / folder_of(paper) / "report.md"
        first, _, text = page.read_text(encoding="utf-8").partition("## Claims of the paper")
        assert papers.summed(own) in first
        for _, *claim in own:
            cells = " | ".join(each.replace("|", r"\|") for each in claim)
            assert f" | {cells} |\n" in text


def line(name, seed, accuracy, **curve):
    return {
        "case": {"experiment": "data", "name": name, "rounds": 60, "most": 3,
                 "train-examples": 30, "learning-rate": 0.1},
        "seed": seed,
        "metrics": {"took_s": 60.0},
        "curve": {"accuracy": list(accuracy), **curve},
        "versions": {"flwr": "1"},
    }  # fmt: skip


def rising(name, seed, rise, round_s=1.0, rounds=60, most=0.8):
    """Rise by so much a round up to ``most``, and stay there."""
    numbers = range(rounds + 1)
    columns = {"round": 1.0, "virtual_s": round_s, "bytes": 2.0, "device_s": 3.0}
    curve = {key: [factor * n for n in numbers] for key, factor in columns.items()}
    return line(name, seed, [min(most, rise * n) for n in numbers], **curve)


# --- objectives -----------------------------------------------------------------------------


def test_settings_that_lose_slow_classes_are_in_bold():
    lines = {}
    for name, slow in (("FedAvg", 0.5), ("TiFL, paced", 0.47), ("biased, sqrt", 0.49)):
        lines[name] = rising(name, 0, rise=0.04)
        lines[name]["curve"]["slow"] = [slow] * len(lines[name]["curve"]["accuracy"])
    rows = [objectives.row(n, [each], [lines["FedAvg"]])[2:4] for n, each in lines.items()]
    assert rows == [["50.0", ""], ["47.0", "**-3.0**"], ["49.0", "-1.0"]]
