"""Figures 1 and 5: what priorities look like while SGD trains."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.pgd.algorithm import top_share
from flwr_hetero.pgd.priorities import all_priorities
from flwr_hetero_studies.core import alone
from flwr_hetero_studies.core.criteria import PAIRS, about, made, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd.tasks import Problem, each_loss, of_figure
from flwr_hetero_studies.papers.pgd.workers import AT_A_TIME
from flwr_hetero_studies.tasks import Examples, evaluate

TOPS = {0.005: 0.05, 0.01: 0.08, 0.02: 0.15, 0.05: 0.32}
"""Top share of the examples, and its part of the loss decrease in the paper."""
LOOKS = (0, 10, 50, 200)
SMALL_STEP = 1e-3
"""Learning rate of the steps that are measured: small enough for the first order to hold."""
LR = 0.1
"""The paper gives none."""


def while_training(task: Problem, steps: int, seed: int) -> Iterator[tuple[int, nn.Module]]:
    """Train with SGD on 2 % of the data a step; yield the model before each step and at the end."""
    model = task.make_model(seed)
    count = len(task.examples)
    sampler = UniformSampler(count, max(1, round(0.02 * count)), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    taken = alone.steps(model, [task.examples], [sampler], optimizer)
    for step in range(steps):
        yield step, model
        next(taken)
    yield steps, model


def priorities_of(model: nn.Module, examples: Examples) -> tuple[Vector, dict[str, Tensor]]:
    """Compute all priorities exactly, and the sum of all gradients."""
    return all_priorities(model, each_loss, examples.inputs, examples.targets, batch_size=AT_A_TIME)


class TopParts(NamedTuple):
    """Shares of the top examples at an iteration."""

    negative: float
    """Share of all examples whose priority is below 0."""
    of_decrease: list[float]
    of_priorities: list[float]


def look_at(model: nn.Module, examples: Examples) -> TopParts:
    """Compare the loss decrease of a small step on the top alone with that on all."""
    priorities, total = priorities_of(model, examples)
    whole = decrease(model, examples, total)
    order = np.argsort(-priorities)
    parts = []
    for top in TOPS:
        # Figure 1b: a step on these alone
        chosen = order[: max(1, round(top * len(order)))]
        some = Examples(examples.inputs[chosen], examples.targets[chosen])
        parts.append(decrease(model, examples, priorities_of(model, some)[1]) / whole)
    shares = [top_share(priorities, top) for top in TOPS]
    return TopParts(float((priorities < 0).mean()), parts, shares)


@torch.no_grad()
def decrease(model: nn.Module, examples: Examples, gradient: dict[str, Tensor]) -> float:
    """Return by how much a small step along a gradient lowers the loss; the step is undone."""
    before = evaluate(model, examples, AT_A_TIME)[0]
    state = copy.deepcopy(model.state_dict())
    # Eq. 6: to the first order the loss falls by the step times the priorities
    for name, p in model.named_parameters():
        p.sub_(gradient[name], alpha=SMALL_STEP / len(examples))
    after = evaluate(model, examples, AT_A_TIME)[0]
    model.load_state_dict(state)
    return before - after


def looks_of_seed(task: Problem, doubled: Examples, seed: int) -> list[TopParts]:
    looks = []
    for step, model in while_training(task, LOOKS[-1], seed):
        if step in LOOKS:
            # single precision would lose the decrease of a small step
            looks.append(look_at(model.double(), doubled))
            model.float()
    return looks


def figure_1(options: Options) -> Finding:
    task = of_figure(options, "mlp-100")
    doubled = Examples(task.examples.inputs.double(), task.examples.targets)
    every: list[list[TopParts]] = []
    for seed in options.seeds_or(range(PAIRS)):
        options.say(f"seed {seed}")
        every.append(looks_of_seed(task, doubled, seed))
    # seeds, looks, tops
    decreases = np.array([[look.of_decrease for look in looks] for looks in every])
    sums = np.array([[look.of_priorities for look in looks] for looks in every])
    negative = np.mean([[look.negative for look in looks] for looks in every], axis=0)
    rows = []
    for number, step in enumerate(LOOKS):
        both = zip(decreases[:, number].mean(0), sums[:, number].mean(0), strict=True)
        cells = (f"{part:.1%} ({whole:.1%})" for part, whole in both)
        rows.append([step, f"{negative[number]:.0%}", *cells])
    rows.append(["50, paper", "", *(f"{part:.0%}" for part in TOPS.values())])
    at_50 = LOOKS.index(50)
    error = float(np.max(np.abs(decreases / sums - 1)[:, at_50]))
    claims = [
        *(
            about(f"at iteration 50 the top {top:.1%} make up this part of the loss decrease",
                  paper, parts, ".3f")
            for (top, paper), parts in zip(TOPS.items(), decreases[:, at_50].T, strict=True)
        ),
        within("a small top contributes much: at any time at least twice its share of the data",
               "6.4 to 10 times", (decreases / [*TOPS]).min(axis=(1, 2)), low=2, form=".2f"),
        made("priorities tell the loss decrease (Eq. 6): within 10 %", "yes",
             f"off by at most {error:.1%}", error <= 0.1),
    ]  # fmt: skip
    head = ["iteration", "negative", *(f"top {top:.1%}" for top in TOPS)]
    return Finding(head, rows, claims)


STEPS = 100
EVERY = 2
"""Iterations between two looks at the priorities."""
FALLING = 5
"""The look from which on (iteration 10) the paper has straight lines that fall."""


def figure_5(options: Options) -> Finding:
    rows = []
    every = []
    for name in ("mlp", "cnn"):
        task = of_figure(options, name)
        falls = []
        for seed in options.seeds_or(range(PAIRS)):
            options.say(f"{name}, seed {seed}")
            models = while_training(task, STEPS, seed)
            looks = [priorities_of(m, task.examples)[0] for step, m in models if step % EVERY == 0]
            falls.append(Fall.of(np.array(looks)))
        every.append(np.array(falls))
        early, late, positive, line = every[-1].mean(0)
        rows.append([name, f"{early:.3f}", f"{late:.3f}", f"{positive:.0%}", f"{line:.2f}"])
    claims = [
        within("priorities change drastically in the first iterations: ln |p| at least twice as "
               "fast before iteration 10 as after", "yes", *(f[:, 0] / f[:, 1] for f in every),
               low=2, form=".1f", unit="x"),
        within("then they are linear in log scale: a line explains half of the variance of ln |p| "
               "of the median example", "yes", *(f[:, 3] for f in every), low=0.5, form=".2f"),
        within("and positive, for Eq. 11 takes their logarithm: 95 % of all", "all",
               *(f[:, 2] for f in every), low=0.95, form=".2f"),
    ]  # fmt: skip
    head = ["model", "change of ln |p| an iteration, to 10", "after", "positive", "line explains"]
    return Finding(head, rows, claims)


class Fall(NamedTuple):
    """How priorities (looks, examples) change: medians over the examples."""

    early: float
    late: float
    positive: float
    line: float
    """Share of the variance of ln |p| over time that a straight line explains."""

    @classmethod
    def of(cls, values: Vector) -> "Fall":
        # Eq. 11 takes logarithms of what is negative for many
        logs = np.log(np.abs(values) + 1e-300)
        change = np.abs(np.diff(logs, axis=0)) / EVERY
        early, late = (float(np.median(part)) for part in (change[:FALLING], change[FALLING:]))
        return cls(early, late, float((values > 0).mean()), explained(logs[FALLING:]))


def explained(logs: Vector) -> float:
    """Return the share of the variance (looks, examples) that a line explains: the median."""
    x = np.arange(len(logs)) - (len(logs) - 1) / 2
    centred = logs - logs.mean(axis=0)
    slopes = x @ centred / (x @ x)
    left = np.square(centred - x[:, None] * slopes).sum(axis=0)
    return float(np.median(1 - left / np.maximum(np.square(centred).sum(axis=0), 1e-300)))
