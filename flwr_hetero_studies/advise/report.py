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
SUMMARY = ["fleet", "data", "Kendall's tau", "advised first", "times faster", "best",
           "times faster"]  # fmt: skip


def found_rows(lines: list[Line]) -> dict[str, Row]:
    bases = {line["seed"]: looks(line) for line in record.of(lines, name=BASE)}
    choices = {choice.name: choice for choice in candidates(NODES, PER_ROUND, limited=True)}
    return {
        name: row(choices[name], [judge(looks(line), bases[line["seed"]]) for line in own])
        for name, own in record.by(lines, "name").items()
    }


def ranks(fleet: str, lines: list[Line]) -> list[list[str]]:
    """Compare the two rankings for each division of the data, and for both together."""
    [advice] = record.of(lines, name="advice")
    rows = []
    # Products over both divisions of advised and of measured speed-ups.
    both: list[dict[str, float]] = [{}, {}]
    for meaning, partition in PARTITIONS.items():
        found = found_rows(record.of(lines, partition=partition))
        measured = {name: each.speedup for name, each in found.items()}
        advised = advice["metrics"]["speedups"][meaning]
        texts = {name: shown(each) for name, each in found.items()}
        rows.append([fleet, NAMES[meaning], *ranked(advised, measured, texts)])
        for product, speeds in zip(both, (advised, measured), strict=True):
            product |= {name: product.get(name, 1.0) * speed for name, speed in speeds.items()}
    means = {name: f"{speed ** (1 / len(PARTITIONS)):.1f}" for name, speed in both[1].items()}
    return [*rows, [fleet, "both", *ranked(both[0], both[1], means)]]


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
    rows: list[list[str]] = []
    for fleet, own in record.by(lines, "experiment").items():
        rows += ranks(fleet, own)
    taus = [float(row[2]) for row in rows if row[1] == "both"]
    reached = f"{sum(tau >= WANTED for tau in taus)} of {len(taus)}"
    parts = {"software": record.software(lines), "reached": reached}
    return parts | {"summary": tables.table(SUMMARY, rows)}
