"""The table of docs/strangers.md, made of the results of a run-through."""

import json
import sys
from pathlib import Path

from e2e.strangers.apps import APPS, KNOWN, METHODS

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "strangers.md"
RESULTS = HERE / "results.json"
KEPT = ("app", "method", "lines", "trained", "in_flight", "scores", "error")
BEGIN, END = "<!-- tests/e2e/strangers/page.py writes this -->\n\n", "\n<!-- so far -->"
"""Around the table."""


def made(results: list[dict]) -> str:
    """Make the table: lines changed, final score and examples trained, of each app and method."""
    found = {(each["app"], each["method"]): each for each in results}
    head = ["app", "kind", "score", "FedAvg", "FedSlice", "TiFL", "sampler"]
    rows = [head, ["---"] * len(head)]
    for name, app in APPS.items():
        if (name, "FedAvg") not in found:
            continue
        usual = found[name, "FedAvg"]
        link = f"[{name}]({app.source.address}/tree/{app.source.commit}/{app.folder})"
        cells = [link, app.kind, f"`{app.score.split()[1]}`", f"{usual['scores'][-1]:.3f}"]
        for method in ("FedSlice", "TiFL", app.sampler):
            one = found.get((name, method))
            cells.append(cell(one, usual, KNOWN.get((name, method))) if one else "")
        rows.append(cells)
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    reasons = [f"{i}. {why}." for i, why in enumerate(dict.fromkeys(KNOWN.values()), 1)]
    return "\n".join([table, "", *reasons, ""])


def cell(one: dict, usual: dict, why: str | None) -> str:
    """Write a score, the examples trained on over FedAvg's, and the lines changed."""
    name = f"{kind}: " if (kind := METHODS[one["method"]].sampler) else ""
    if one["error"] or not one["scores"]:
        return f"{name}error {number(why)}"
    part, more = (one[kind] / usual["trained"] for kind in ("trained", "in_flight"))
    trained = f"{part:.2f} + {more:.2f}" if more >= 0.005 else f"{part:.2f}"
    text = f"{name}{one['scores'][-1]:.3f}; {trained}; {one['lines']}"
    return f"{text}, see {number(why)}" if why else text


def number(why: str | None) -> str:
    """Return the number of a known fault in the list below the table."""
    return str(list(dict.fromkeys(KNOWN.values())).index(why) + 1) if why else "not known"


def main() -> None:
    """Read lines of results, the newest of a run last, and write both files."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    newest = {(each["app"], each["method"]): each for each in lines}
    in_order = [(app, method) for app in APPS for method in METHODS if (app, method) in newest]
    results = [{name: newest[key][name] for name in KEPT} for key in in_order]
    rows = ",\n".join(json.dumps(result) for result in results)
    RESULTS.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + made(results) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
