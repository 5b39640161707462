"""The papers, figure by figure: verdicts, and the claims they rest on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.criteria import OLD, VERDICTS, Claim
from flwr_hetero_studies.core.experiment import CLAIMS, NOT_RUN, PAPERS, Experiment, together
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import table
from flwr_hetero_studies.papers.cases import FORM, find

HELD = {True: "held", False: "did not hold"}


def claims_of(line: Line | None) -> list[Claim]:
    """Return the claims of a line; those of before the criteria have no verdict."""
    found = line["metrics"]["claims"] if line else []
    if line and "seeds" not in line["case"]:
        names = ("text", "published", "found")
        return [
            Claim(*(c[n] for n in names), f"{OLD}; {HELD[c['holds']]} by a former criterion")
            for c in found
        ]
    return [Claim(**claim) for claim in found]


def best(lines: Sequence[Line]) -> dict[tuple[str, str], Line]:
    """Keep a line per experiment: by these criteria, and the full form, where there is one."""
    order = sorted(lines, key=lambda x: ("seeds" in x["case"], x["case"]["form"] == FORM[0]))
    return {(line["case"]["experiment"], line["case"]["name"]): line for line in order}


def kinds(claims: Sequence[Claim]) -> list[str]:
    return [OLD if claim.verdict.startswith(OLD) else claim.verdict for claim in claims]


def summed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts.get(name, 0)} {name}" for name in (*VERDICTS, OLD))


def report(lines: Sequence[Line], folder: Path) -> dict[str, Any]:
    found, rows, details = best(lines), list[list[str]](), ""
    by_paper = {paper: Counter[str]() for paper in PAPERS}
    for each in find():
        line = found.get((each.paper, each.name))
        claims = claims_of(line)
        by_paper[each.paper].update(kinds(claims))
        verdict = together(kinds(claims)) if claims else NOT_RUN
        took = "" if line is None else f"{line['metrics']['took_s']:.0f} s"
        form = " --fast" if line and line["case"]["form"] == FORM[1] else ""
        command = f"`{each.paper} {each.name}{form}`"
        rows.append([each.paper, each.title, command, took, verdict])
        details += f"\n### {each.paper} {each.name}: {each.title}\n\n{shown(each, line, verdict)}"
    every = sum(by_paper.values(), Counter[str]())
    papers = [
        [paper, *(counts[name] for name in (*VERDICTS, OLD))] for paper, counts in by_paper.items()
    ]
    return {
        "count": every.total(),
        "sums": summed(every),
        "papers": table(["paper", *VERDICTS, OLD], papers),
        "verdicts": table(["paper", "experiment", "command", "took", "verdict"], rows),
        "details": details,
    }


def shown(experiment: Experiment, line: Line | None, verdict: str) -> str:
    fast = bool(line) and line["case"]["form"] == FORM[1]
    text = table(CLAIMS, claims_of(line)) + "\n" if line else ""
    if verdict == OLD:
        return text + "Made by a former criterion and form, from one to four seeds.\n"
    notes = experiment.notes(verdict, fast=fast)
    named = {name.replace("--fast", "`--fast`").capitalize(): note for name, note in notes.items()}
    return text + "\n".join(f"{name}: {note}\n" for name, note in named.items())
