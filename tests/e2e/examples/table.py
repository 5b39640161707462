"""The table of docs/apps.md: lines changed, effect and overhead of each method in each app."""

from collections.abc import Mapping
from pathlib import Path

from e2e.examples.methods import METHODS, REFUSED
from e2e.examples.running import APPS, line_counts

NOISE = 0.15
"""Overheads below this change from run to run."""
PAGE = Path(__file__).parents[3] / "docs" / "apps.md"
BEGIN = "<!-- flwr_hetero_studies/cost/apps.py writes this -->\n\n"
END = "\n<!-- so far -->"


def made(overhead: Mapping[str, Mapping[str, float]]) -> str:
    """Make the table, and the errors below it."""
    texts = list(dict.fromkeys(shown(refusal) for refusal in REFUSED.values()))
    head = ["method", "effect", *(app.title for app in APPS.values())]
    rows = [head, ["---"] * len(head)]
    for name, method in METHODS.items():
        cells = []
        for kind, app in APPS.items():
            if refusal := REFUSED.get((kind, name)):
                cells.append(f"error {texts.index(shown(refusal)) + 1}")
                continue
            server, node = line_counts(app, method.wrapped, method.half)
            cost = shown_cost(overhead[kind][name])
            cells.append(f"{server} + {node}{cost}")
        rows.append([f"`{name}`", method.effect, *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    errors = "\n".join(f"{number}. `{text}`" for number, text in enumerate(texts, 1))
    return f"{table}\n\nErrors:\n\n{errors}\n"


def shown_cost(part: float) -> str:
    """Write an overhead, if it is beyond chance."""
    return f", {part:+.0%}" if part > NOISE else ""


def shown(refusal) -> str:
    """Write an error as it is met, of any wrapper alike."""
    text = refusal.text
    for name in METHODS:
        text = text.replace(f"inside {name}", "inside ...")
        text = text.replace(f"{name} learns", "... learns")
    return f"{refusal.error.__name__}: {text}"


def parts() -> tuple[str, str, str]:
    """Return the page in three parts, the table in the middle."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    return before + BEGIN, table, END + after
