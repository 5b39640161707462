"""The papers, figure by figure: verdicts, and the claims they rest on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_hetero_studies.core.experiment import NOT, NOT_RUN, PARTLY, REPRODUCED, Claim, Experiment
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import table
from flwr_hetero_studies.papers.cases import find

VERDICTS = (REPRODUCED, PARTLY, NOT, NOT_RUN)


def report(lines: Sequence[Line], folder: Path) -> dict[str, Any]:
    found = {(line["case"]["experiment"], line["case"]["name"]): line for line in lines}
    counts = dict.fromkeys(VERDICTS, 0)
    rows, details = list[list[str]](), ""
    for each in find():
        line = found.get((each.paper, each.name))
        verdict = NOT_RUN if line is None else line["metrics"]["verdict"]
        counts[verdict] += 1
        took = "" if line is None else f"{line['metrics']['took_s']:.0f} s"
        form = " --fast" if line and line["case"]["form"] == "fast" else ""
        command = f"`{each.paper} {each.name}{form}`"
        rows.append([each.paper, each.title, command, took, verdict])
        details += f"\n### {each.paper} {each.name}: {each.title}\n\n{claims(each, line)}"
    sums = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    verdicts = table(["paper", "experiment", "command", "took", "verdict"], rows)
    return {"count": len(rows), "sums": sums, "verdicts": verdicts, "details": details}


def claims(experiment: Experiment, line: Line | None) -> str:
    verdict, fast, text = NOT_RUN, False, ""
    if line is not None:
        verdict, fast = line["metrics"]["verdict"], line["case"]["form"] == "fast"
        rows = [Claim(**claim).cells for claim in line["metrics"]["claims"]]
        text = table(["claim", "paper", "here", ""], rows) + "\n"
    notes = experiment.notes(verdict, fast=fast)
    named = {name.replace("--fast", "`--fast`").capitalize(): note for name, note in notes.items()}
    return text + "\n".join(f"{name}: {note}\n" for name, note in named.items())
