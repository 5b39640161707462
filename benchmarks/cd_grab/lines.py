"""What the report's parts share: reading json lines, naming methods, tables."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
LAST = 5
"""Epochs at the end of a run that are averaged."""
NAMES = {
    "d-rr": "D-RR",
    "shuffle-once": "shuffle once",
    "id-grab-mean": "ID-GraB(Bal)",
    "id-grab": "ID-GraB(PairBal)",
}
Line = dict[str, Any]


def read(name: str) -> list[Line]:
    path = HERE / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def name_of(line: Line) -> str:
    if line["method"] != "cd-grab":
        return NAMES[line["method"]]
    return f"CD-GraB, k = {line['sketch_size']}" if line["sketch_size"] else "CD-GraB, exact"


def grouped(lines: Iterable[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(line[key] for key in keys)].append(line)
    return found


def spread(values: list[float], digits: int = 3) -> str:
    text = f"{np.mean(values):.{digits}g}"
    return text + (f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else "")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def final(line: Line, key: str) -> float:
    return float(np.mean(line[key][-LAST:]))


def ratio(ours: dict[int, float], base: dict[int, float]) -> str:
    """Divide the means over the seeds that both have."""
    both = sorted(ours.keys() & base.keys())
    return f"{np.mean([ours[s] for s in both]) / np.mean([base[s] for s in both]):.2f}"
