"""The pages of the papers: verdicts by figure, and for each paper the claims they rest on."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.criteria import NOT, SIZE, VERDICTS
from flwr_hetero_studies.core.experiment import CLAIMS, DIFFERS, NOT_RUN, PAPERS, PARTLY, WHY
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import fill, table
from flwr_hetero_studies.papers.cases import FULL, HERE, find, folder_of

HEAD = ("figure", *CLAIMS)
STUDIED = ("cd-grab",)
"""Papers with a study of their own, which writes their page."""
Record = Mapping[tuple[str, str], Line]
"""A line per experiment, by paper and name."""


def best(lines: Sequence[Line]) -> Record:
    """Keep one line per experiment: the full form, where there is one."""
    full_form_last = sorted(lines, key=lambda line: line["case"]["form"] == FULL)
    return {(line["case"]["experiment"], line["case"]["name"]): line for line in full_form_last}


def rows_of(paper: str, record: Record) -> list[list[str]]:
    return [
        [experiment.name, *claim.values()]
        for experiment in find(paper)
        if (paper, experiment.name) in record
        for claim in record[paper, experiment.name]["metrics"]["claims"]
    ]


def summed(rows: Sequence[Sequence[str]]) -> str:
    counts = Counter(row[-1] for row in rows)
    texts = [f"{counts[name]} {name}" for name in VERDICTS]
    return f"Of {len(rows)} claims: {', '.join(texts)}."


def verdict_of(line: Line | None) -> str:
    return line["metrics"]["verdict"] if line else NOT_RUN


def figures_by_verdict(record: Record) -> str:
    """Write a table of the figures with each verdict, a column per paper."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for experiment in find():
        line = record.get((experiment.paper, experiment.name))
        form = " (full)" if line and line["case"]["form"] == FULL else ""
        names[verdict_of(line), experiment.paper].append(experiment.name + form)
    rows = []
    for verdict in (*VERDICTS, PARTLY, NOT_RUN):
        rows.append([verdict, *(", ".join(names[verdict, paper]) for paper in PAPERS)])
    return table(["verdict", *PAPERS], rows)


def report(lines: Sequence[Line], folder: Path) -> dict[str, Any]:
    record = best(lines)
    rows = {paper: rows_of(paper, record) for paper in PAPERS}
    papers = []
    for paper, own_rows in rows.items():
        counts = Counter(row[-1] for row in own_rows)
        link = f"[{paper}]({folder_of(paper)}/report.md)"
        papers.append([link, *(str(counts[name]) for name in VERDICTS)])
        if paper not in STUDIED:
            write_page(paper, record, folder)
    return {
        "counts": summed([row for own_rows in rows.values() for row in own_rows]),
        "papers": table(["paper", *VERDICTS], papers),
        "figures": figures_by_verdict(record),
        "differs": "\n".join(f"{p}:\n\n{notes(DIFFERS, p, record)}" for p in PAPERS),
        "claims": "\n".join(f"{paper}\n\n{table(HEAD, own)}" for paper, own in rows.items()),
    }


def write_page(paper: str, record: Record, folder: Path) -> None:
    """Write the page of a paper without a study of its own."""
    template = (HERE / folder_of(paper) / "page.template").read_text(encoding="utf-8")
    page = folder / folder_of(paper) / "report.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(fill(template, parts_of(paper, record)).rstrip() + "\n", encoding="utf-8")


def parts_of(paper: str, record: Record) -> dict[str, str]:
    rows = rows_of(paper, record)
    return {
        "counts": summed(rows),
        "failed": with_verdict(NOT, rows),
        "sizes": with_verdict(SIZE, rows),
        "reasons": notes(WHY, paper, record),
    }


def with_verdict(verdict: str, rows: Sequence[Sequence[str]]) -> str:
    """Write a table of the claims with a verdict, which the table need not repeat."""
    chosen = [row for row in rows if row[-1] == verdict]
    return table(CLAIMS[:-1], [(f"**{row[0]}** {row[1]}", *row[2:-1]) for row in chosen])


def notes(kind: str, paper: str, record: Record) -> str:
    """List notes of one kind; figures with the same text share an entry."""
    names: dict[str, list[str]] = {}
    for experiment in find(paper):
        verdict = verdict_of(record.get((paper, experiment.name)))
        # the notes of the full form: the short form adds what it cuts
        text = experiment.notes(verdict, fast=False).get(kind)
        if text:
            names.setdefault(text, []).append(experiment.name)
    return "".join(f"- {', '.join(figures)}: {text}\n" for text, figures in names.items())
