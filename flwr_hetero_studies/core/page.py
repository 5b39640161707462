"""A page of experiments: curves to look at, our tables beside the papers' numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_hetero.report.page import write_page
from flwr_hetero.report.style import method_colours
from flwr_hetero.report.tables import Table, text
from flwr_hetero_studies.core.experiment import CLAIMS, Experiment, Outcome

Found = tuple[Experiment, Outcome]


def write(found: Sequence[Found], fast: bool, path: Path) -> Path:
    """Write a page that needs no network; return its path."""
    return write_page(page_data(found, fast), path)


def page_data(found: Sequence[Found], fast: bool) -> dict[str, Any]:
    """Return what the page shows, for JSON."""
    names = [f"{each.paper} {each.name}" for each, _ in found]
    notes = [
        f"{name}: {kind}: {note}"
        for name, (each, outcome) in zip(names, found, strict=True)
        for kind, note in each.notes(outcome.verdict, fast=fast).items()
    ]
    return {
        "kind": "experiments",
        "title": names[0] if len(found) == 1 else f"{len(found)} experiments",
        "where": ", ".join(each.title for each, _ in found),
        "sentences": [f"{n}: {o.verdict}." for n, (_, o) in zip(names, found, strict=True)],
        "notes": notes,
        "panels": [panel(each, outcome) for each, outcome in found if outcome.curves],
        "tables": [table.data() for each, outcome in found for table in tables(each, outcome)],
    }


def panel(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return a chart of an experiment's curves."""
    colours = method_colours(list(outcome.curves))
    traces = [
        {"name": name, "x": [*curve.x], "y": [*curve.y], "mode": "lines", "line": {"color": colour}}
        for (name, curve), colour in zip(outcome.curves.items(), colours, strict=True)
    ]
    x, y = outcome.axes
    layout = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    title = f"{experiment.paper} {experiment.name}: {experiment.title}"
    return {"title": title, "traces": traces, "caption": "", "layout": layout}


def tables(experiment: Experiment, outcome: Outcome) -> list[Table]:
    """Return what was measured, and what it says to the paper's claims."""
    name = f"{experiment.paper} {experiment.name}"
    measured = [[text(cell) for cell in row] for row in outcome.rows]
    claims = [[text(cell) for cell in claim.cells] for claim in outcome.claims]
    return [Table(name, outcome.head, measured), Table(f"{name}: claims", CLAIMS, claims)]
