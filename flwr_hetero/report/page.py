"""Pages that need no network: one file each; ``report.html`` is the page of a run."""

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
from flwr_hetero.report.compare.sentences import HOW_TO_EVALUATE, cost_text, slow_nodes_line
from flwr_hetero.report.curves import Line, curve_data, panels_of
from flwr_hetero.report.history import REPORT, History, as_number, read_config, read_history
from flwr_hetero.report.nodes import failure_groups, last_fairness, node_stats
from flwr_hetero.report.style import BLUE, duration, figure, heading, is_share, size, words
from flwr_hetero.report.tables import settings_table, tables_of

# What the scripts of a page draw; its template shows the rest.
CHARTS = ("curves", "panels", "costs")


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write a page in one step; return its path."""
    replace(path, render(data).encode())
    return path


def render(data: Mapping[str, Any]) -> str:
    """Make a page."""
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    css = (folder / "page.css").read_text(encoding="utf-8")
    html = (folder / "page.html").read_text(encoding="utf-8")
    plotly, plotly_hash = _plotly()
    charts = {key: data.get(key) for key in CHARTS}
    # Browsers run only scripts with these hashes, so a text of a node can never run as one.
    hashes = [plotly_hash, _hash(script)]
    template = Environment(autoescape=True).from_string(html)
    return template.render(
        data=data, charts=charts, css=css, script=script, plotly=plotly, hashes=hashes
    )


@lru_cache(1)
def _plotly() -> tuple[str, str]:
    """Return plotly's script, compressed to a third of its size, and its hash."""
    source = get_plotlyjs()
    return b64encode(gzip.compress(source.encode(), mtime=0)).decode(), _hash(source)


def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def write_report(directory: str | Path) -> Path:
    """Build ``report.html`` of a run."""
    folder = Path(directory).expanduser().absolute()
    return write_page(run_data(folder), folder / REPORT)


def run_data(directory: str | Path) -> dict[str, Any]:
    """Return everything that the page of a run shows, for JSON; the run may still be going on."""
    folder = Path(directory).expanduser().absolute()
    history = read_history(folder)
    config = read_config(folder)
    settings = config.get("settings") or {}
    versions = config.get("versions") or {}
    folded = [("Settings", settings), ("Versions", versions)]
    data: dict[str, Any] = {
        "kind": "run",
        "title": folder.name,
        "where": f"{_started(config)}, {folder}",
        "mark": "",
        "sentences": [],
        "notes": list(history.notes),
        "tables": [settings_table(title, rows).data() for title, rows in folded if rows],
    }
    if not history.rounds:
        data["notes"].append("No round was completed. The log gives the reason.")
        return data
    simulated = history.rounds[-1].get("simulated")
    if simulated is not None:
        data["mark"] = "simulated nodes" if simulated else "real nodes"
    metric = history.main_metric()
    judge = None
    target = None
    clock = history.clock[0]
    lines = ["No trained model was evaluated.", HOW_TO_EVALUATE]
    if metric is not None and len(verdict.trained_values(history, metric)[0]):
        run = Recording(folder, history, settings)
        comparison = compare([run], metric, _target_accuracy(settings, metric))
        judge = comparison.judge
        target = judge.target
        clock = judge.clock
        [[result]] = [group.results for group in comparison.groups]
        lines = [_outcome(judge, result, history), slow_nodes_line(["this run"], [[result]])]
        lines += [] if result.node_metric else [HOW_TO_EVALUATE]
    price = f"{size(history.traffic.sum())} sent and received, {duration(history.busy_s.sum())}"
    data["sentences"] = ["\n".join([*lines, f"Price of the run: {price} of device time."])]
    tables = [table.data() for table in tables_of([("", None, history)])]
    return data | {
        "facts": facts(history, settings, judge),
        "curves": curve_data([Line(folder.name, BLUE, [history])], metric, clock, target),
        "panels": panels_of(history, clock),
        "tables": tables + data["tables"],
    }


def _started(config: Mapping[str, Any]) -> str:
    """Say when a run started and how often it was resumed."""
    started = str(config.get("started", "?")).replace("T", " ").replace("+00:00", " UTC")
    times = len(config.get("resumed") or ())
    return f"Started {started}" + (f", resumed {times}x" if times else "")


def _target_accuracy(settings: Mapping[str, Any], metric: str) -> float | None:
    """Return the accuracy that the run was to reach, if its settings have one."""
    target = as_number(settings.get("target-accuracy"))
    is_accuracy = is_share(metric) and not verdict.lower_is_better(metric)
    return target if is_accuracy and 0 < target <= 100 else None


def _outcome(judge: verdict.Judge, result: verdict.Result, history: History) -> str:
    """Say what was reached and when, and why a run ended early."""
    text = f"Final {words(judge.metric)}: {figure(judge.metric, result.end)}"
    if result.to_target is None:
        text += f", after {result.rounds} {result.unit}s."
    else:
        target = figure(judge.metric, judge.target)
        text += f". It reached {target} after "
        text += cost_text(judge.clock, result.to_target, result.unit)
        if judge.clock != "round":
            text += f", in {result.unit} {result.reached} of {result.rounds}"
        text += "."
    stopped = history.rounds[-1].get("stopped")
    return f"{text} The run ended early: {stopped}." if stopped else text


def facts(
    history: History, settings: Mapping[str, Any], judge: verdict.Judge | None
) -> list[dict[str, str]]:
    """Return label, value and note of each figure at the top of the page of a run."""
    tiles = []

    def add(label: str, value: str, note: str = "") -> None:
        tiles.append({"label": label, "value": value, "note": note})

    if judge:
        final = figure(judge.metric, verdict.settled_value(history, judge.metric))
        add(f"Final {words(judge.metric)}", final)
    fairness = last_fairness(history)
    if fairness:
        mean = figure(fairness.metric, fairness.mean)
        add(
            f"{heading(fairness.metric)} on the worst tenth of the nodes",
            figure(fairness.metric, fairness.worst),
            f"{mean} on all {fairness.nodes}, {history.unit} {fairness.round}",
        )
    planned = settings.get("num-server-rounds")
    note = "as planned" if planned == history.last_round else f"of {planned} planned"
    add(f"{history.unit}s".capitalize(), str(history.last_round), note if planned else "")
    virtual_s = history.column("virtual_s")[-1]
    wall_s = history.column("wall_s")[-1]
    add("Time on the fleet's clock", duration(virtual_s), f"{duration(wall_s)} on the server's")
    nodes = node_stats(history)
    busy_s = float(history.busy_s.sum())
    all_s = virtual_s * len(nodes)
    note = f"a node works for {100 * busy_s / all_s:.2g} % of the time" if all_s > 0 else ""
    add("Time of all devices", duration(busy_s), note)
    sent = float(np.nansum(history.column("bytes_up")))
    received = float(np.nansum(history.column("bytes_down")))
    add("Traffic", size(sent + received), f"{size(sent)} up, {size(received)} down")
    trained = sum(node.selected > node.lost for node in nodes)
    add("Nodes", str(len(nodes)) if nodes else "?", f"{trained} of them trained")
    failures = sum(len(rounds) for _, _, rounds in failure_groups(history))
    add("Failures", str(failures), "" if failures else "every reply was valid")
    return tiles
