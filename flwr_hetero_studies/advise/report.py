"""Advised and measured ranks, and what is lost by following the advice."""

from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from flwr_hetero_studies.advise.advice import PARTITIONS
from flwr_hetero_studies.advise.candidates import candidates
from flwr_hetero_studies.advise.cases import NODES, PER_ROUND, looks
from flwr_hetero_studies.advise.simulate import Row, judge, row
from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.race.methods import BASE

WANTED = 0.7
NAMES = dict(zip(PARTITIONS, ("mixed", "slow alone"), strict=True))
HEAD = ["setting", *(f"{how}, {data}" for data in NAMES.values() for how in ("advised", "found"))]
SUMMARY = [
    "fleet",
    "data",
    "Kendall's tau",
    "advised first",
    "times faster",
    "best",
    "times faster",
]


def found_rows(lines: list[Line]) -> dict[str, Row]:
    bases = {line["seed"]: looks(line) for line in record.of(lines, name=BASE)}
    choices = {choice.name: choice for choice in candidates(NODES, PER_ROUND, limited=True)}
    # The record also has a setting that can no longer be chosen.
    return {
        name: row(choices[name], [judge(looks(line), bases[line["seed"]]) for line in own])
        for name, own in record.by(lines, "name").items()
        if name in choices
    }


def section(fleet: str, lines: list[Line]) -> tuple[str, list[list[Any]]]:
    """Tabulate a fleet's settings, the best in both divisions of the data first."""
    (advice,) = record.of(lines, name="advice")
    sums: list[list[Any]] = []
    # Products over both divisions of advised and of measured speed-ups.
    both: list[dict[str, float]] = [{}, {}]
    cells: dict[str, list[str]] = {}
    for meaning, partition in PARTITIONS.items():
        judged = advice["metrics"]["settings"][meaning]
        rows = found_rows(record.of(lines, partition=partition))
        advised = {setting["candidate"]: setting["speedup"] for setting in judged}
        found = {name: each.speedup for name, each in rows.items()}
        texts = {name: shown(each) for name, each in rows.items()}
        sums.append([fleet, NAMES[meaning], *ranked(advised, found, texts)])
        for name, text in texts.items():
            cells.setdefault(name, [name]).extend([f"{advised[name]:.1f}", text])
        for product, speeds in zip(both, (advised, found), strict=True):
            product |= {name: product.get(name, 1.0) * speed for name, speed in speeds.items()}
    names = sorted({*cells} - {BASE}, key=lambda name: -both[1][name])
    ordered = [cells[name] for name in names]
    means = {name: f"{speed ** (1 / len(PARTITIONS)):.1f}" for name, speed in both[1].items()}
    sums.append([fleet, "both", *ranked(both[0], both[1], means)])
    return f"### {fleet}\n\n{tables.table(HEAD, ordered)}", sums


def shown(setting: Row) -> str:
    missed = setting.seeds - setting.reached
    text = f"{setting.speedup:.1f} ({setting.least:.1f} to {setting.most:.1f})"
    return text + (f", {missed} of {setting.seeds} not" if missed else "")


def ranked(advised: dict[str, float], found: dict[str, float], texts: dict[str, str]) -> list[str]:
    """Return tau, the setting advised first and the best one, each with its text."""
    names = list(found)
    tau = kendalltau([advised[n] for n in names], [found[n] for n in names]).statistic
    cells = [f"{tau:.3f}"]
    for speeds in (advised, found):
        best = max(names, key=lambda name: speeds[name])
        cells += [best, texts[best]]
    return cells


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    texts = []
    sums: list[list[Any]] = []
    for fleet, own in record.by(lines, "experiment").items():
        text, rows = section(fleet, own)
        texts.append(text)
        sums += rows
    taus = [float(row[2]) for row in sums if row[1] == "both"]
    parts = {"software": record.software(lines), "sections": "\n".join(texts)}
    reached = f"{sum(tau >= WANTED for tau in taus)} of {len(taus)}"
    return parts | {"summary": tables.table(SUMMARY, sums), "reached": reached}
