"""PGD against SGD at equal work: races on one node, what a step and what priorities cost.

SGD and the biased methods keep to the learning rate that was best with the first seed; the
unbiased rule runs at SGD's.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flwr_hetero_studies.core.alone import steps
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, of
from flwr_hetero_studies.papers.pgd import costs
from flwr_hetero_studies.papers.pgd.gains import best_rate
from flwr_hetero_studies.papers.pgd.tasks import Problem, of_race
from flwr_hetero_studies.papers.pgd.workers import (
    DRAWN,
    LAST_LAYER,
    PGD_A,
    SGD,
    SPREAD,
    Ratios,
    begin,
    train,
)

SETTINGS = {"part": 1.0, "repeats": 5, "turns": 80}
"""Part of the training runs' steps; repeats and turns of timings."""
FAST = {"part": 0.1, "repeats": 1, "turns": 2}
FAST_CASES = ["fig10/mlp-*", "price/fig10, mlp-synthetic", "cost/mlp"]
TASKS = {
    "lr-synthetic": (10_000, (0.1, 1.0), 300),
    "mlp-synthetic": (3000, (0.1, 0.3), 600),
    "mlp-images": (3000, (0.03, 0.1, 0.3), 600),
    "cnn-images": (2000, (0.03, 0.1, 0.3), 300),
}
"""Training examples (the paper has 10,000 synthetic ones), learning rates tried, steps."""
METHODS = (SGD, SPREAD, PGD_A, DRAWN)
RACES = {"fig10": 0.01, "late": 0.005}
"""k = r; ``late`` until the loss is small, where few examples still have a gradient."""
TURN = 30
"""Steps of each method in a turn, when their prices are measured."""


def races(options: Options) -> Iterator[Case]:
    """Yield all training runs of one seed, at every learning rate."""
    entries = [("fig10", kind, *rest) for kind, rest in TASKS.items()]
    entries.append(("late", "mlp-images", 3000, (0.1, 0.3), 2400))
    for experiment, kind, samples, rates, length in entries:
        task, ratio = kind.replace("images", options.data), RACES[experiment]
        more = (LAST_LAYER,) if experiment == "fig10" and kind.startswith("mlp") else ()
        case = {"experiment": experiment, "task": task, "top": ratio, "renewal": ratio}
        case |= {"samples": samples, "iterations": round(length * options.settings["part"])}
        for method in (*METHODS, *more):
            for lr in rates:
                yield case | {"method": method, "lr": lr, "name": f"{task}, {method}"}


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    every = list(races(options))
    for seed in options.seeds_or(range(3)):
        yield from (Trial(case, seed) for case in every if is_wanted(case, seed, every, lines))
    own: dict[tuple[str, str], list[Case]] = {}
    for case in every:
        own.setdefault((case["experiment"], case["task"]), []).append(case)
    for (race, task), cases in own.items():
        done = of(lines, experiment=race, task=task, method=SGD)
        # prices are taken at SGD's best rate
        if len(done) >= sum(case["method"] == SGD for case in cases):
            case = {"experiment": "price", "name": f"{race}, {task}", "race": race, "task": task}
            case |= {"samples": cases[0]["samples"], "ratio": RACES[race]}
            turns = min(options.settings["turns"], max(2, cases[0]["iterations"] // TURN))
            methods = tuple(dict.fromkeys(each["method"] for each in cases))
            given = {"lr": best_rate(done), "methods": methods, "turns": turns}
            yield Trial(case, 0, given, alone=True)
    for name, (*_, batch) in costs.MODELS.items():
        case = {"experiment": "cost", "name": name, "batch": batch}
        yield Trial(case, 0, {"repeats": options.settings["repeats"]}, alone=True)


def is_wanted(case: Case, seed: int, every: list[Case], lines: list[Line]) -> bool:
    """Return whether a run is at a rate to be tried, or at the best one as far as it is known."""
    key = {name: value for name, value in case.items() if name not in ("method", "lr", "name")}
    if seed == 0 and case["method"] != DRAWN:
        return True
    key["method"] = SGD if case["method"] == DRAWN else case["method"]
    tried = {other["lr"] for other in every if key.items() <= other.items()}
    done = [line for line in of(lines, **key) if line["seed"] == 0]
    return {line["case"]["lr"] for line in done} >= tried and case["lr"] == best_rate(done)


def run(case: Case, seed: int, data: Data, **given: Any) -> dict[str, Any]:
    if case["experiment"] == "cost":
        return {"metrics": costs.measure(case["name"], **given)}
    task = of_race(case["task"], case["samples"], data)
    if case["experiment"] == "price":
        ratios = Ratios(case["ratio"], case["ratio"], given["lr"], 0, workers=0)
        return {"metrics": {"methods": prices(task, ratios, given["methods"], given["turns"])}}
    settings = Ratios(case["top"], case["renewal"], case["lr"], case["iterations"], workers=0)
    found = train(task, case["method"], settings, seed, 15 if "cnn" in case["task"] else 30)
    columns = {"iteration": found["step"], "loss": found["loss"]}
    curve = {name: [float(f"{v:.5g}") for v in column] for name, column in columns.items()}
    return {"metrics": {"loss": curve["loss"][-1]}, "curve": curve}


def prices(
    task: Problem, settings: Ratios, methods: Sequence[str], turns: int
) -> dict[str, dict[str, float]]:
    """Train all methods in turns; a price is CPU time over SGD's in the same turn.

    It is taken after the first epoch: the mean of the medians of each quarter of the run.
    """
    runs, seconds, ready = {}, {name: list[float]() for name in methods}, {}
    for name in methods:
        # the first time loads kernels and rules
        for _ in range(2):
            start = time.process_time()
            runs[name] = steps(**begin(task, name, settings, 0))
            ready[name] = time.process_time() - start
    for _ in range(turns):
        for name, taken in runs.items():
            start = time.process_time()
            for _ in range(TURN):
                next(taken)
            seconds[name].append(time.process_time() - start)
    # in the first epoch examples come in turn, but for the full first pass
    epoch = min(-(-round(0.5 / settings.top) // TURN), turns - 1)
    base, found = np.array(seconds[SGD]), {}
    for name, times in seconds.items():
        ratios = (np.array(times) / base)[epoch:]
        quarters = [float(np.median(part)) for part in np.array_split(ratios, 4) if len(part)]
        start = ready[name] / float(np.median(base)) * TURN if name == PGD_A else 0.0
        found[name] = {"start": start, "price": float(np.mean(quarters))}
    return found
