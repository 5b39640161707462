"""Accuracy, bytes and memory of each method, and how far parts are ahead of the others."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from flwr_hetero_studies.core import curves, record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.partial.cases import LAST, NEXT_RATE, RATES, TUNING_SEED

PART = "part: last blocks"
SCORES = ("accuracy", "own")
HEAD = ["method", "seeds", "all classes", "own classes", "rate", "MB up", "needs", "peak"]
GAINS = ["above", "all classes", "own classes"]
NEEDS = ["from block", "the last blocks", "this block alone"]


def ends(lines: Sequence[Line], name: str) -> list[float]:
    return [100 * curves.last(line, name, LAST) for line in lines]


def row(name: str, lines: Sequence[Line]) -> list[str | int]:
    metrics = lines[0]["metrics"]
    scores = [tables.extent(ends(lines, column), "{:.1f}") for column in SCORES]
    sent_mb = mean(record.metric(lines, "bytes_up")) / 1e6
    shares = (metrics["need"] / metrics["last"][0], metrics["peak"] / metrics["whole_peak"])
    rate = lines[0]["case"]["rate"]
    return [name, len(lines), *scores, f"{rate:g}", f"{sent_mb:.1f}", *map(tables.percent, shares)]


def gains(lines: Sequence[Line], others: Sequence[Line], name: str) -> list[float]:
    """Return the points above another method, seed by seed."""
    pairs = record.pairs(lines, others)
    return [ends([line], name)[0] - ends([other], name)[0] for line, other in pairs]


def section(experiment: str, lines: list[Line]) -> str:
    runs = record.by(lines, "name")
    rows = [row(name, found) for name, found in runs.items()]
    ahead = []
    for name in (name for name in runs if name != PART):
        points = [tables.extent(gains(runs[PART], runs[name], key), "{:+.1f}") for key in SCORES]
        ahead.append([name, *points])
    text = f"## {experiment}\n\n{tables.table(HEAD, rows)}\n"
    return f"{text}*{PART}*, in points, seed by seed:\n\n{tables.table(GAINS, ahead)}"


def needs(metrics: dict[str, Any]) -> str:
    """Write what parts need, as shares of what the whole model needs."""
    pairs = zip(metrics["last"], metrics["alone"], strict=True)
    shares = [[tables.percent(need / metrics["last"][0]) for need in pair] for pair in pairs]
    return tables.table(NEEDS, [[place, *pair] for place, pair in enumerate(shares, start=1)])


def tuning(lines: Sequence[Line]) -> str:
    rates = (*RATES, NEXT_RATE)
    rows = []
    for name, found in record.by(lines, "name").items():
        tried = {line["case"]["rate"]: [ends([line], key)[0] for key in SCORES] for line in found}
        texts = {rate: f"{every:.1f} / {own:.1f}" for rate, (every, own) in tried.items()}
        rows.append([name, *(texts.get(rate, "") for rate in rates)])
    return tables.table(["method", *(f"{rate:g}" for rate in rates)], rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    tuned = [line for line in lines if line["seed"] == TUNING_SEED]
    final = [line for line in lines if line["seed"] != TUNING_SEED]
    metrics = final[0]["metrics"]
    groups = record.by(final, "experiment").items()
    return {
        **final[0]["case"],
        "sections": "\n".join(section(name, found) for name, found in groups),
        "memory": needs(metrics),
        "tuning": tuning(tuned),
        "whole_mb": f"{metrics['last'][0] / 1e6:.2f}",
        "software": record.software(lines),
    }
