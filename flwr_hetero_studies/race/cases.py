"""An honest race: every method tuned alike, at equal concurrency, with all that it costs.

What is run, in which order and with which seeds, and what counts as sooner, is said on the page
(``page.md``), which was written before the runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, log
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.fleet import DeviceProfile, named_fleet
from flwr_hetero.strategy import SamplerFacts
from flwr_hetero_studies.core import curves, record
from flwr_hetero_studies.core.apps import app_modules
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, of
from flwr_hetero_studies.race.methods import BASE, METHODS, OURS, OWN, Method, best_of, trials_of
from flwr_hetero_studies.race.node import IN_TORCH, NUMPY, Task
from flwr_hetero_studies.race.watch import WINDOWS, Limits, race

DEVELOPMENT = (100, 101)
"""Seeds to tune with; beside the main cell the first."""
ROUNDS, LONG = 40, 3
"""Rounds of FedAvg that set the targets, and how many times as many it trains in all."""
YARDSTICK_AT_WORK = 3
EXAMPLES_A_ROUND = 810
"""That FedAvg trains on with three nodes of 270."""
SMOOTHED = 4
"""Looks at the models of which the mean counts."""
TUNED_SHARE = {5: 2 / 3, 20: 1 / 2}
"""Part of a run that is enough to tune by, by nodes at work."""
MORE_FOR_ALL = 2
"""How many times as many examples may be trained where all nodes are at work."""
SETTINGS = {"rounds": ROUNDS, "time": 1.0}
FAST = {"rounds": 4}
FAST_CASES = ["*dirichlet*/yardstick", "*dirichlet, 5*/FedAvg", "*dirichlet, 5*/FedSlice"]
LEVELS = (-0.03, -0.01, 0.01)
"""Accuracies by which settings are chosen, relative to FedAvg's end."""
TARGETS = (-0.01, 0.02)
"""Those of the report."""


class Cell(NamedTuple):
    """A fleet, its links, a task, and how much of the race is run there."""

    fleet: Callable[[int], list[DeviceProfile]]
    partition: str = "dirichlet"
    data: str = "fashion_mnist"
    model: str = NUMPY
    nodes: int = 20
    rows: tuple[int, int, int] = (6000, 2000, 2000)
    round_cost_s: float = 0.0
    at_work: tuple[int, ...] = (5,)
    seeds: int = 3
    methods: tuple[str, ...] = ()
    """Which methods; empty: all."""
    length: float = 1.0
    """Rounds of FedAvg, in those of other cells."""


def paper_5(seed: int, **changes: Any) -> list[DeviceProfile]:
    return changed(named_fleet("paper-5", 20), **changes)


def changed(devices: list[DeviceProfile], **changes: Any) -> list[DeviceProfile]:
    return [replace(device, **changes) for device in devices]


def mild(seed: int) -> list[DeviceProfile]:
    """Five kinds, the quickest twice as quick as the slowest."""
    speeds = np.repeat(np.geomspace(1.4, 0.7, 5), 4)
    return [DeviceProfile(float(speed)) for speed in speeds]


def log_normal(seed: int) -> list[DeviceProfile]:
    """Speeds and links that spread as in traces of phones: sigma of the logarithm 1 and 0.8."""
    rng = np.random.default_rng([seed, 7])
    speeds, links = np.exp(rng.normal(0, 1.0, 20)), 20 * np.exp(rng.normal(0, 0.8, 20))
    return [
        DeviceProfile(float(s), uplink_mbps=float(b) / 2, downlink_mbps=float(b))
        for s, b in zip(speeds, links, strict=True)
    ]


def unreliable(seed: int) -> list[DeviceProfile]:
    """Nodes that are away one time in five, with compute times that vary by 30 %."""
    return paper_5(seed, jitter=0.3, availability=0.8)


def linked(seed: int) -> list[DeviceProfile]:
    return paper_5(seed, uplink_mbps=10.0, downlink_mbps=10.0)


def hundred(seed: int) -> list[DeviceProfile]:
    return named_fleet("paper-5", 100)


FIRST = (
    *(BASE, *OWN, "FedBuff, published", "FedProx, partial work"),
    *("FedCompass", "biased local SGD", "TiFL"),
)
"""Methods run beside the main cell: the best rivals there."""
CELLS: dict[str, Cell] = {
    "dirichlet": Cell(paper_5, at_work=(3, 5, 20), seeds=5),
    "classes by speed": Cell(paper_5, "classes-by-speed", at_work=(5, 20), methods=FIRST),
    "10 Mbit/s": Cell(linked, at_work=(5, 20), methods=FIRST),
    "5 s a message": Cell(paper_5, round_cost_s=5.0, methods=FIRST),
    "mild": Cell(mild, methods=FIRST[:6]),
    "log-normal": Cell(log_normal, methods=FIRST[:6]),
    "unreliable": Cell(unreliable, methods=FIRST),
    "texts": Cell(paper_5, data="stdlib", model="bag", rows=(6000, 1000, 2000), methods=FIRST[:6]),
    "100 nodes": Cell(hundred, nodes=100, rows=(30000, 2000, 2000), methods=FIRST),
    "60,000 images": Cell(paper_5, rows=(60000, 0, 2000), methods=FIRST[:7], length=0.4),
    "CIFAR-10": Cell(paper_5, data="cifar10", methods=FIRST[:7]),
}
MAIN = "dirichlet"
PARTS: dict[str, dict[str, str]] = {
    "ours alone": {},
    "with Mercury": {"sampler": "mercury"},
    "with PGD": {"sampler": "pgd"},
    "with ID-GraB": {"order": "id-grab"},
}
"""Samplers and orders of ``apps/fleet`` under our setting, in torch; CD-GraB needs rounds."""
PARTS_AT, PARTS_SEEDS = 5, 5
TUNED = {"stdlib": "texts", "cifar10": "CIFAR-10"}
"""Where settings are tuned that are not tuned in the main cell: by data."""
OTHER_RATES = {"stdlib": (1.0, 0.5, 2.0), "cifar10": (0.05, 0.025, 0.1)}
"""Learning rates tried there: a bag of words wants larger ones, four times as many inputs less."""
TUNED_AT = (5, 20)
Choice = tuple[float, Any, Any]


# --- plan ----------------------------------------------------------------------------------


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield the yardsticks, then what is tuned, then the race, as far as is known what to run."""
    for cell_name, cell in CELLS.items():
        if cell.data != options.data and options.data != "digits":
            continue
        if cell_name == TUNED.get(cell.data, MAIN):
            yield from tuning(cell_name, options, lines)
    for cell_name, cell in CELLS.items():
        if cell.data == options.data or options.data == "digits":
            yield from racing(cell_name, cell, options, lines)
    if options.data == CELLS[MAIN].data:
        yield from parts(options, lines)


def case_of(kind: str, cell: str, at_work: int, name: str, options: Options, **more: Any) -> Case:
    """Name a run."""
    where = f"{kind}{cell}, {at_work} at work"
    rounds = round(CELLS[cell].length * options.settings["rounds"])
    return {"experiment": where, "name": name, "cell": cell, "at_work": at_work,
            **options.settings, "rounds": rounds, **more}  # fmt: skip


def yardsticks(
    kind: str, cell: str, options: Options, lines: list[Line], rate: float
) -> dict[int, Line]:
    """Return FedAvg's long runs by seed, as far as they are there."""
    case = yardstick_case(kind, cell, options, rate)
    return record.by_seed(of(lines, **case))


def yardstick_case(kind: str, cell: str, options: Options, rate: float) -> Case:
    return case_of(kind, cell, YARDSTICK_AT_WORK, "yardstick", options, rate=rate)


def tuning(cell: str, options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield the next trials on the validation split."""
    rate = METHODS[BASE].rates[0] if cell == MAIN else OTHER_RATES[CELLS[cell].data][0]
    seeds = development(cell, options)
    known = yardsticks("tuning: ", cell, options, lines, rate)
    for seed in seeds:
        yield Trial(yardstick_case("tuning: ", cell, options, rate), seed, {"split": "valid"})
    if not all(seed in known for seed in seeds):
        return
    nodes = CELLS[cell].nodes
    for at_work in (at_work for at_work in TUNED_AT if at_work in CELLS[cell].at_work):
        for name in CELLS[cell].methods or METHODS:
            method = method_in(cell, at_work, name, options, lines)
            if method is None or not method.at_work(at_work, nodes):
                continue
            found = scores(cell, at_work, name, options, lines)
            for trial in trials_of(method, found):
                case = case_of("tuning: ", cell, at_work, name, options, trial=list(trial))
                for seed in development(cell, options):
                    limits = known[seed]["metrics"]["limits"]
                    yield Trial(case, seed, {"split": "valid", "limits": limits})


def method_in(
    cell: str, at_work: int, name: str, options: Options, lines: list[Line]
) -> Method | None:
    """Return a method to tune: beside the main cell its rate only, else as tuned there."""
    if cell == MAIN:
        return METHODS[name]
    main = choice(MAIN, at_work, name, options, lines)
    if main is None:
        return None
    (_, first, second), _ = main
    rates = OTHER_RATES[CELLS[cell].data]
    return METHODS[name]._replace(first=(first,), second=(second,), rates=rates)


def development(cell: str, options: Options) -> list[int]:
    """Return the seeds to tune with: one in a fast run and beside the main cell."""
    return list(DEVELOPMENT[: None if cell == MAIN and not options.fast else 1])


def scores(
    cell: str, at_work: int, name: str, options: Options, lines: list[Line]
) -> dict[Choice, float]:
    """Return the score of each trial of which all seeds are there: its best window's."""
    return {trial: min(by.values()) for trial, by in window_scores(
        cell, at_work, name, options, lines).items()}  # fmt: skip


def window_scores(
    cell: str, at_work: int, name: str, options: Options, lines: list[Line]
) -> dict[Choice, dict[int, float]]:
    """Return each trial's mean score by the window of averaging, less is better."""
    seeds = development(cell, options)
    wanted = {"experiment": f"tuning: {cell}, {at_work} at work", "name": name, **options.settings}
    found: dict[Choice, list[Line]] = {}
    for line in of(lines, **wanted):
        found.setdefault(tuple(line["case"]["trial"]), []).append(line)
    return {
        trial: {w: float(np.mean([score_of(x, str(w)) for x in own])) for w in windows_of(name)}
        for trial, own in found.items()
        if record.seeds(own) == seeds
    }


def windows_of(name: str) -> Sequence[int]:
    """Return which averages of models a method may be measured by."""
    own = METHODS[name].window
    return WINDOWS if own is None else [own]


def score_of(line: Line, window: str) -> float:
    """Return a trial's score; of those that reach nothing the better one in the end is better."""
    end = line["metrics"].get("ends", {}).get(window, 0.0)
    return float(line["metrics"]["scores"][window] - 1e-3 * end)


def choice(
    cell: str, at_work: int, name: str, options: Options, lines: list[Line]
) -> tuple[Choice, int] | None:
    """Return what was tuned for a method: a trial and a window; None while trials are left."""
    source = TUNED.get(CELLS[cell].data, MAIN)
    nearest = min(TUNED_AT, key=lambda count: abs(log(count / at_work)))
    found = window_scores(source, nearest, name, options, lines)
    method = method_in(source, nearest, name, options, lines)
    best = method and best_of(method, {trial: min(by.values()) for trial, by in found.items()})
    if best is None:
        return None
    by = found[best]
    return best, min(by, key=lambda window: by[window])


def racing(name: str, cell: Cell, options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield the runs of a cell whose settings are tuned."""
    base = choice(name, 5, BASE, options, lines)
    if base is None:
        return
    (rate, *_), window = base
    seeds = options.seeds_or(range(cell.seeds))
    known = yardsticks("", name, options, lines, rate)
    for seed in seeds:
        given = {"split": "test", "window": window}
        yield Trial(yardstick_case("", name, options, rate), seed, given)
    for at_work in cell.at_work:
        for method in cell.methods or METHODS:
            chosen = None
            if METHODS[method].at_work(at_work, cell.nodes):
                chosen = choice(name, at_work, method, options, lines)
            if chosen is None:
                continue
            trial, window = chosen
            more = {"trial": list(trial), "window": window}
            case = case_of("", name, at_work, method, options, **more)
            for seed in (seed for seed in seeds if seed in known):
                limits = known[seed]["metrics"]["limits"]
                yield Trial(case, seed, {"split": "test", "limits": limits})


def parts(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield our setting with the samplers and orders of other papers."""
    chosen = choice(MAIN, PARTS_AT, OURS, options, lines)
    if chosen is None:
        return
    (trial, window), yards = chosen, of(lines, cell=MAIN, name="yardstick")
    for part in PARTS:
        more = {"trial": list(trial), "window": window, "method": OURS}
        case = case_of("parts: ", MAIN, PARTS_AT, part, options, **more)
        for yard in (x for x in yards if not x["case"]["experiment"].startswith("tuning")):
            if yard["seed"] < PARTS_SEEDS:
                given = {"split": "test", "limits": yard["metrics"]["limits"]}
                yield Trial(case, yard["seed"], given)


# --- run -----------------------------------------------------------------------------------


def task_of(cell: Cell, data: Data) -> Task:
    train, valid, test = cell.rows
    source = data.first(train + valid, test)
    return Task(source, cell.model, cell.partition, cell.nodes, train, valid, test)


def run(case: Case, seed: int, data: Data, split: str, **given: Any) -> dict[str, Any]:
    """Train once; a yardstick returns its limits, a trial its scores, others their curve."""
    cell = CELLS[case["cell"]]
    is_yardstick = case["name"] == "yardstick"
    trial = (case["rate"], None, None) if is_yardstick else case["trial"]
    method = METHODS[BASE if is_yardstick else case.get("method", case["name"])]
    per_round = EXAMPLES_A_ROUND * cell.rows[0] * 20 / (6000 * cell.nodes)
    most = LONG * case["rounds"] * per_round
    limits = Limits(inf, most, 1.5 * per_round)
    if not is_yardstick:
        most *= MORE_FOR_ALL if case["at_work"] == cell.nodes else 1
        part = TUNED_SHARE[case["at_work"]] if split == "valid" else 1.0
        limits = Limits(part * given["limits"]["virtual_s"], part * most, 1.5 * per_round)
    strategy = method.build(case["at_work"], *trial[1:], seed)
    task, more = task_of(cell, data), dict[str, Any]()
    if case["name"] in PARTS:
        strategy, task = SamplerFacts(strategy), replace(task, model=IN_TORCH)
        more = {"app": app_modules("fleet", "fleet_app")[0], "more": fleet_config(case, cell, data)}
    found = race(
        task, cell.fleet(seed), strategy, case["at_work"],
        rate=trial[0], seed=seed, split=split, limits=limits, round_cost_s=cell.round_cost_s,
        **more,
    )  # fmt: skip
    curve, metrics = found["curve"], found["metrics"]
    if is_yardstick:
        end = int(np.searchsorted(curve["examples"], most / LONG))
        windows = [given["window"]] if "window" in given else WINDOWS
        ends = {w: float(np.mean(curve[f"all/{w}"][max(0, end - SMOOTHED) : end])) for w in windows}
        limits_found = {"virtual_s": curve["virtual_s"][-1], "end": max(ends.values())}
        return {"metrics": metrics | {"limits": limits_found}, "curve": curve}
    if split == "valid":
        ends = {str(w): round(float(np.mean(curve[f"all/{w}"][-SMOOTHED:])), 4) for w in WINDOWS}
        return {"metrics": metrics | {"scores": scores_of(curve, given["limits"]), "ends": ends}}
    window = case["window"]
    kept = ("virtual_s", "examples", "bytes", "device_s")
    curve = {key: curve[key] for key in kept} | {
        "newest": curve["all/1"], "all": curve[f"all/{window}"], "slow": curve[f"slow/{window}"],
    }  # fmt: skip
    return {"metrics": metrics, "curve": curve}


def fleet_config(case: Case, cell: Cell, data: Data) -> dict[str, Any]:
    """Return the run-config of ``apps/fleet`` for one of ``PARTS``."""
    plain = {"engine": "fedslice", "selection": "all"}
    plain |= {"order": "reshuffle", "sampler": "uniform", "partition": cell.partition}
    return {**plain, "dataset": data.first(cell.rows[0], cell.rows[2]), "model": IN_TORCH,
            **PARTS[case["name"]]}  # fmt: skip


def scores_of(curve: dict[str, list[float]], limits: dict[str, float]) -> dict[str, float]:
    """Return the mean logarithm of the times to the levels, by window; never: twice all time."""
    result = {}
    for window in WINDOWS:
        values = curves.smooth(curve[f"all/{window}"], SMOOTHED)[SMOOTHED - 1 :]
        times = []
        for level in LEVELS:
            place = curves.reached(values, limits["end"] + level)
            never = 2 * limits["virtual_s"]
            at_s = never if np.isnan(place) else curve["virtual_s"][int(place) + SMOOTHED - 1]
            times.append(log(max(at_s, 1e-9)))
        result[str(window)] = round(float(np.mean(times)), 4)
    return result
