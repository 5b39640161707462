"""Every method tuned alike, at equal concurrency, as ``page.template`` said before the runs."""

from collections.abc import Iterator
from math import inf
from typing import Any

from flwr_hetero.strategy import Compressed
from flwr_hetero_studies.core.plan import DIGITS, Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.race.cells import CELLS, MAIN, PACKED, RaceCell, case_of
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS, OWN_AVERAGE
from flwr_hetero_studies.race.tuning import YARDSTICK, Tuning, scores_of
from flwr_hetero_studies.race.watch import WINDOWS, Limits, end_of, place_of, race, with_window

ROUNDS = 40
"""Rounds of FedAvg that set the targets."""
LONG = 3
"""How many times as many rounds FedAvg trains in all."""
TUNED_SHARE = {5: 2 / 3, 20: 1 / 2}
"""Part of a run that is made to tune, by nodes at work."""
MORE_FOR_ALL = 2
"""How many times the examples may be trained where all nodes are at work."""
SETTINGS = {"rounds": ROUNDS}
FAST = {"rounds": 4}
FAST_CASES = ["*dirichlet*/yardstick", "*dirichlet, 5*/FedAvg", "*dirichlet, 5*/FedSlice"]
BITS = 4
"""Bits of a value each way in the runs with compression."""
PACKED_SEEDS = 3


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    tuning = Tuning(options, lines)
    cells = {n: cell for n, cell in CELLS.items() if options.data in (cell.data, DIGITS)}
    for name, cell in cells.items():
        # All other cells take what is tuned in the main one, because a user tunes once.
        if name == MAIN or cell.rates:
            yield from tuning.plan(name)
    for name, cell in cells.items():
        yield from racing(name, cell, tuning)


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
    for (packed, at_work), methods in PACKED.items():
        if packed == name:
            for method in methods:
                yield from entrant(tuning, name, at_work, method, PACKED_SEEDS, bits=BITS)


def entrant(
    tuning: Tuning, cell: str, at_work: int, method: str, seeds: int, **more: int
) -> Iterator[Trial]:
    base = tuning.choice(cell, 5, BASE)
    chosen = tuning.choice(cell, at_work, BASE if method == OURS else method)
    if base is None or chosen is None:
        return
    (rate, *_), _ = base
    trial, window = chosen
    _, yards = tuning.yardstick("", cell, rate)
    settings = {"trial": list(trial), "window": OWN_AVERAGE if method == OURS else window, **more}
    kind = f"{BITS} bits: " if more else ""
    case = case_of(kind, cell, at_work, method, tuning.options, **settings)
    # A run has the limits of the yardstick of its own seed.
    for seed in tuning.options.seeds_or(range(seeds)):
        if seed in yards:
            limits = yards[seed]["metrics"]["limits"]
            yield Trial(case, seed, {"split": "test", "limits": limits})


def run(case: Case, seed: int, data: Data, split: str, **given: Any) -> dict[str, Any]:
    if case["name"] == YARDSTICK:
        return run_yardstick(case, seed, data, split, **given)
    return run_method(case, seed, data, split, **given)


def run_yardstick(
    case: Case, seed: int, data: Data, split: str, window: int | None = None
) -> dict[str, Any]:
    """Run FedAvg for long; return the limits of others too, by its end after ``ROUNDS``."""
    cell = CELLS[case["cell"]]
    strategy = METHODS[BASE].make(cell.base, case["at_work"], seed, None, None)
    most = LONG * case["rounds"] * cell.examples_a_round
    limits = Limits(inf, most, 1.5 * cell.examples_a_round)
    metrics, curve = race(
        cell.learning(data, seed),
        cell.fleet(seed),
        strategy,
        rate=case["rate"],
        split=split,
        limits=limits,
    )
    stop = place_of(curve, most / LONG)
    # How many models FedAvg averages is known once it is tuned.
    end = max(end_of(curve, each, stop) for each in ([window] if window else WINDOWS))
    found = {"limits": {"virtual_s": curve["virtual_s"][-1], "end": end}}
    return {"metrics": metrics | found, "curve": with_window(curve, window) if window else {}}


def run_method(
    case: Case, seed: int, data: Data, split: str, limits: dict[str, float]
) -> dict[str, Any]:
    cell = CELLS[case["cell"]]
    rate, *settings = case["trial"]
    strategy = METHODS[case["name"]].make(cell.base, case["at_work"], seed, *settings)
    if "bits" in case:
        strategy = Compressed(strategy, case["bits"], case["bits"])
    most = LONG * case["rounds"] * cell.examples_a_round
    # Rounds of all nodes, each with one epoch, would end too early to judge.
    if case["at_work"] == cell.nodes:
        most *= MORE_FOR_ALL
    part = TUNED_SHARE[case["at_work"]] if split == "valid" else 1.0
    own_limits = Limits(part * limits["virtual_s"], part * most, 1.5 * cell.examples_a_round)
    metrics, curve = race(
        cell.learning(data, seed),
        cell.fleet(seed),
        strategy,
        rate=rate,
        split=split,
        limits=own_limits,
    )
    if split == "valid":
        ends = {str(window): round(end_of(curve, window), 4) for window in WINDOWS}
        return {"metrics": metrics | {"scores": scores_of(curve, limits), "ends": ends}}
    return {"metrics": metrics, "curve": with_window(curve, case["window"])}
