"""Samplers at equal compute: time to uniform sampling's final accuracy.

Every method takes the grid's best learning rate on held-out training examples, by one development
seed. A step costs its fixed part and so much per example, as the price runs measured it.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_hetero.sampler import BatchSampler, MercurySampler, UniformSampler
from flwr_hetero_studies.core import alone
from flwr_hetero_studies.core.curves import columns
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line, of
from flwr_hetero_studies.samplers.tasks import TASKS, SamplerTask, make_data, split
from flwr_hetero_studies.tasks import evaluate, make_model

SETTINGS = {"rows": 20000, "epochs": 16, "evaluations": 20}
FAST = {"rows": 300, "epochs": 3, "evaluations": 3}
FAST_CASES = ["price/*", "grid/*", "race/*"]
DEVELOPMENT = 100
REPEATS, LEAST_REPEATS, TURN, LIMIT_S = 40, 3, 8, 60.0
"""Turns of the price runs, fewer where they take longer, and steps in a turn."""
HORIZON = 64
"""Steps until the averaged model, which is renewed every 8 steps, begins to average."""

Make = Callable[[int, int, int], BatchSampler]
METHODS: dict[str, Make] = {
    "uniform": lambda num, size, seed: UniformSampler(num, size, seed=seed),
    "half batches": lambda num, size, seed: UniformSampler(num, size // 2, seed=seed),
    "double batches": lambda num, size, seed: UniformSampler(num, 2 * size, seed=seed),
    "mercury": lambda num, size, seed: MercurySampler(num, size, seed=seed, scores="loss"),
}
BASE, AGAIN, LAST = "uniform", "uniform, other draws", "uniform, rate for the last model"
"""What gains are over; the same with another seed: what chance does to a gain; and at the rate with
which the last model is best, where that is another one."""
ANOTHER: dict[str, Make] = {
    AGAIN: lambda num, size, seed: METHODS[BASE](num, size, seed + 500),
    LAST: METHODS[BASE],
}


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield prices first, then the grid, then the race with what the grid found best."""
    for name, task in TASKS.get(options.data, {}).items():
        case = {"experiment": "price", "name": name}
        yield Trial(case | {"model": task.model, "batch-size": task.size}, alone=True)
        if found := of(lines, **case):
            yield from plan_task(name, task, options, lines, found[0])


def plan_task(
    name: str, task: SamplerTask, options: Options, lines: list[Line], price: Line
) -> Iterator[Trial]:
    """Yield a task's grid, unless there is nothing to choose, and its race."""
    own, known = settings_of(name, options), settings_of(task.tuned_on or name, options)
    for method in METHODS:
        given = {"fixed": fixed_share(price), "own": own_share(price, method)}
        tried = of(lines, experiment="grid", name=method, **known)
        for rate in task.rates if own == known else ():
            case = {"experiment": "grid", "name": method, "rate": rate}
            yield Trial(case | own, DEVELOPMENT, given)
        if len(tried) < len(task.rates):
            continue
        # held-out training examples decide, never the test set
        best = {method: best_rate(tried, "averaged")}
        if method == BASE:
            best |= {AGAIN: best[BASE], LAST: best_rate(tried, "accuracy")}
        for each, rate in best.items():
            # else it is the base
            if each != LAST or rate != best[BASE]:
                for seed in options.seeds_or(range(task.seeds)):
                    case = {"experiment": "race", "name": each, "rate": rate}
                    yield Trial(case | own, seed, given)


def best_rate(tried: list[Line], readout: str) -> float:
    return float(max(tried, key=lambda line: final(line, readout))["case"]["rate"])


def settings_of(name: str, options: Options) -> Case:
    task = TASKS[options.data][name]
    shared = {"task": name, "model": task.model, "batch-size": task.size, **options.settings}
    return shared if options.fast else shared | task.settings


def final(line: Line, readout: str) -> float:
    return float(np.mean(line["curve"][readout][-3:]))


def fixed_share(line: Line) -> float:
    """Return the part of a full step's time that does not fall with its examples."""
    m = line["metrics"]
    return float(np.clip(2.0 * m["half_step_ms"] / m["step_ms"] - 1.0, 0.0, 1.0))


def own_share(line: Line, name: str) -> float:
    """Return the time of drawing and learning, beyond uniform sampling's, in steps."""
    m = line["metrics"]
    return max(0.0, float(m[f"{name}_ms"] - m["uniform_ms"])) / float(m["step_ms"])


def run(case: Case, seed: int, data: Data, **given: Any) -> dict[str, Any]:
    if case["experiment"] == "price":
        return {"metrics": price(case, data)}
    return race(case, seed, data, **given)


def race(case: Case, seed: int, data: Data, fixed: float = 1.0, own: float = 0.0) -> dict[str, Any]:
    """Train for as long as uniform sampling takes for its epochs, in priced steps."""
    train, test = make_data(case, seed, data)
    shape, classes = tuple(train.inputs.shape[1:]), int(test.targets.max()) + 1
    model, averaged = (make_model(case["model"], shape, classes, seed) for _ in range(2))
    size, sizes = case["batch-size"], list[int]()
    sampler = (METHODS | ANOTHER)[case["name"]](len(train), size, seed)

    def learn(worker: int, indices: NDArray[np.int64], losses: Tensor) -> None:
        sampler.update(indices, losses.double().numpy())
        sizes.append(len(indices))

    optimizer = torch.optim.SGD(model.parameters(), case["rate"])
    taken = alone.steps(model, [train], [sampler], optimizer, observe=learn)
    total, points = case["epochs"] * len(train) / size, list[dict[str, float]]()
    spent, examples = 0.0, 0
    # what has diverged stays as it is, and goes on costing
    for steps, _ in enumerate(chain(taken, repeat(inf)), 1):
        # a step's fixed part, its examples, and the sampler's own work
        spent += own + fixed + (1.0 - fixed) * sizes[-1] / size
        examples += sizes[-1]
        if steps % 8 == 0:
            average(averaged, model, min(1.0, HORIZON / (steps + HORIZON)))
        if spent >= (len(points) + 1) * total / case["evaluations"]:
            last, mean = (evaluate(each, test, 2000)[1] for each in (model, averaged))
            points.append({"cost": spent / total, "accuracy": last, "averaged": mean})
        if spent >= total:
            break
    metrics = {"final": last, "averaged": mean, "examples_a_step": examples / steps}
    return {"metrics": metrics, "curve": columns(points)}


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, weight: float) -> None:
    for old, new in zip(averaged.parameters(), model.parameters(), strict=True):
        old.lerp_(new, weight)


def price(case: Case, data: Data) -> dict[str, float]:
    """Measure step, half a step, forward pass and each sampler, in turns, in CPU time."""
    train, _ = split(data.source, SETTINGS["rows"])
    shape, classes = tuple(train.inputs.shape[1:]), int(train.targets.max()) + 1
    model = make_model(case["model"], shape, classes, 0)
    optimizer, size = torch.optim.SGD(model.parameters(), 0.01), case["batch-size"]
    rng, ones = np.random.default_rng(0), np.ones(size)

    def forward() -> None:
        inputs, targets = train.take(rng.integers(len(train), size=size))
        with torch.no_grad():
            cross_entropy(model(inputs), targets, reduction="none")

    def step(count: int) -> None:
        optimizer.zero_grad()
        chosen = rng.integers(len(train), size=count)
        alone.weighted_backward(model, train, chosen, ones[:count])
        optimizer.step()

    def draw(sampler: BatchSampler) -> None:
        indices, _ = sampler.next_batch()
        sampler.update(indices, 0.01 + 3.0 * (indices % 10 == 0))

    actions: dict[str, Callable[[], Any]] = {"step_ms": partial(step, size)}
    actions |= {"half_step_ms": partial(step, size // 2), "forward_ms": forward}
    for name, make in METHODS.items():
        actions[f"{name}_ms"] = partial(draw, make(len(train), size, 0))
    times: dict[str, list[float]] = {name: [] for name in actions}
    began_s = time.thread_time()
    for turn in range(REPEATS):
        if turn >= LEAST_REPEATS and time.thread_time() - began_s > LIMIT_S:
            break
        for name, action in actions.items():
            start_s = time.thread_time()
            # some steps at a time: one is too short for the clock
            for _ in range(TURN):
                action()
            times[name].append(1000.0 * (time.thread_time() - start_s) / TURN)
    return {name: float(np.median(each)) for name, each in times.items()}
