"""FedSlice less FedAvg by round and by second, with intervals over pairs of runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import record, tables
from flwr_hetero_studies.core.criteria import interval
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.simulation.cases import SETTINGS

BASE, OURS = "FedAvg", "FedSlice"
ROUNDS = (1, 2, 3, 4, 6, 8)
FROM = 2
"""Round of FedAvg from which on FedSlice is not to be behind, by round and by second."""
SECONDS = "seconds of a round, FedAvg's = 1"
HEAD = [
    "optimizer, data, workers", "pairs", *(f"round {number}" for number in ROUNDS),
    SECONDS, *(f"FedAvg ends round {number}" for number in ROUNDS[2:]),
]  # fmt: skip
SHOWN = [HEAD[0], "round 2", "round 4", "round 8", SECONDS, "FedAvg ends round 4"]
"""Columns on the page; the others are in the details."""
Pair = tuple[Line, Line]
Measure = Callable[[Pair, int], float]


def by_round(pair: Pair, number: int) -> float:
    """Return FedSlice's points less FedAvg's after a round."""
    own, base = (line["curve"]["accuracy"][number] for line in pair)
    return 100 * float(own - base)


def by_time(pair: Pair, number: int) -> float:
    """Return the same when FedAvg ends a round; of FedSlice the last model counts that was there.

    The model of FedSlice's last round stands for later seconds, in which it would have trained on.
    """
    own, base = (line["curve"] for line in pair)
    place = int(np.searchsorted(own["seconds"], base["seconds"][number], side="right")) - 1
    return 100 * float(own["accuracy"][place] - base["accuracy"][number])


def round_s(pair: Pair) -> float:
    """Return the seconds of FedSlice's rounds over FedAvg's; the first holds the start of Ray."""
    own, base = (line["curve"]["seconds"] for line in pair)
    return float((own[-1] - own[1]) / (base[-1] - base[1]))


def cell(values: Sequence[float], form: str = "+.1f") -> str:
    mean, low, high = interval(values)
    if len(values) < 2:
        return f"{mean:{form}}"
    # Bold: behind by more than chance.
    text = f"{mean:{form}} ({low:{form}} to {high:{form}})"
    return f"**{text}**" if form == "+.1f" and high < 0 else text


def cells(pairs: Sequence[Pair], measure: Measure, rounds: Sequence[int]) -> list[str]:
    last = len(pairs[0][0]["curve"]["accuracy"]) - 1
    return [
        cell([measure(pair, number) for pair in pairs]) if number <= last else ""
        for number in rounds
    ]


def verdicts(groups: dict[str, list[Pair]]) -> list[str]:
    """Say in which cells FedSlice is behind on average, by round and by second."""
    texts = []
    for what, shown, measure in (("round", "round", by_round), ("second", "end of round", by_time)):
        behind = []
        for name, pairs in groups.items():
            first = FROM if what == "round" else FROM + 1
            numbers = []
            for number in range(first, len(pairs[0][0]["curve"]["accuracy"])):
                mean, _, high = interval([measure(pair, number) for pair in pairs])
                if mean < 0:
                    sure = ", beyond chance" if high < 0 else ""
                    numbers.append(f"{number} ({mean:+.1f}{sure})")
            if numbers:
                behind.append(f"{name}, {shown} {', '.join(numbers)}")
        found = "; ".join(behind) or "nowhere"
        texts.append(f"Behind on average by {what}: {found}.")
    return texts


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups: dict[str, list[Pair]] = {}
    for name, own in record.by(lines, "experiment").items():
        runs = record.by(own, "name")
        pairs = record.pairs(runs.get(OURS, []), runs.get(BASE, []))
        if pairs:
            groups[name] = pairs
    if not groups:
        return {}
    last = len(lines[0]["curve"]["accuracy"]) - 1
    rows = []
    for name, pairs in groups.items():
        seconds = cell([round_s(pair) for pair in pairs], ".2f") if last > 1 else ""
        after = cells(pairs, by_round, ROUNDS)
        rows.append([name, len(pairs), *after, seconds, *cells(pairs, by_time, ROUNDS[2:])])
    every = [by_round(pair, n) for pairs in groups.values() for pair in pairs
             for n in ROUNDS[1:] if n <= last]  # fmt: skip
    ahead = sum(value >= 0 for value in every)
    return {
        **{name: lines[0]["case"][name] for name in SETTINGS},
        "rates": {x["case"]["optimizer"]: x["case"]["rate"] for x in lines},
        "shown": tables.only(SHOWN, HEAD, rows),
        "every": tables.table(HEAD, rows),
        "verdicts": "\n".join(f"- {text}" for text in verdicts(groups)),
        "ahead": f"{ahead} of {len(every)}",
        "software": record.software(lines),
        "low": min(record.metric(lines, "load")),
        "high": max(record.metric(lines, "load")),
    }
