"""PGD: the paper's figures 1 and 6 to 11, what priorities cost, and what a step costs.

SGD and the biased methods try some learning rates with the first seed, and each keeps to its best
with the others; the unbiased rules run at SGD's.
"""

from collections.abc import Iterator
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, of
from flwr_hetero_studies.papers.pgd import costs, scaling, training
from flwr_hetero_studies.papers.pgd.curves import best_rate, is_unbiased

SETTINGS = {"part": 1.0, "repeats": 5, "turns": 80, "rounds": 60}
"""Part of the training runs' steps; repeats and turns of timings; rounds of the scaling."""
FAST = {"part": 0.1, "repeats": 1, "turns": 2, "rounds": 4}
FAST_CASES = ["fig10/mlp-*", "price/fig10, mlp-synthetic", "cost/mlp", "share/mlp-synthetic",
              "scaling/mlp"]  # fmt: skip
TASKS = {
    "lr-synthetic": (10_000, (0.1, 1.0)),
    "mlp-synthetic": (3000, (0.1, 0.3)),
    "mlp-images": (3000, (0.03, 0.1, 0.3)),
    "cnn-images": (2000, (0.03, 0.1, 0.3)),
}
"""Training examples (the paper has 10,000 synthetic ones), and learning rates that are tried."""
POINTS = {"cnn": 15}
"""Evaluations per run, 30 where not named."""
PAPERS = ("SGD", "PGD-A", "PGD-A, full first pass", "stochastic", "stochastic, no gate")
RACES = {"fig10": 0.01, "late": 0.005}
"""k = r."""


def described(experiment: str, kind: str, method: str, **more: Any) -> Case:
    return {"experiment": experiment, "task": kind, "method": method} | more


def trainings() -> Iterator[Case]:
    """Yield all training runs of one seed, at every learning rate."""
    for kind, (_, rates) in TASKS.items():  # convergence against SGD at equal work
        length = 600 if kind.startswith("mlp") else 300
        methods = (*PAPERS, "PGD-A, last layer") if kind.startswith("mlp") else PAPERS
        for method in methods:
            for lr in rates:
                yield described("fig10", kind, method, top=0.01, renewal=0.01, lr=lr,
                                iterations=length)  # fmt: skip
    for method in PAPERS:  # until the loss is small: where few examples still have a gradient
        for lr in (0.1, 0.3):
            yield described("late", "mlp-images", method, top=0.005, renewal=0.005, lr=lr,
                            iterations=2400)  # fmt: skip
    usual = {"lr": 0.1, "iterations": 300}
    for kind in ("lr-synthetic", "cnn-images"):  # both together fixed at 2 %
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            ratios = {"top": 0.02 * (1 - share), "renewal": 0.02 * share}
            yield described("fig8", kind, "PGD-A", **ratios, **usual)
        yield described("fig8", kind, "SGD", top=0.01, renewal=0.01, **usual)
    for renewal in (0.001, 0.1):  # impact of the top ratio
        for top in (0.001, 0.01, 0.05, 0.1, 0.3):
            yield described("fig6", "lr-synthetic", "PGD-A", top=top, renewal=renewal, **usual)
    for top in (0.01, 0.1):  # impact of the renewal ratio
        for renewal in (0.001, 0.01, 0.05, 0.1, 0.3):
            yield described("fig7", "lr-synthetic", "PGD-A", top=top, renewal=renewal, **usual)


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield all runs that the lines so far allow."""
    every = list(named(options))
    for seed in options.seeds_or(range(3)):
        for case in every:
            if is_wanted(case, seed, every, lines):
                yield Trial(case, seed)
    for experiment, ratio in RACES.items():
        for task in dict.fromkeys(c["task"] for c in every if c["experiment"] == experiment):
            own = [c for c in every if (c["experiment"], c["task"]) == (experiment, task)]
            done = of(lines, experiment=experiment, task=task, method="SGD")
            if len(done) >= sum(c["method"] == "SGD" for c in own):
                case = {"experiment": "price", "name": f"{experiment}, {task}", "race": experiment}
                case |= {"task": task, "samples": own[0]["samples"], "ratio": ratio}
                turns = min(
                    options.settings["turns"], max(2, own[0]["iterations"] // training.TURN)
                )
                methods = tuple(dict.fromkeys(c["method"] for c in own))
                given = {"lr": best_rate(done), "methods": methods, "turns": turns}
                yield Trial(case, 0, given, alone=True)
    for name in costs.MODELS:
        given = {"repeats": options.settings["repeats"], "memory": not options.fast}
        yield Trial({"experiment": "cost", "name": name, "batch": costs.MODELS[name][2]}, 0, given,
                  alone=True)  # fmt: skip
    for kind in ("mlp-synthetic", "mlp-images"):
        task = kind.replace("images", options.data)
        given = {"most": round(max(training.ITERATIONS) * options.settings["part"])}
        yield Trial({"experiment": "share", "name": task, "samples": 3000, "lr": 0.1}, 0, given)
    for seed in options.seeds_or([0, 1]):
        for model in ("mlp", "cnn"):
            case = {"experiment": "scaling", "name": model, "data": options.data, "samples": 3000}
            yield Trial(case | {"rounds": options.settings["rounds"]}, seed)


def named(options: Options) -> Iterator[Case]:
    """Complete the training runs by the data set and the settings."""
    for case in trainings():
        task = case["task"].replace("images", options.data)
        iterations = round(case["iterations"] * options.settings["part"])
        rest = {"samples": TASKS[case["task"]][0], "iterations": iterations, "task": task}
        yield case | rest | {"name": f"{task}, {case['method']}"}


def is_wanted(case: Case, seed: int, every: list[Case], lines: list[Line]) -> bool:
    """Return whether a run is at a rate to be tried, or at the best one as far as it is known."""
    same = ("experiment", "task", "top", "renewal", "samples", "iterations")
    key = {name: case[name] for name in same}
    unbiased = is_unbiased(case["method"])
    if seed == 0 and not unbiased:
        return True
    method = "SGD" if unbiased else case["method"]
    tried = {c["lr"] for c in every if key.items() <= c.items() and c["method"] == method}
    done = [line for line in of(lines, method=method, **key) if line["seed"] == 0]
    return {line["case"]["lr"] for line in done} >= tried and case["lr"] == best_rate(done)


def run(case: Case, seed: int, data: Data, **given: Any) -> dict[str, Any]:
    """Run a case of any kind."""
    if case["experiment"] == "cost":
        return {"metrics": costs.measure(case["name"], **given)}
    if case["experiment"] == "scaling":
        source = data.first(case["samples"], 100)
        every = 5 if case["rounds"] >= 20 else 1
        rows = scaling.measure(source, case["name"], seed, case["rounds"], every)
        return {"metrics": {"rows": rows, "ms_per_example": 1e3 * scaling.SECONDS_PER_EXAMPLE}}
    if case["experiment"] == "share":
        task = training.make_task(case["name"], case["samples"], data)
        return {"metrics": {"looks": training.shares(task, case["lr"], **given)}}
    task = training.make_task(case["task"], case["samples"], data)
    if case["experiment"] == "price":
        names, lr, turns = given["methods"], given["lr"], given["turns"]
        return {"metrics": {"methods": training.prices(task, names, case["ratio"], lr, turns)}}
    keys = ("top", "renewal", "lr", "iterations")
    points = POINTS.get(case["task"].split("-")[0], 30)
    settings = {key: case[key] for key in keys}
    curve = training.train(task, case["method"], points=points, seed=seed, **settings)
    end = curve["loss"][-1] if curve["loss"] else float("nan")
    return {"metrics": {"loss": end}, "curve": curve}
