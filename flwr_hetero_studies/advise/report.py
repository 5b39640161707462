"""Ranks advised and found, and what is lost by taking the advice."""

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
HEAD = ["setting", "advised", "found", "not reached"]


def found_rows(lines: list[Line]) -> list[Row]:
    bases = {line["seed"]: looks(line) for line in record.of(lines, name=BASE)}
    choices = {choice.name: choice for choice in candidates(NODES, PER_ROUND, limited=True)}
    rows = [
        row(choices[name], [judge(looks(line), bases[line["seed"]]) for line in own])
        for name, own in record.by(lines, "name").items()
    ]
    return sorted(rows, key=lambda row: -row.speedup)


def section(fleet: str, lines: list[Line]) -> tuple[str, list[list[Any]]]:
    (advice,) = record.of(lines, name="advice")
    text, sums = f"### {fleet}\n", list[list[Any]]()
    both = [dict[str, float](), dict[str, float]()]
    for meaning, partition in PARTITIONS.items():
        judged = advice["metrics"]["settings"][meaning]
        advised = {each["candidate"]: each["speedup"] for each in judged}
        rows = found_rows(record.of(lines, partition=partition))
        found = {each.candidate.name: each.speedup for each in rows}
        for product, speeds in zip(both, (advised, found), strict=True):
            product |= {name: product.get(name, 1.0) * speed for name, speed in speeds.items()}
        sums.append([fleet, meaning, *ranked(advised, found, 1.0)])
        cells = [
            [name, f"{advised[name]:.1f}x",
             f"{own.speedup:.1f}x ({own.least:.1f} to {own.most:.1f})", own.seeds - own.reached]
            for name, own in zip(found, rows, strict=True)
        ]  # fmt: skip
        text += f"\n{meaning[0].upper()}{meaning[1:]}:\n\n{tables.table(HEAD, cells)}"
    return text, [*sums, [fleet, "both", *ranked(both[0], both[1], 1 / len(PARTITIONS))]]


def ranked(advised: dict[str, float], found: dict[str, float], power: float) -> list[str]:
    """Return tau, what is advised first and what is best, with how many times sooner both are."""
    names = list(found)
    tau = kendalltau([advised[n] for n in names], [found[n] for n in names]).statistic
    first, best = max(names, key=lambda n: advised[n]), max(names, key=lambda n: found[n])
    texts = (text for n in (first, best) for text in (n, f"{found[n] ** power:.1f}x"))
    return [f"{tau:.3f}", *texts]


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    texts, sums = [], list[list[Any]]()
    for fleet, own in record.by(lines, "experiment").items():
        text, rows = section(fleet, own)
        texts.append(text)
        sums += rows
    head = ["fleet", "data", "Kendall's tau", "advised first", "it is", "best", "it is"]
    taus = [float(row[2]) for row in sums if row[1] == "both"]
    parts = {"software": record.software(lines), "sections": "\n".join(texts)}
    reached = f"{sum(tau >= WANTED for tau in taus)} of {len(taus)}"
    return parts | {"summary": tables.table(head, sums), "reached": reached}
