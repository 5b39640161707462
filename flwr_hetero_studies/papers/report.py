"""The papers, figure by figure: verdicts here, the claims they rest on in each paper's page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.criteria import OLD, VERDICTS, Claim
from flwr_hetero_studies.core.experiment import CLAIMS, DIFFERS, NOT_RUN, PAPERS, WHY, together
from flwr_hetero_studies.core.record import Line, read
from flwr_hetero_studies.core.tables import table
from flwr_hetero_studies.papers.cases import FORM, find

HEAD = ("figure", *CLAIMS)
HELD, FELL = f"{OLD}: held", f"{OLD}: did not hold"
Found = Mapping[tuple[str, str], Line]
"""A line per experiment, by paper and name."""


def claims_of(line: Line | None) -> list[Claim]:
    """Return the claims of a line; of one from before the criteria only whether they held."""
    found = line["metrics"]["claims"] if line else []
    if line and "seeds" not in line["case"]:
        names = ("text", "published", "found")
        return [Claim(*(c[n] for n in names), HELD if c["holds"] else FELL) for c in found]
    return [Claim(**claim) for claim in found]


def best(lines: Sequence[Line]) -> Found:
    """Keep a line per experiment: by these criteria, and the full form, where there is one."""
    order = sorted(lines, key=lambda x: ("seeds" in x["case"], x["case"]["form"] == FORM[0]))
    return {(line["case"]["experiment"], line["case"]["name"]): line for line in order}


def kinds(verdicts: Iterable[str]) -> list[str]:
    return [OLD if verdict.startswith(OLD) else verdict for verdict in verdicts]


def rows_of(paper: str, found: Found) -> list[list[str]]:
    lines = ((each.name, found.get((paper, each.name))) for each in find(paper))
    return [[name, *claim] for name, line in lines for claim in claims_of(line)]


def count(rows: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(kinds(row[-1] for row in rows))


def summed(rows: Sequence[Sequence[str]]) -> str:
    texts = [f"{count(rows)[name]} {name}" for name in (*VERDICTS, OLD)]
    return f"Of {len(rows)} claims: {', '.join(texts)}."


def verdict_of(line: Line | None) -> str:
    return together(kinds(claim.verdict for claim in claims_of(line))) if line else NOT_RUN


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
        + [str(count(own)[name]) for name in (*VERDICTS, OLD)]
        for paper, own in rows.items()
    ]
    return {
        "counts": summed([row for own in rows.values() for row in own]),
        "papers": table(["paper", *VERDICTS, OLD], papers),
        "verdicts": table(["command", "figure", "took", "verdict"], verdicts),
        "differs": "\n".join(f"{p}:\n\n{notes(DIFFERS, p, found)}" for p in PAPERS),
        "claims": "\n".join(f"{paper}\n\n{table(HEAD, own)}" for paper, own in rows.items()),
    }


def coverage(paper: str) -> dict[str, str]:
    """Return what a paper's page has of the record: counts and claims."""
    found = best(read(Path(__file__).parent))
    rows = rows_of(paper, found)
    new = [row for row in rows if not row[-1].startswith(OLD)]
    fell = [row for row in rows if row[-1] == FELL]
    # a figure is named at its first claim
    both = pairwise([[""], *new])
    shown = [["" if own[0] == last[0] else own[0], *own[1:]] for last, own in both]
    text = f"{table(HEAD, shown)}\nReasons:\n\n{notes(WHY, paper, found)}"
    if old := len(rows) - len(new):
        text += (
            f"\n### {OLD.capitalize()}\n\n{old - len(fell)} of {old} held by a former criterion "
            f"(`flwr-hetero study papers --details`){', these did not:' if fell else '.'}\n\n"
        )
        form = "- {}: {}. Paper: {}. Here: {}.\n"
        text += "".join(form.format(*row) for row in fell)
    return {"counts": summed(rows), "claims": text}


def notes(kind: str, paper: str, found: Found) -> str:
    """List notes of one kind; a text that figures share stands once."""
    names: dict[str, list[str]] = {}
    for each in find(paper):
        verdict = verdict_of(found.get((each.paper, each.name)))
        # the notes are of the form that is run now
        if verdict != OLD and (text := each.notes(verdict, fast=False).get(kind)):
            names.setdefault(text, []).append(each.name)
    return "".join(f"- {', '.join(of)}: {text}\n" for text, of in names.items())
