"""Pages from the results: how costs, gains and misses are read; the committed pages stand."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from flwr_hetero_studies.core import bench
from flwr_hetero_studies.core.record import read


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
