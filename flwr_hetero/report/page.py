"""``report.html``: one self-contained page of a run, from the template ``page.html``."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader

from flwr_hetero.report.history import (
    HISTORY,
    METRICS,
    REPORT,
    TIFL,
    History,
    best_round,
    read_config,
    read_history,
    replace,
)
from flwr_hetero.report.nodes import (
    device_seconds,
    failure_groups,
    last_fairness,
    node_stats,
    num_tiers,
    of_tiers,
)
from flwr_hetero.report.plots import plots_of, render
from flwr_hetero.report.plots_nodes import tier_name
from flwr_hetero.report.style import (
    DARK,
    LIGHT,
    UNKNOWN,
    duration,
    figure,
    heading,
    size,
    tier_colours,
    words,
)

MAX_ROWS = 500
"""Longest table on the page; the history has the rest."""
MAX_METRICS = 4
"""Metrics in the table of rounds."""
MAX_NUMBERS = 12
"""Round numbers in a row of the failures."""


class Stat(NamedTuple):
    """One figure at the top of the page."""

    label: str
    value: str
    note: str


def write_report(directory: str | Path) -> Path:
    """Build ``report.html`` and the PNGs of a run."""
    folder = Path(directory).expanduser().absolute()
    history, config = read_history(folder), read_config(folder)
    figures = []
    for plot in plots_of(history):
        light, dark = (render(plot, history, theme) for theme in (LIGHT, DARK))
        if light is None or dark is None:
            continue
        replace(folder / f"{plot.name}.png", light)
        width, height = (int.from_bytes(light[at : at + 4], "big") for at in (16, 20))
        figures.append(
            {
                "heading": plot.heading,
                "caption": plot.caption,
                "light": _inline(light),
                "dark": _inline(dark),
                "width": width,
                "height": height,
            }
        )
    contents: dict[str, Any] = {"notes": history.notes}
    if history.rounds:
        contents["stats"] = summary(history, config.get("settings") or {})
        contents |= _tiers(history) | _failures(history) | _rounds(history)
        contents["unit"] = history.unit
    else:
        contents["notes"] += ("No round was completed: the log gives the reason.",)
    environment = Environment(loader=PackageLoader("flwr_hetero.report", ""), autoescape=True)
    css = environment.loader.get_source(environment, "page.css")[0]  # type: ignore[union-attr]
    page = environment.get_template("page.html").render(
        name=folder.name,
        css=css,
        where=_where(folder, config),
        history_path=folder / HISTORY,
        boxes=_boxes(config),
        figures=figures,
        **contents,
    )
    replace(folder / REPORT, page.encode())
    return folder / REPORT


def _where(folder: Path, config: Mapping[str, Any]) -> str:
    started = str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    parts = [f"Started {started}"] if started else []
    if times := len(config.get("resumed") or ()):
        parts.append(f"resumed {times} times" if times > 1 else "resumed once")
    return ", ".join([*parts, str(folder)])


def _boxes(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the settings, and the versions with the command."""
    settings, versions = config.get("settings") or {}, config.get("versions") or {}
    process = {key: config[key] for key in ("python", "platform", "command") if key in config}
    boxes = {"Settings": settings, "Made with": {**versions, **process}}
    return [
        (title, [(key, _value(value)) for key, value in box.items()])
        for title, box in boxes.items()
        if box
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value in (None, "") else str(value)


def summary(history: History, settings: Mapping[str, Any]) -> list[Stat]:
    """Sum up a run."""
    nodes, failures = node_stats(history), failure_groups(history)
    trained = sum(node.selected > node.lost for node in nodes)
    count = sum(len(group.rounds) for group in failures)
    rounds = len({number for group in failures for number in group.rounds})
    merges = history.unit == "merge"
    up, down = (float(np.nansum(history.column(key))) for key in ("bytes_up", "bytes_down"))
    planned = settings.get("num-server-rounds")
    note = "as planned" if planned == history.last_round else f"of {planned} planned"
    return [
        *_quality(history),
        *_fairness(history),
        Stat(f"{history.unit}s".capitalize(), str(history.last_round), note if planned else ""),
        *_times(history),
        _device_time(history),
        Stat(
            "Traffic" if merges else "Traffic of training",
            size(up + down),
            f"{size(up)} up, {size(down)} down",
        ),
        Stat("Nodes", str(len(nodes)) if nodes else UNKNOWN, f"{trained} of them trained"),
        Stat(
            "Failures",
            str(count),
            f"in {rounds} {history.unit}s" if count else "every reply was good",
        ),
    ]


def _quality(history: History) -> list[Stat]:
    metric = history.main_metric()
    if metric is None:
        return []
    values, best = history.metric(metric), best_round(history, metric)
    final = figure(metric, values[~np.isnan(values)][-1])
    note = f"best {figure(metric, values[best])} in {history.unit} {history.rounds[best]['round']}"
    return [Stat(f"Final {words(metric)}", final, note)]


def _fairness(history: History) -> list[Stat]:
    found = last_fairness(history)
    if found is None:
        return []
    mean = f"{figure(found.metric, found.mean)} on all {found.nodes}"
    value = figure(found.metric, found.worst)
    label = f"{words(found.metric).capitalize()} on the worst tenth of the nodes"
    return [Stat(label, value, f"{mean}, {history.unit} {found.round}")]


def _device_time(history: History) -> Stat:
    busy_s, whole_s = device_seconds(history), history.column("virtual_s")[-1]
    note = f"{busy_s / whole_s:.3g} nodes at work on average" if whole_s > 0 else ""
    return Stat("Time of all devices", duration(busy_s), note)


def _times(history: History) -> list[Stat]:
    virtual, wall = history.column("virtual_s"), history.column("wall_s")
    has_profiling = history.rounds[0]["round"] == 0 and virtual[0] > 0
    profiling = f"{duration(virtual[0])} of it before round 1" if has_profiling else ""
    stats = [
        Stat("Time on the fleet's clock", duration(virtual[-1]), profiling),
        Stat("Time on the server's clock", duration(wall[-1]), ""),
    ]
    keys = ("actual_s", "exact_estimate_s", "paper_estimate_s")
    actual, exact, paper = (history.column(TIFL, key)[-1] for key in keys)
    if actual > 0:
        note = f"TiFL's Eq. 6: {100 * (paper / actual - 1):+.1f} %"
        value = f"{100 * (exact / actual - 1):+.1f} %"
        stats.append(Stat("Estimated against actual time", value, note))
    return stats


def _tiers(history: History) -> dict[str, Any]:
    """Sum up what a run did with each tier."""
    count, nodes = num_tiers(history), node_stats(history)
    tiers, colours = history.column(TIFL, "tier"), tier_colours(count)
    seconds = np.diff(history.column("virtual_s"), prepend=np.nan)
    accuracy = dict(enumerate(of_tiers(history.rounds[-1], "tier_accuracy")))
    total = int(np.isfinite(tiers).sum()) or 1
    rows = []
    for tier in range(count):
        latency = [n.typical_s for n in nodes if n.tier == tier and np.isfinite(n.typical_s)]
        rounds = int((tiers == tier).sum())
        rows.append(
            (
                colours[tier],
                tier_name(tier, count),
                sum(node.tier == tier for node in nodes),
                duration(float(np.median(latency)) if latency else float("nan")),
                f"{rounds} ({100 * rounds / total:.0f} %)",
                duration(float(np.nansum(seconds[tiers == tier]))),
                figure("accuracy", accuracy.get(tier, float("nan"))),
            )
        )
    head = ("nodes", "median latency", "rounds", "time of these rounds", "accuracy")
    return {"tiers": rows, "tier_head": head}


def _failures(history: History) -> dict[str, Any]:
    found = failure_groups(history)
    rest = f" The {MAX_ROWS} most frequent of {len(found)}." if len(found) > MAX_ROWS else ""
    rows = []
    for group in found[:MAX_ROWS]:
        once = list(dict.fromkeys(group.rounds))  # a round has training and evaluation
        shown = ", ".join(map(str, once[:MAX_NUMBERS]))
        more = len(once) - MAX_NUMBERS
        shown += f", and {more} more" if more > 0 else ""
        rows.append((group.node, group.reason, len(group.rounds), shown))
    return {"failures": rows, "failures_rest": rest}


def _rounds(history: History) -> dict[str, Any]:
    metrics = history.metrics(METRICS)[:MAX_METRICS]
    columns = [history.metric(name) for name in metrics]
    clock = history.column("virtual_s")
    seconds, tiers = np.diff(clock, prepend=0.0), history.column(TIFL, "tier")
    with_tiers = not np.isnan(tiers).all()
    rows = []
    for i, record in list(enumerate(history.rounds))[-MAX_ROWS:]:
        row = [str(record["round"]), duration(clock[i]), duration(seconds[i])]
        row += ["" if np.isnan(tiers[i]) else f"{tiers[i]:.0f}"] if with_tiers else []
        row += [str(len(record.get(key) or ())) for key in ("selected", "failures")]
        rows.append([*row, *map(figure, metrics, (column[i] for column in columns))])
    head = [
        history.unit,
        "time",
        f"this {history.unit}",
        *(["tier"] if with_tiers else []),
        "nodes",
        "failures",
    ]
    count = len(history.rounds)
    units = f"{history.unit}s"
    title = f"The last {MAX_ROWS} of {count} {units}" if count > MAX_ROWS else f"All {units}"
    head += [heading(name).lower() for name in metrics]
    return {"rounds": rows, "rounds_head": head, "rounds_title": title}


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
