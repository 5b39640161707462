"""Time to vanilla's accuracy, and accuracy by tiers' shares."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero_studies.core import curves, plots, record, tables
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.record import Line
from flwr_hetero_studies.core.tables import percent
from flwr_hetero_studies.papers.report import coverage

VANILLA, PARTITIONS = "vanilla", ("classes-by-speed", "dirichlet")
SMOOTH, WINDOW_S, FINAL, TOLERANCE, STEPS = 5, 40, 10, 0.01, 4001
RACE = ["policy", "rounds", "virtual time", "faster than vanilla", "final accuracy",
        "time to target", "with profiling"]  # fmt: skip
QUARTERS = ["all, second quarter", "all, last quarter", "last two classes, second quarter",
            "last two classes, last quarter"]  # fmt: skip
MIX = ["policy", "rounds per tier, fastest first", "time to the target over paced's",
       "the same, by rounds", *QUARTERS]  # fmt: skip
SHOWN = [MIX[0], MIX[2], QUARTERS[1], QUARTERS[3]]
RACE_SHOWN = ["policy", "virtual time", *RACE[4:]]


def final_accuracy(lines: Sequence[Line]) -> float:
    return float(np.mean([curves.last(line, "accuracy", FINAL) for line in lines]))


def mean_curve(
    lines: Sequence[Line], unit_s: Mapping[int, float], *, profiling: bool = False
) -> tuple[Vector, Vector]:
    """Average smoothed accuracy against time, in a seed's own unit; NaN where one has none."""
    time, found = np.linspace(0, 1, STEPS), []
    for line in lines:
        shift_s = line["metrics"]["profiling_s"] if profiling else 0.0
        clock = (np.asarray(line["curve"]["clock_s"]) + shift_s) / unit_s[line["seed"]]
        latest = np.searchsorted(clock, time, side="right") - 1
        known = (latest >= 0) & (time <= clock[-1])
        accuracy = curves.smooth(line["curve"]["accuracy"], SMOOTH)
        found.append(np.where(known, accuracy[latest], np.nan))
    return time, np.mean(found, axis=0)


def time_to(target: float, time: Vector, curve: Vector) -> str:
    place = curves.reached(curve, target)
    return "never" if np.isnan(place) else f"{time[int(place)]:.2f}"


def lengths(lines: Sequence[Line]) -> dict[int, float]:
    return {line["seed"]: line["curve"]["clock_s"][-1] for line in lines}


def race(lines: Sequence[Line]) -> list[list[str]]:
    vanilla, rows = record.of(lines, name=VANILLA), []
    target, unit_s = final_accuracy(vanilla) - TOLERANCE, lengths(vanilla)
    for name, mine in record.by(lines, "name").items():
        took = lengths(mine)
        faster = np.mean([unit_s[seed] / took[seed] for seed in took])
        rounds = np.mean([len(line["curve"]["accuracy"]) - 1 for line in mine])
        times = [time_to(target, *mean_curve(mine, unit_s, profiling=p)) for p in (False, True)]
        cells = [name, f"{rounds:.0f}", f"{np.mean(list(took.values())):.0f} s", f"{faster:.1f}x"]
        rows.append([*cells, percent(final_accuracy(mine)), *times])
    return rows


def draw_race(lines: Sequence[Line], path: Path) -> None:
    vanilla, drawn = record.of(lines, name=VANILLA), dict[str, tuple[Vector, Vector]]()
    for name, mine in record.by(lines, "name").items():
        time, curve = mean_curve(mine, lengths(vanilla))
        drawn[name] = (time, 100 * curve)
    low = 100 * max(0.0, final_accuracy(vanilla) - 0.4)
    labels = ("virtual time / vanilla's whole run", "test accuracy in %")
    plots.draw({"digits": drawn}, path, *labels, xlim=(0, 1), ylim=(low, None))


def held(line: Line, name: str) -> Vector:
    """Return a column second by second: a round's figure holds until the next round's."""
    curve, budget_s = line["curve"], int(line["case"]["budget-s"])
    latest = np.searchsorted(curve["virtual_s"], np.arange(budget_s), side="right") - 1
    return np.asarray(curve[name], float)[np.maximum(latest, 0)]


def quarter(line: Line, name: str, number: int) -> float:
    return float(np.array_split(held(line, name), 4)[number - 1].mean())


def target_s(line: Line, base: Line, *, by_time: bool) -> float:
    """Return when the smoothed accuracy is within a point of the base's in its last quarter."""
    target, curve = quarter(base, "accuracy", 4) - TOLERANCE, line["curve"]
    column, window = (held(line, "accuracy"), WINDOW_S) if by_time else (curve["accuracy"], SMOOTH)
    clock = np.arange(len(column)) if by_time else curve["virtual_s"]
    return curves.time_to(clock, curves.smooth(column, window), target, between=False)


def mixes(lines: Sequence[Line]) -> list[list[str]]:
    base, rows = record.of(lines, name="paced"), []
    for name, mine in record.by(lines, "name").items():
        tiers = np.mean([line["metrics"]["rounds"] for line in mine], axis=0)
        cells = [" / ".join(f"{count:.0f}" for count in tiers)]
        for by_time in (True, False):
            found = [
                target_s(line, its, by_time=by_time) / target_s(its, its, by_time=by_time)
                for line, its in record.pairs(mine, base)
            ]
            known = [share for share in found if share < inf]
            missed = len(found) - len(known)
            texts = [tables.extent(known)] if known else []
            texts += [f"{missed} of {len(found)} never"] if missed else []
            cells.append("; ".join(texts))
        rows.append([name, *cells, *quarters(mine)])
    return rows


def quarters(lines: Sequence[Line]) -> list[str]:
    columns = [(key, number) for key in ("accuracy", "slow") for number in (2, 4)]
    found = [[100 * quarter(line, *column) for line in lines] for column in columns]
    return [tables.extent(each, "{:.1f}") for each in found]


def report(lines: list[Line], folder: Path) -> dict[str, Any]:
    groups = record.by(lines, "experiment")
    parts: dict[str, Any] = {"versions": record.software(lines, "flwr", "torch", "numpy")}
    parts |= coverage("tifl")
    if digits := groups.get("digits"):
        draw_race(digits, folder / "digits.png")
        found = race(digits)
        parts |= {"digits": tables.only(RACE_SHOWN, RACE, found), "digits_case": digits[0]["case"]}
        parts["digits_in_full"] = tables.table(RACE, found)
        parts["digits_seeds"] = len(record.seeds(digits))
    mixed = {p: groups[f"mix, {p}"] for p in PARTITIONS if f"mix, {p}" in groups}
    if mixed:
        rows = {name: mixes(mine) for name, mine in mixed.items()}
        parts["mixes"] = "".join(
            f"### {name}\n\n{tables.only(SHOWN, MIX, own)}\n" for name, own in rows.items()
        )
        parts["every_mix"] = "\n".join(tables.table(MIX, own) for own in rows.values())
        first = next(iter(mixed.values()))
        parts |= {"mix_case": first[0]["case"], "mix_seeds": len(record.seeds(first))}
    return parts
