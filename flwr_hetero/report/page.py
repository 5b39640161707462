"""HTML in which everything is escaped unless it was made here."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.history import (
    HISTORY,
    METRICS,
    REPORT,
    TIFL,
    History,
    best_round,
    faults,
    node_facts,
    num_tiers,
    of_tiers,
    read_config,
    read_history,
    replace,
)
from flwr_hetero.report.plots import Plot, plots_of, render
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


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Html
"""Plain text, which is escaped, or HTML."""


def element(tag: str, /, *content: Content, **attributes: str | int) -> Html:
    """Make an HTML element."""
    return Html(f"{void(tag, **attributes)}{join(content)}</{tag}>")


def void(tag: str, /, **attributes: str | int) -> Html:
    """Make an HTML element that has no content and no end."""
    names = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
    return Html(f"<{tag}" + "".join(f' {k}="{escape(v)}"' for k, v in names.items()) + ">")


def join(parts: Iterable[Content]) -> Html:
    """Put pieces after each other."""
    return Html("".join(p if isinstance(p, Html) else escape(str(p)) for p in parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[Content]], numeric: Iterable[int] = ()
) -> Html:
    """Make a table."""
    right = set(numeric)

    def row(name: str, cells: Sequence[Content]) -> Html:
        marked = [
            element(name, cell, class_="number") if column in right else element(name, cell)
            for column, cell in enumerate(cells)
        ]
        return element("tr", *marked)

    top = element("thead", row("th", head)) if head else Html()
    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("div", element("table", top, body), class_="scroll")


class Fact(NamedTuple):
    """One figure."""

    label: str
    value: str
    note: str


class TierRow(NamedTuple):
    """What a run did with one tier."""

    tier: int
    nodes: int
    latency_s: float
    rounds: int
    seconds: float
    accuracy: float


def summary(history: History, settings: Mapping[str, Any] | None = None) -> list[Fact]:
    """Sum up a run."""
    facts = [*_quality(history), _rounds(history, settings or {}), *_times(history)]
    return [*facts, _traffic(history), _nodes(history), _failures(history)]


def tier_rows(history: History) -> list[TierRow]:
    """Sum up each tier."""
    nodes, tiers = node_facts(history), history.column(TIFL, "tier")
    seconds = np.diff(history.column("virtual_s"), prepend=np.nan)
    last = history.rounds[-1] if history.rounds else {}
    accuracy = dict(enumerate(of_tiers(last, "tier_accuracy")))
    return [
        TierRow(
            tier=tier,
            nodes=sum(node.tier == tier for node in nodes),
            latency_s=_median([node.typical_s for node in nodes if node.tier == tier]),
            rounds=int((tiers == tier).sum()),
            seconds=float(np.nansum(seconds[tiers == tier])),
            accuracy=accuracy.get(tier, float("nan")),
        )
        for tier in range(num_tiers(history))
    ]


def _quality(history: History) -> list[Fact]:
    metric = history.main_metric()
    if metric is None:
        return []
    values, best = history.metric(metric), best_round(history, metric)
    final = values[~np.isnan(values)][-1]
    note = f"best {figure(metric, values[best])} in round {history.rounds[best]['round']}"
    return [Fact(f"Final {words(metric)}", figure(metric, float(final)), note)]


def _rounds(history: History, settings: Mapping[str, Any]) -> Fact:
    planned = settings.get("num-server-rounds")
    note = "as planned" if planned == history.last_round else f"of {planned} planned"
    note = "" if planned is None else note
    return Fact("Rounds", str(history.last_round), note)


def _times(history: History) -> list[Fact]:
    virtual, wall = history.column("virtual_s"), history.column("wall_s")
    first = virtual[0] if history.rounds[0]["round"] == 0 else 0.0
    profiling = f"{duration(first)} of it before round 1" if first > 0 else ""
    facts = [
        Fact("Time on the fleet's clock", duration(virtual[-1]), profiling),
        Fact("Time on the server's clock", duration(wall[-1]), ""),
    ]
    actual = history.column(TIFL, "actual_s")[-1]
    if actual > 0:
        errors = {
            key: 100 * (history.column(TIFL, key)[-1] / actual - 1)
            for key in ("exact_estimate_s", "paper_estimate_s")
        }
        exact, paper = (f"{error:+.1f} %" for error in errors.values())
        facts.append(Fact("Estimated against actual time", exact, f"TiFL's Eq. 6: {paper}"))
    return facts


def _traffic(history: History) -> Fact:
    up, down = (float(np.nansum(history.column(key))) for key in ("bytes_up", "bytes_down"))
    return Fact("Traffic of training", size(up + down), f"{size(up)} up, {size(down)} down")


def _nodes(history: History) -> Fact:
    nodes = node_facts(history)
    trained = sum(node.selected > node.in_vain for node in nodes)
    return Fact("Nodes", str(len(nodes)) if nodes else UNKNOWN, f"{trained} of them trained")


def _failures(history: History) -> Fact:
    found = faults(history)
    count = sum(len(fault.rounds) for fault in found)
    rounds = len({number for fault in found for number in fault.rounds})
    return Fact("Failures", str(count), f"in {rounds} rounds" if count else "every reply was good")


def _median(values: list[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return float(np.median(known)) if known else float("nan")


NOTHING = Html()


def card(title: str, *content: Content) -> Html:
    """Make a box with a heading."""
    return element("section", element("h2", title), *content, class_="card")


def header_part(folder: Path, config: Mapping[str, Any]) -> Html:
    """Say which run this is."""
    started = str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    said = [f"Started {started}"] if started else []
    if times := len(config.get("resumed") or ()):
        said.append(f"resumed {times} times" if times > 1 else "resumed once")
    return element(
        "header",
        element("p", "flwr-hetero run", class_="kind"),
        element("h1", folder.name),
        element("p", ", ".join([*said, str(folder)]), class_="where"),
    )


def facts_part(history: History, config: Mapping[str, Any]) -> Html:
    """Show the most important figures."""
    cards = [
        element(
            "div",
            element("p", fact.label, class_="label"),
            element("p", fact.value, class_="value"),
            element("p", fact.note, class_="note"),
            class_="card" if number else "card first",
        )
        for number, fact in enumerate(summary(history, config.get("settings")))
    ]
    return element("div", *cards, class_="facts")


def notes_part(notes: Sequence[str]) -> Html:
    """Show what the reader of the history had to pass over."""
    if not notes:
        return NOTHING
    return element("div", *(element("p", note) for note in notes), class_="card warning")


def settings_part(config: Mapping[str, Any]) -> Html:
    """Show settings, versions and command."""
    settings = {**(config.get("settings") or {})}
    ground = {**(config.get("versions") or {})}
    ground |= {key: config[key] for key in ("python", "platform", "command") if key in config}
    boxes = [
        card(title, table((), [(key, _value(value)) for key, value in facts.items()]))
        for title, facts in (("Settings", settings), ("Made with", ground))
        if facts
    ]
    return element("div", *boxes, class_="pair") if boxes else NOTHING


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value in (None, "") else str(value)


MAX_ROWS = 500
"""Longest table on the page; the history has the rest."""


MAX_METRICS = 4
"""Metrics in the table of rounds."""


def tiers_part(history: History) -> Html:
    """Show a table of the tiers."""
    rows = tier_rows(history)
    if not rows:
        return NOTHING
    total = sum(row.rounds for row in rows) or 1
    colours = tier_colours(len(rows))
    lines = [
        (
            join([_chip(colours[row.tier]), tier_name(row.tier, len(rows))]),
            str(row.nodes),
            duration(row.latency_s),
            f"{row.rounds} ({100 * row.rounds / total:.0f} %)",
            duration(row.seconds),
            figure("accuracy", row.accuracy),
        )
        for row in rows
    ]
    head = ("tier", "nodes", "median latency", "rounds", "time of these rounds", "accuracy")
    return card("Tiers at a glance", table(head, lines, numeric=range(1, len(head))))


def faults_part(history: History) -> Html:
    """Show a table of the failures."""
    found = faults(history)
    if not found:
        return NOTHING
    lines = [
        (fault.node, fault.reason, str(len(fault.rounds)), _some(fault.rounds))
        for fault in found[:MAX_ROWS]
    ]
    rest = f" The {MAX_ROWS} most frequent of {len(found)}." if len(found) > MAX_ROWS else ""
    return card(
        "Failures",
        table(("node", "reason", "times", "rounds"), lines, numeric=[2]),
        element("p", f"Each cost that reply and nothing else.{rest}", class_="caption"),
    )


def rounds_part(history: History) -> Html:
    """Show a table of the rounds, folded up."""
    metrics = history.metrics(METRICS)[:MAX_METRICS]
    columns = [history.metric(name) for name in metrics]
    clock = history.column("virtual_s")
    seconds, tiers = np.diff(clock, prepend=0.0), history.column(TIFL, "tier")
    with_tiers = not np.isnan(tiers).all()
    lines = []
    for i, record in list(enumerate(history.rounds))[-MAX_ROWS:]:
        line = [str(record["round"]), duration(clock[i]), duration(seconds[i])]
        line += ["" if np.isnan(tiers[i]) else f"{tiers[i]:.0f}"] if with_tiers else []
        line += [str(len(record.get(key) or ())) for key in ("selected", "failures")]
        lines.append([*line, *map(figure, metrics, (column[i] for column in columns))])
    head = ["round", "time", "this round", *(["tier"] if with_tiers else []), "nodes", "failures"]
    head += [heading(name).lower() for name in metrics]
    count = len(history.rounds)
    shown = f"The last {MAX_ROWS} of {count} rounds" if count > MAX_ROWS else "All rounds"
    rounds = table(head, lines, numeric=range(len(head)))
    return element("details", element("summary", shown), rounds, class_="card")


def _chip(colour: str) -> Html:
    return element("span", class_="chip", style=f"background: {colour}")


def _some(rounds: Sequence[int], most: int = 12) -> str:
    once = list(dict.fromkeys(rounds))  # a round has training and evaluation
    shown = ", ".join(map(str, once[:most]))
    return f"{shown}, and {len(once) - most} more" if len(once) > most else shown


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page loads nothing and runs nothing; browsers enforce it."""


def write_report(directory: str | Path) -> Path:
    """Build ``report.html`` and the PNGs of a run."""
    folder = Path(directory).expanduser().absolute()
    history, config = read_history(folder), read_config(folder)
    figures = []
    for plot in plots_of(history):
        light, dark = (render(plot, history, theme) for theme in (LIGHT, DARK))
        if light is not None and dark is not None:
            replace(folder / f"{plot.name}.png", light)
            figures.append(_figure(plot, light, dark))
    replace(folder / REPORT, _page(folder, history, config, figures).encode())
    return folder / REPORT


def _page(folder: Path, history: History, config: dict[str, Any], figures: list[Html]) -> str:
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=POLICY),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{folder.name}: flwr-hetero run"),
        element("style", Html(css)),
    )
    body = element(
        "body",
        header_part(folder, config),
        element("main", *_main(history, config, figures)),
        element("footer", f"Made by flwr-hetero from {folder / HISTORY}. Works offline."),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _main(history: History, config: dict[str, Any], figures: list[Html]) -> list[Html]:
    if not history.rounds:
        notes = [*history.notes, "No round was completed: the log says why."]
        return [notes_part(notes), settings_part(config)]
    return [
        facts_part(history, config),
        notes_part(history.notes),
        *figures[:1],
        tiers_part(history),
        *figures[1:],
        faults_part(history),
        settings_part(config),
        rounds_part(history),
    ]


def _figure(plot: Plot, light: bytes, dark: bytes) -> Html:
    width, height = (int.from_bytes(light[at : at + 4], "big") for at in (16, 20))
    in_dark = void("source", media="(prefers-color-scheme: dark)", srcset=_inline(dark))
    image = void("img", src=_inline(light), width=width, height=height, alt=plot.heading)
    picture = element("picture", in_dark, image)
    return card(plot.heading, picture, element("p", plot.caption, class_="caption"))


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
