"""A page to open in a browser: curves to look at, our tables beside the papers' numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_hetero.report.page import write_page
from flwr_hetero.report.style import method_colours
from flwr_hetero.report.tables import Table, text
from flwr_hetero_studies.core.experiment import CLAIMS, Claim, Experiment
from flwr_hetero_studies.core.record import Line

Found = tuple[Experiment, Line]


def write(found: Sequence[Found], path: Path) -> Path:
    """Write a page that needs no network; return its path."""
    names = [f"{each.paper} {each.name}" for each, _ in found]
    named = list(zip(names, found, strict=True))
    data = {
        "kind": "experiments",
        "title": names[0] if len(found) == 1 else f"{len(found)} experiments",
        "where": ", ".join(each.title for each, _ in found),
        "sentences": [f"{name}: {line['metrics']['verdict']}." for name, (_, line) in named],
        "notes": [f"{name}: {note}" for name, one in named for note in notes_of(*one)],
        "panels": [panel(each, line) for each, line in found if line["curve"]],
        "tables": [table.data() for each, line in found for table in tables(each, line)],
    }
    return write_page(data, path)


def notes_of(experiment: Experiment, line: Line) -> list[str]:
    """Return what is to be said beside a verdict."""
    fast = line["case"]["form"] == "fast"
    notes = experiment.notes(line["metrics"]["verdict"], fast=fast)
    return [f"{kind}: {note}" for kind, note in notes.items()]


def panel(experiment: Experiment, line: Line) -> dict[str, Any]:
    """Return a chart of an experiment's curves."""
    colours = method_colours(list(line["curve"]))
    traces = [
        {"name": name, **curve, "mode": "lines", "line": {"color": colour}}
        for (name, curve), colour in zip(line["curve"].items(), colours, strict=True)
    ]
    x, y = line["metrics"]["axes"]
    layout = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    title = f"{experiment.paper} {experiment.name}: {experiment.title}"
    return {"title": title, "traces": traces, "caption": "", "layout": layout}


def tables(experiment: Experiment, line: Line) -> list[Table]:
    """Return what was measured, and what it says to the paper's claims."""
    name, metrics = f"{experiment.paper} {experiment.name}", line["metrics"]
    measured = [[text(cell) for cell in row] for row in metrics["rows"]]
    claims = [[text(cell) for cell in Claim(**claim).cells] for claim in metrics["claims"]]
    head, cells = metrics["head"], CLAIMS
    return [Table(name, head, measured), Table(f"{name}: claims", cells, claims)]
