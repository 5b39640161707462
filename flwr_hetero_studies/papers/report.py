"""The papers, figure by figure: verdicts here, the claims they rest on in each paper's page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.criteria import VERDICTS, Claim
from flwr_hetero_studies.core.experiment import CLAIMS, DIFFERS, NOT_RUN, PAPERS, WHY, together
from flwr_hetero_studies.core.record import Line, read
from flwr_hetero_studies.core.tables import table
from flwr_hetero_studies.papers.cases import FORM, find

HEAD = ("figure", *CLAIMS)
Found = Mapping[tuple[str, str], Line]
"""A line per experiment, by paper and name."""


def claims_of(line: Line | None) -> list[Claim]:
    return [Claim(**claim) for claim in line["metrics"]["claims"]] if line else []


def best(lines: Sequence[Line]) -> Found:
    """Keep a line per experiment: the full form, where there is one."""
    order = sorted(lines, key=lambda line: line["case"]["form"] == FORM[0])
    return {(line["case"]["experiment"], line["case"]["name"]): line for line in order}


def rows_of(paper: str, found: Found) -> list[list[str]]:
    lines = ((each.name, found.get((paper, each.name))) for each in find(paper))
    return [[name, *claim] for name, line in lines for claim in claims_of(line)]


def count(rows: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(row[-1] for row in rows)


def summed(rows: Sequence[Sequence[str]]) -> str:
    texts = [f"{count(rows)[name]} {name}" for name in VERDICTS]
    return f"Of {len(rows)} claims: {', '.join(texts)}."


def verdict_of(line: Line | None) -> str:
    return together([claim.verdict for claim in claims_of(line)]) if line else NOT_RUN


def report(lines: Sequence[Line], folder: Path) -> dict[str, Any]:
    found, verdicts = best(lines), list[list[str]]()
    for each in find():
        line = found.get((each.paper, each.name))
        took = "" if line is None else f"{line['metrics']['took_s']:.0f} s"
        took += " (full)" if line and line["case"]["form"] == FORM[0] else ""
        verdicts.append([f"`{each.paper} {each.name}`", each.title, took, verdict_of(line)])
    rows = {paper: rows_of(paper, found) for paper in PAPERS}
    papers = [
        [f"[{paper}]({paper.replace('-', '_')}/report.md)"]
        + [str(count(own)[name]) for name in VERDICTS]
        for paper, own in rows.items()
    ]
    return {
        "counts": summed([row for own in rows.values() for row in own]),
        "papers": table(["paper", *VERDICTS], papers),
        "verdicts": table(["command", "figure", "took", "verdict"], verdicts),
        "differs": "\n".join(f"{p}:\n\n{notes(DIFFERS, p, found)}" for p in PAPERS),
        "claims": "\n".join(f"{paper}\n\n{table(HEAD, own)}" for paper, own in rows.items()),
    }


def coverage(paper: str) -> dict[str, str]:
    """Return what a paper's page has of the record: counts and claims."""
    found = best(read(Path(__file__).parent))
    rows = rows_of(paper, found)
    # a figure is named at its first claim
    both = pairwise([[""], *rows])
    shown = [["" if own[0] == last[0] else own[0], *own[1:]] for last, own in both]
    text = f"{table(HEAD, shown)}\nReasons:\n\n{notes(WHY, paper, found)}"
    return {"counts": summed(rows), "claims": text}


def notes(kind: str, paper: str, found: Found) -> str:
    """List notes of one kind; a text that figures share stands once."""
    names: dict[str, list[str]] = {}
    for each in find(paper):
        verdict = verdict_of(found.get((each.paper, each.name)))
        # the notes are of the form that is run now
        if text := each.notes(verdict, fast=False).get(kind):
            names.setdefault(text, []).append(each.name)
    return "".join(f"- {', '.join(of)}: {text}\n" for text, of in names.items())
