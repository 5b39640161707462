"""Every method tuned alike, at equal concurrency, as ``page.template`` said before the runs."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from flwr_hetero.strategy import Compressed, SamplerMetrics
from flwr_hetero_studies.core import record
from flwr_hetero_studies.core.apps import app_modules
from flwr_hetero_studies.core.curves import Columns
from flwr_hetero_studies.core.plan import DIGITS, Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race import limit, wide
from flwr_hetero_studies.race.cells import CELLS, MAIN, PACKED, RaceCell, case_of
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS, OWN_AVERAGE
from flwr_hetero_studies.race.node import IN_TORCH, Learning
from flwr_hetero_studies.race.tuning import TUNED, YARDSTICK, Tuning, scores_of
from flwr_hetero_studies.race.watch import SMOOTHED, WINDOWS, Limits, race

ROUNDS, LONG = 40, 3
"""Rounds of FedAvg that set the targets, and how many times as many it trains in all."""
EXAMPLES_A_ROUND = 810
"""That FedAvg trains on with three nodes of 270."""
TUNED_SHARE, MORE_FOR_ALL = {5: 2 / 3, 20: 1 / 2}, 2
"""Part of a run to tune by, by nodes at work; how many times the examples where all are."""
SETTINGS = {"rounds": ROUNDS, "time": 1.0}
FAST = {"rounds": 4}
FAST_CASES = ["*dirichlet*/yardstick", "*dirichlet, 5*/FedAvg", "*dirichlet, 5*/FedSlice"]
PARTS: dict[str, dict[str, str]] = {
    "ours alone": {}, "with Mercury": {"sampler": "mercury"},
    "with PGD": {"sampler": "pgd"}, "with ID-GraB": {"order": "id-grab"},
}  # fmt: skip
"""Samplers and orders of ``apps/fleet`` under our setting, in torch; CD-GraB needs rounds."""
PARTS_AT, PARTS_SEEDS = 5, 5
BITS, PACKED_SEEDS = 4, 3
"""Of a value, each way, in the runs with compression."""


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    tuning = Tuning(options, lines)
    cells = {n: c for n, c in CELLS.items() if options.data in (c.data, DIGITS)}
    for name, cell in cells.items():
        # all other cells take what is tuned in the main one: a user tunes once
        if name == TUNED.get(cell.data, MAIN):
            yield from tuning.plan(name)
    for name, cell in cells.items():
        yield from racing(name, cell, tuning)
    if options.data == CELLS[MAIN].data:
        yield from parts(tuning)
        yield from limit.plan(options, lines)
    yield from wide.plan(options, lines)


def racing(name: str, cell: RaceCell, tuning: Tuning) -> Iterator[Trial]:
    base = tuning.choice(name, 5, BASE)
    if base is None:
        return
    (rate, *_), window = base
    yardstick, _ = tuning.yardstick("", name, rate)
    for seed in tuning.options.seeds_or(range(cell.seeds)):
        yield Trial(yardstick, seed, {"split": "test", "window": window})
    for at_work in cell.at_work:
        for method in cell.methods or METHODS:
            if METHODS[method].runs_with(at_work, cell.nodes):
                yield from entrant(tuning, name, at_work, method, cell.seeds)
    packed = [(count, names) for (own, count), names in PACKED.items() if own == name]
    for at_work, names in packed:
        for method in names:
            yield from entrant(tuning, name, at_work, method, PACKED_SEEDS, bits=BITS)


def entrant(
    tuning: Tuning, cell: str, at_work: int, method: str, seeds: int, **more: int
) -> Iterator[Trial]:
    base = tuning.choice(cell, 5, BASE)
    chosen = tuning.choice(cell, at_work, BASE if method == OURS else method)
    if base is None or chosen is None:
        return
    _, known = tuning.yardstick("", cell, base[0][0])
    window = OWN_AVERAGE if method == OURS else chosen[1]
    given = {"trial": list(chosen[0]), "window": window, **more}
    case = case_of(f"{BITS} bits: " if more else "", cell, at_work, method, tuning.options, **given)
    # a run has the limits of the yardstick of its own seed
    for seed in (seed for seed in tuning.options.seeds_or(range(seeds)) if seed in known):
        limits = known[seed]["metrics"]["limits"]
        yield Trial(case, seed, {"split": "test", "limits": limits})


def parts(tuning: Tuning) -> Iterator[Trial]:
    chosen = tuning.choice(MAIN, PARTS_AT, BASE)
    if chosen is None:
        return
    yards = record.of(tuning.lines, cell=MAIN, name=YARDSTICK)
    yards = [x for x in yards if not x["case"]["experiment"].startswith("tuning")]
    more = {"trial": list(chosen[0]), "window": OWN_AVERAGE, "method": OURS}
    for part in PARTS:
        case = case_of("parts: ", MAIN, PARTS_AT, part, tuning.options, **more)
        for yard in (x for x in yards if x["seed"] < PARTS_SEEDS):
            given = {"split": "test", "limits": yard["metrics"]["limits"]}
            yield Trial(case, yard["seed"], given)


def run(case: Case, seed: int, data: Data, split: str, **given: Any) -> dict[str, Any]:
    if case["experiment"].startswith((wide.RUNS, wide.TUNING)):
        return wide.run(case, seed, data, split, **given)
    if case["experiment"] in (limit.RUNS, limit.TUNING):
        return limit.run(case, seed, data, split)
    cell, is_yardstick = CELLS[case["cell"]], case["name"] == YARDSTICK
    rate, *settings = [case["rate"], None, None] if is_yardstick else case["trial"]
    method = METHODS[BASE if is_yardstick else str(case.get("method", case["name"]))]
    strategy = method.build(case["at_work"], seed, *settings)
    if "bits" in case:
        strategy = Compressed(strategy, case["bits"], case["bits"])
    train, valid, test = cell.rows
    dataset, shape = data.first(train + valid, test), (cell.model, cell.partition, cell.nodes)
    learning, more = Learning(dataset, *shape, cell.rows, seed), dict[str, Any]()
    if case["name"] in PARTS:
        # samplers are written for torch: the same network there
        strategy, learning = SamplerMetrics(strategy), replace(learning, model=IN_TORCH)
        more = {"app": app_modules("fleet", "fleet_app")[0], "more": fleet_config(case, cell, data)}
    found = race(
        learning, cell.fleet(seed), strategy, rate=rate, split=split,
        limits=limits_of(case, cell, split, given), **more,
    )  # fmt: skip
    curve, metrics = found["curve"], found["metrics"]
    if is_yardstick:
        windows = [given["window"]] if "window" in given else WINDOWS
        most = limits_of(case, cell, split, {}).examples
        end = int(np.searchsorted(curve["examples"], most / LONG))
        best = max(ends(curve, windows, end).values())
        limits = {"virtual_s": curve["virtual_s"][-1], "end": best}
        return {"metrics": metrics | {"limits": limits}, "curve": curve}
    if split == "valid":
        found_ends = {str(w): round(end, 4) for w, end in ends(curve, WINDOWS).items()}
        scores = scores_of(curve, given["limits"])
        return {"metrics": metrics | {"scores": scores, "ends": found_ends}}
    kept = {key: curve[key] for key in ("virtual_s", "examples", "bytes", "device_s")}
    kept |= {key: curve[f"{key}/{case['window']}"] for key in ("all", "slow")}
    return {"metrics": metrics, "curve": kept}


def limits_of(case: Case, cell: RaceCell, split: str, given: dict[str, Any]) -> Limits:
    """Return when a run ends: a yardstick by its examples, others by what a yardstick took."""
    per_round = EXAMPLES_A_ROUND * cell.rows[0] * 20 / (6000 * cell.nodes)
    most = LONG * case["rounds"] * per_round
    if case["name"] == YARDSTICK:
        return Limits(inf, most, 1.5 * per_round)
    # with one epoch per node and round, rounds of all would end too soon to judge
    most *= MORE_FOR_ALL if case["at_work"] == cell.nodes else 1
    part = TUNED_SHARE[case["at_work"]] if split == "valid" else 1.0
    return Limits(part * given["limits"]["virtual_s"], part * most, 1.5 * per_round)


def ends(curve: Columns, windows: Any, end: int | None = None) -> dict[int, float]:
    """Return the mean of the last looks before a place, by window."""
    stop = len(curve["examples"]) if end is None else end
    # a fast run may have fewer looks than are averaged
    start = max(0, stop - SMOOTHED)
    return {w: float(np.mean(curve[f"all/{w}"][start:stop])) for w in windows}


def fleet_config(case: Case, cell: RaceCell, data: Data) -> dict[str, Any]:
    plain = {"engine": "fedslice", "selection": "all", "order": "reshuffle", "sampler": "uniform"}
    plain |= {"partition": cell.partition, "dataset": data.first(cell.rows[0], cell.rows[2])}
    return {**plain, "model": IN_TORCH, **PARTS[case["name"]]}
