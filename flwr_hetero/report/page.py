"""Pages: one file each that needs no network; ``report.html`` is the page of a run."""

import gzip
from base64 import b64encode
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from plotly.offline import get_plotlyjs

from flwr_hetero.files import replace
from flwr_hetero.report.compare import Recording, compare, verdict
from flwr_hetero.report.curves import Line, curve_data
from flwr_hetero.report.history import PARTS, REPORT, History, as_number, read_config, read_history
from flwr_hetero.report.nodes import failure_groups, last_fairness, message_parts, node_stats
from flwr_hetero.report.panels import panels_of
from flwr_hetero.report.picture import picture_of
from flwr_hetero.report.style import BLUE, duration, figure, heading, is_share, size, words
from flwr_hetero.report.tables import settings_table, tables_of

# Tables that stand on a page before its scripts have run, and their rows.
STATIC_TABLES, STATIC_ROWS = 2, 50


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write a page that its own scripts draw from its data, in one step; return its path."""
    replace(path, render(data).encode())
    return path


def render(data: Mapping[str, Any]) -> str:
    """Make a page."""
    here = Path(__file__).parent
    script, css = ((here / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    template = Environment(autoescape=True).from_string((here / "page.html").read_text("utf-8"))
    plotly, plotly_hash = _plotly()
    # Browsers run scripts of these hashes only: no text of a node can become one.
    hashes = [plotly_hash, _hash(script)]
    first = [table for table in data["tables"] if not table["folded"]][:STATIC_TABLES]
    static = {"picture": picture_of(data.get("curves")), "tables": first, "most_rows": STATIC_ROWS}
    scripts = {"script": script, "plotly": plotly, "hashes": hashes}
    return template.render(data=data, css=css, **scripts, **static)


@lru_cache(1)
def _plotly() -> tuple[str, str]:
    """Return plotly's script, compressed to a third, and its hash; the page unpacks it."""
    source = get_plotlyjs()
    return b64encode(gzip.compress(source.encode(), mtime=0)).decode(), _hash(source)


def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


# -- the page of a run --


def write_report(directory: str | Path) -> Path:
    """Build ``report.html`` of a run."""
    folder = Path(directory).expanduser().absolute()
    return write_page(run_data(folder), folder / REPORT)


def run_data(directory: str | Path, history: History | None = None) -> dict[str, Any]:
    """Return all that the page of a run shows, for JSON; the run need not have ended."""
    folder = Path(directory).expanduser().absolute()
    history, config = history or read_history(folder), read_config(folder)
    settings = config.get("settings") or {}
    boxes = {"Settings": settings, "Versions": config.get("versions") or {}}
    started = str(config.get("started", "?")).replace("T", " ").replace("+00:00", " UTC")
    times = len(config.get("resumed") or ())
    simulated = history.rounds[-1].get("simulated") if history.rounds else None
    data: dict[str, Any] = {
        "kind": "run",
        "title": folder.name,
        "where": f"Started {started}, {f'resumed {times}x, ' if times else ''}{folder}",
        "mark": "" if simulated is None else "simulated nodes" if simulated else "real nodes",
        "notes": list(history.notes),
        "tables": [settings_table(*box).data() for box in boxes.items() if box[1]],
    }
    if not history.rounds:
        data["notes"].append("No round was completed: the log gives the reason.")
        return data
    metric, run = history.main_metric(), Recording(folder, history, settings)
    is_judged = metric is not None and len(verdict.trained_values(history, metric)[0]) > 0
    found = compare([run], metric, _goal(settings, metric)) if is_judged else None
    judge = found.judge if found else None
    clock = judge.clock if judge else history.clock[0]
    line = Line(folder.name, BLUE, [history])
    return data | {
        "sentences": [_reached(found.judge, found.groups[0].results[0], history)] if found else [],
        "facts": facts(history, settings, judge),
        "curves": curve_data([line], metric, clock, judge.target if judge else None),
        "panels": panels_of(history, clock),
        "tables": [table.data() for table in tables_of([("", None, history)])] + data["tables"],
    }


def _goal(settings: Mapping[str, Any], metric: str | None) -> float | None:
    """Return the accuracy that the run was to reach; None if it was given none."""
    goal = as_number(settings.get("target-accuracy"))
    is_known = 0 < goal <= 100 and is_share(metric or "")
    return goal if is_known and not verdict.lower_is_better(metric or "") else None


def _reached(judge: verdict.Judge, result: verdict.Result, history: History) -> str:
    """Say what was reached and when, and why a run ended early."""
    text = f"{words(judge.metric).capitalize()} {figure(judge.metric, result.end)} at the end"
    stopped = history.rounds[-1].get("stopped")
    early = f" It ended early: {stopped}." if stopped else ""
    if result.to_target is None:
        return f"{text}, of {result.rounds} {result.unit}s.{early}"
    goal = figure(judge.metric, judge.target)
    spent = verdict.cost_text(judge.clock, result.to_target, result.unit)
    when = f", in {result.unit} {result.reached} of {result.rounds}"
    when = "" if judge.clock == "round" else when
    return f"{text}; {goal} is reached after {spent}{when}.{early}"


def facts(
    history: History, settings: Mapping[str, Any], judge: verdict.Judge | None
) -> list[dict[str, str]]:
    """Sum up a run: label, value and note of each figure at the top of the page."""
    found, unit = [], history.unit
    if judge:
        places, values = verdict.trained_values(history, judge.metric)
        best = int(values.argmin() if judge.falls else values.argmax())
        number, top = history.rounds[places[best]]["round"], figure(judge.metric, values[best])
        note = f"best {top} in {unit} {number}{_median(history, judge)}"
        end = figure(judge.metric, verdict.settled_value(history, judge.metric))
        found.append((f"{heading(judge.metric)} at the end", end, note))
    if fair := last_fairness(history):
        label = f"{heading(fair.metric)} on the worst tenth of the nodes"
        note = f"{figure(fair.metric, fair.mean)} on all {fair.nodes}, {unit} {fair.round}"
        found.append((label, figure(fair.metric, fair.worst), note))
    planned = settings.get("num-server-rounds")
    note = "as planned" if planned == history.last_round else f"of {planned} planned"
    found.append((f"{unit}s".capitalize(), str(history.last_round), note if planned else ""))
    virtual, wall = history.column("virtual_s")[-1], history.column("wall_s")[-1]
    seconds, nodes = float(history.busy_s.sum()), node_stats(history)
    in_flight = f"{seconds / virtual:.3g} nodes in flight on average" if virtual > 0 else ""
    up, down = (float(np.nansum(history.column(key))) for key in ("bytes_up", "bytes_down"))
    trained = sum(node.selected > node.lost for node in nodes)
    failures = sum(len(numbers) for *_, numbers in failure_groups(history))
    found += [
        ("Time on the fleet's clock", duration(virtual), f"{duration(wall)} on the server's clock"),
        ("Time of all devices", duration(seconds), in_flight),
        *_message_fact(history),
        ("Traffic", size(up + down), f"{size(up)} up, {size(down)} down"),
        ("Nodes", str(len(nodes)) if nodes else "?", f"{trained} of them trained"),
        ("Failures", str(failures), "" if failures else "every reply was valid"),
    ]
    return [dict(zip(("label", "value", "note"), fact, strict=True)) for fact in found]


def _median(history: History, judge: verdict.Judge) -> str:
    """Say what the median of the nodes is beside their mean."""
    section, key = history.names.get(judge.metric, ("", ""))
    known = history.column(f"{section}_range", key)
    known = known[~np.isnan(known)]
    return f", median of the nodes {figure(judge.metric, known[-1])}" if len(known) else ""


def _message_fact(history: History) -> list[tuple[str, str, str]]:
    """Say how long a message took at most nodes, and for what."""
    if not (known := message_parts(history)):
        return []
    table = np.nan_to_num([*known.values()])
    total, shares = table.sum(axis=1), 100 * table.sum(axis=0) / max(table.sum(), 1e-9)
    parts = [f"{share:.0f} % {part}" for part, share in zip(PARTS, shares, strict=True) if share]
    return [("Time of a message", duration(float(np.median(total))), ", ".join(parts))]
