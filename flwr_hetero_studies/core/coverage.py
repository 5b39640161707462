"""Results of experiments as lines of JSON, and the page that they fill."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr_hetero.errors import invalid
from flwr_hetero_studies.core.experiment import (
    NOT,
    NOT_RUN,
    PARTLY,
    REPRODUCED,
    Experiment,
    Outcome,
)

Line = Mapping[str, Any]
VERDICTS = (REPRODUCED, PARTLY, NOT, NOT_RUN)
HEAD = """# The papers, figure by figure

Every experiment of the five papers that one machine can hold is a command;
`flwr-hetero reproduce --list` names them. Without `--fast` a command has the paper's settings and
takes the data of `--data DIR` (Parquet); with it, it ends within ten minutes on two cores with
smaller data. What a verdict rests on is in the table of claims below. This page is written by
`flwr-hetero reproduce --page docs/coverage.jsonl`.
"""


def line_of(experiment: Experiment, outcome: Outcome, *, form: str, took_s: float) -> Line:
    """Return what is kept of a run."""
    return {
        "paper": experiment.paper,
        "name": experiment.name,
        "form": form,
        "verdict": outcome.verdict,
        "claims": [claim._asdict() | {"holds": bool(claim.holds)} for claim in outcome.claims],
        "took_s": round(took_s, 1),
    }


def keep(path: Path, line: Line) -> None:
    """Write a line in the place of an older one of the same experiment."""
    lines = read(path) if path.exists() else []
    others = [old for old in lines if (old["paper"], old["name"]) != (line["paper"], line["name"])]
    text = "".join(json.dumps(each) + "\n" for each in [*others, line])
    path.write_text(text, encoding="utf-8")


def read(path: Path) -> list[Line]:
    """Read lines that were kept."""
    try:
        return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        rule = f"hold the lines that reproduce --results writes ({error})"
        raise invalid("results", str(path), rule) from error


def page(experiments: Iterable[Experiment], lines: Iterable[Line]) -> str:
    """Write the page: a table of verdicts, then the claims of each experiment."""
    found = {(line["paper"], line["name"]): line for line in lines}
    counts = dict.fromkeys(VERDICTS, 0)
    table = ["| paper | experiment | command | took | verdict |", "| --- | --- | --- | --: | --- |"]
    details: list[str] = []
    for each in experiments:
        line = found.get((each.paper, each.name))
        verdict = NOT_RUN if line is None else str(line["verdict"])
        counts[verdict] += 1
        took, form = ("", "") if line is None else (f"{line['took_s']:.0f} s", line["form"])
        command = f"`{each.paper} {each.name}{' --fast' if form == 'fast' else ''}`"
        table.append(f"| {each.paper} | {each.title} | {command} | {took} | {verdict} |")
        details += [f"\n### {each.paper} {each.name}: {each.title}\n", *_details(each, line)]
    sums = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([HEAD, f"{sum(counts.values())} experiments: {sums}.\n", *table, *details, ""])


def _details(experiment: Experiment, line: Line | None) -> list[str]:
    """Write the claims of an experiment, what differs and why."""
    texts = []
    if line is not None:
        texts += ["| claim | paper | here | |", "| --- | --- | --- | --- |"]
        for claim in line["claims"]:
            held = "holds" if claim["holds"] else "does not hold"
            cells = (claim["text"], claim["published"], claim["found"], held)
            texts.append(f"| {' | '.join(cells)} |")
        texts.append("")
    verdict, form = (NOT_RUN, "") if line is None else (line["verdict"], line["form"])
    notes = experiment.notes(verdict, fast=form == "fast")
    named = {name.replace("--fast", "`--fast`").capitalize(): text for name, text in notes.items()}
    return texts + [f"{name}: {text}\n" for name, text in named.items()]
