"""Accuracy at equal work or equal time, beside the paper's."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from flwr_hetero_studies.core import plots, record, tables
from flwr_hetero_studies.core.record import Line, metric

BIASES = ("unbalanced", "sampling-bias", "weights-bias", "biased")
PAPER_TABLE1 = {
    "synchronous SGD": "100 / 128 / 1298 / 90.91",
    "synchronous SGD, 8 fast only": "100 / 160 / 1235 / 91.28",
    "balanced local SGD": "100 / 4 / 548 / 88.93",
    "biased local SGD, 1x epochs": "100 / 4 / 40.6 / 89.16",
    "biased local SGD, 2x epochs": "200 / 4 / 81.2 / 91.26",
    "biased local SGD, 3x epochs": "300 / 4 / 121.7 / 91.95",
}
"""CIFAR-10, ResNet20, 2 CPUs + 8 GPUs: epochs / rounds per epoch / seconds / accuracy in %."""
TABLE1 = ["algorithm", "epochs", "rounds per epoch", "virtual s", "accuracy %",
          "less time per epoch", "paper: epochs / rounds per epoch / s / %"]  # fmt: skip
PAPER_TABLES_3_7 = {
    ("2+8", 16): "88.83, 89.71",
    ("2+8", 4): "88.09, 89.47",
    ("2+8", 1): "87.98, 89.16",
    ("1+1", 16): "91.16, 91.63",
    ("1+1", 4): "90.58, 91.22",
    ("1+1", 1): "90.21, 91.08",
}
"""CIFAR-10, ResNet20: unbiased and biased accuracy in %."""
TABLES_3_7 = ["slow + fast", "tau_F, tau_S", "unbiased %", "sampling bias only %",
              "weights bias only %", "both %", "paper: unbiased, biased"]  # fmt: skip


def deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else float("nan")


def accuracy(lines: Sequence[Line]) -> str:
    values = metric(lines, "accuracy")
    return f"{100 * mean(values):.2f} ± {100 * deviation(values):.2f}"


def means(lines: Sequence[Line]) -> list[float]:
    return [mean(metric(lines, key)) for key in ("epochs", "rounds", "virtual_s")]


def table1(lines: list[Line]) -> str:
    """Equal epochs: synchronous and balanced against biased."""
    groups, rows, base_s = record.by(lines, "name"), [], float("nan")
    if "synchronous SGD" in groups:
        epochs, _, virtual_s = means(groups["synchronous SGD"])
        base_s = virtual_s / epochs
    for name, group in groups.items():
        epochs, rounds, virtual_s = means(group)
        cells = [f"{epochs:.1f}", f"{rounds / epochs:.1f}", f"{virtual_s:.1f}", accuracy(group)]
        rows.append([name, *cells, f"{base_s / (virtual_s / epochs):.1f}x", PAPER_TABLE1[name]])
    return tables.table(TABLE1, rows)


def tables_3_7(lines: list[Line]) -> str:
    """Each bias alone, at equal virtual time."""
    rows = []
    for (fleet, slow), paper in PAPER_TABLES_3_7.items():
        groups = record.by(record.of(lines, fleet=fleet, slow_steps=slow), "name")
        if set(groups) >= set(BIASES):
            base, *others = (groups[name] for name in BIASES)
            cells = [f"{accuracy(one)} ({gain(one, base)})" for one in others]
            rows.append([fleet, f"32, {slow}", accuracy(base), *cells, paper])
    return tables.table(TABLES_3_7, rows)


def gain(lines: Sequence[Line], base: Sequence[Line]) -> str:
    """Say what is gained over a base, seed by seed, and if it is beyond two standard errors."""
    both = zip(metric(lines, "accuracy"), metric(base, "accuracy"), strict=False)
    gains = [100 * (mine - theirs) for mine, theirs in both]
    verdict = "within the noise"
    if len(gains) < 2:
        verdict = "one seed only"
    elif abs(mean(gains)) > 2 * deviation(gains) / len(gains) ** 0.5:
        verdict = "gain" if mean(gains) > 0 else "loss"
    return f"{mean(gains):+.2f} ± {deviation(gains):.2f}, {verdict}"


def plain(lines: list[Line]) -> str:
    rows = []
    for name, group in record.by(lines, "name").items():
        epochs, rounds, virtual_s = means(group)
        rows.append([name, f"{epochs:.1f}", f"{rounds:.0f}", f"{virtual_s:.1f}", accuracy(group)])
    return tables.table(["case", "epochs", "rounds", "virtual s", "accuracy %"], rows)


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    """Return the parts of the page; draw accuracy against virtual time for Table 1."""
    lines = sorted(lines, key=lambda line: line["seed"])  # differences pair like with like
    groups = record.by(lines, "experiment")
    special = {"table1": table1, "tables3+7": tables_3_7}
    parts = {
        name.replace("3+", "_3_"): special.get(name, plain)(own) for name, own in groups.items()
    }
    if "table1" in groups:
        first = {x["case"]["name"]: x["curve"] for x in groups["table1"] if x["seed"] == 0}
        curves = {name: (c["virtual_s"][1:], c["accuracy"][1:]) for name, c in first.items()}
        labels = ("virtual time (s)", "test accuracy")
        path = folder / "curves.png"
        plots.draw({"equal epochs": curves}, path, *labels, size=(7.5, 4), xscale="log")
    versions = record.software(lines, "flwr", "torch", "numpy")
    about = {"case": lines[0]["case"], "seeds": len(record.seeds(lines)), "versions": versions}
    return parts | about
