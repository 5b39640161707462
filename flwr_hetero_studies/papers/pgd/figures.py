"""Figures 6 to 11: the ratios k and r, aggressive updates, convergence and scaling.

The paper's x-axes are seconds; here they count gradients of examples, first pass included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np

from flwr_hetero_studies.core.curves import Columns, time_to
from flwr_hetero_studies.core.experiment import Claim, Finding, times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd.tasks import of_figure
from flwr_hetero_studies.papers.pgd.workers import (
    PAPER,
    PGD_A,
    PGD_S,
    SGD,
    Ratios,
    at_best_rate,
    final,
    jumps,
    train,
)

RATES = (0.03, 0.1, 0.3)
"""Learning rates tried; the paper gives none."""
LR = 0.1
"""Of the experiments on k and r."""
TRIED = (0.001, 0.01, 0.05, 0.1, 0.3)
HEAD = ["k", "r", "loss at the end", "rises / first loss", "gradients"]
Pairs = Mapping[tuple[float, float], Columns]
"""Curves of PGD-A by k and r."""


def eased(curve: Columns) -> list[float]:
    """Average each loss with its neighbours, of which the first and the last have one."""
    losses = curve["loss"]
    return [float(np.mean(losses[max(0, i - 1) : i + 2])) for i in range(len(losses))]


def work_to(curve: Columns, goal: float, unit: str = "work") -> float:
    """Return the gradients, or steps, that it took to get to a loss; infinite if it never did."""
    return time_to(curve[unit], eased(curve), goal, below=True)


def part_of(curve: Columns, part: float) -> float:
    losses = eased(curve)
    return losses[round(part * (len(losses) - 1))]


def gain(own: Sequence[Columns], base: Sequence[Columns], part: float, unit: str = "work") -> float:
    """How many times less work than SGD, to SGD's loss at a part of its run; over seeds."""
    goals = [part_of(sgd, part) for sgd in base]
    spent = ([work_to(*each, unit) for each in zip(of, goals, strict=True)] for of in (base, own))
    return float(np.median([theirs / ours for theirs, ours in zip(*spent, strict=True)]))


def factor(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}x" if 0 < value < inf else "never"


def percent(ratio: float) -> str:
    return f"{100 * ratio:g}%"


def each_pair(options: Options, model: str, pairs: Sequence[tuple[float, float]]) -> Pairs:
    task, steps, found = of_figure(options, model), options.pick(200, 10_000), {}
    for top, renewal in pairs:
        options.say(f"k = {percent(top)}, r = {percent(renewal)}")
        found[top, renewal] = train(task, PGD_A, Ratios(top, renewal, LR, steps), options.seed)
    return found


def written(found: Pairs) -> list[list[str]]:
    return [
        [percent(top), percent(renewal), f"{final(curve):.4f}", f"{jumps(curve):.3f}",
         f"{curve['work'][-1]:.3g}"]
        for (top, renewal), curve in found.items()
    ]  # fmt: skip


def figure_6(options: Options) -> Finding:
    small, large = 0.001, 0.1
    found = each_pair(options, "lr", [(k, r) for r in (small, large) for k in TRIED])
    diverged, start = final(found[0.001, small]), found[0.001, small]["loss"][0]
    # a loss that both reach, or the slower never gets there
    goal = max(part_of(found[k, large], 1.0) for k in (0.01, 0.3))
    work = [work_to(found[k, large], goal) for k in (0.01, 0.3)]
    rough = [jumps(found[k, large]) for k in (0.001, 0.3)]
    claims = [
        Claim("with r = 0.1% a small k (0.1%) diverges: the loss ends above its start",
              "diverges", f"{diverged:.3f} from {start:.3f}", diverged > start),
        Claim("with r = 10% a large k is slower: k = 30% needs more gradients than k = 1% to the "
              "last loss that both reach", "slower",
              f"{work[1]:.3g} against {work[0]:.3g}", work[1] > work[0]),
        Claim("with r = 10% a too small k bumps: k = 0.1% rises more than k = 30%", "big bumps",
              f"{rough[0]:.4f} against {rough[1]:.4f}", rough[0] > rough[1]),
    ]  # fmt: skip
    return Finding(HEAD, written(found), claims)


def figure_7(options: Options) -> Finding:
    small, large = 0.01, 0.1
    found = each_pair(options, "lr", [(k, r) for k in (small, large) for r in TRIED])
    ends = {k: [final(found[k, r]) for r in TRIED] for k in (small, large)}
    rough = [jumps(found[small, r]) for r in TRIED]
    middle = ends[large][1:-1]
    claims = [
        Claim("with k = 1% the curve is the stabler the larger r: r = 0.1% rises more than r = 30%",
              "stabler", f"{rough[0]:.4f} against {rough[-1]:.4f}", rough[0] > rough[-1]),
        Claim("and ends the lower the larger r, from each to the next", "lower",
              ", ".join(f"{end:.4f}" for end in ends[small]),
              all(b < a for a, b in pairwise(ends[small]))),
        Claim("with k = 10% r hardly matters, extremes apart: for 1 to 10% the losses at the end "
              "are within a factor of 1.25", "slightly",
              ", ".join(f"{end:.4f}" for end in middle), max(middle) <= 1.25 * min(middle)),
    ]  # fmt: skip
    return Finding(HEAD, written(found), claims)


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of r in k + r."""
BOTH = 0.02
"""k + r."""


def sides(measure: Callable[[Columns], float], found: Pairs) -> tuple[float, float]:
    values = [measure(curve) for curve in found.values()]
    return float(np.mean(values[-2:])), float(np.mean(values[:2]))


def figure_8(options: Options) -> Finding:
    pairs = [(BOTH * (1 - share), BOTH * share) for share in SHARES]
    rows, claims, bumps = list[list[str]](), list[Claim](), list[tuple[float, float]]()
    for model in ("LR", "CNN"):
        found = each_pair(options, model.lower(), pairs)
        rows += [[model, *row[:-1]] for row in written(found)]
        less, more = sides(final, found)
        bumps.append(sides(jumps, found))
        claims.append(Claim(f"{model}: with r > k the loss ends lower than with r < k", "lower",
                            f"{less:.4f} against {more:.4f}", less < more))  # fmt: skip
    less, more = bumps[0]
    claims.append(Claim("LR: with r < k it bumps more", "drastically",
                        f"{more:.4f} against {less:.4f}", more > less))  # fmt: skip
    return Finding(["model", *HEAD[:-1]], rows, claims)


def figure_9(options: Options) -> Finding:
    task, renewals = of_figure(options, "cnn"), (0.005, 0.01, 0.02)
    settings, found = Ratios(0.01, 0.0, LR, options.pick(200, 5000)), {}
    for renewal in renewals:
        for method in (PGD_A, PGD_S):
            options.say(f"{method}, r = {percent(renewal)}")
            own = replace(settings, renewal=renewal)
            found[method, renewal] = train(task, method, own, options.seed)
    # one loss for all r, that the worst has reached at its end
    goal = max(final(found[PGD_A, r]) for r in renewals)
    to_goal = [work_to(found[PGD_A, renewal], goal) for renewal in renewals]
    gains = []
    for renewal in renewals:
        losses = eased(found[PGD_A, renewal])
        half = losses[len(losses) // 2]
        work = [work_to(found[method, renewal], half) for method in (PGD_A, PGD_S)]
        gains.append(work[1] / work[0])
    rows = [
        [method, percent(renewal), f"{final(curve):.4f}", f"{jumps(curve):.3f}"]
        for (method, renewal), curve in found.items()
    ]
    claims = [
        Claim("to the loss at half of its run PGD-A needs at least 1.1 times less work than PGD-S, "
              "with any r", "1.1 to 6 times",
              ", ".join("PGD-S never" if each == inf else factor(each) for each in gains),
              min(gains) >= 1.1),
        Claim("the larger r, the faster PGD-A: less work to one loss from each to the next",
              "yes", ", ".join(f"{work:.3g}" for work in to_goal),
              all(b < a for a, b in pairwise(to_goal))),
    ]  # fmt: skip
    return Finding(["method", *HEAD[1:-1]], rows, claims)


def convergence(options: Options, model: str) -> Finding:
    task = of_figure(options, model)
    settings = Ratios(0.01, 0.01, LR, options.pick(300, 5000))
    seeds = range(options.seed, options.seed + options.pick(1, 3))
    found, rates = {}, {}
    for method in PAPER:
        options.say(f"{model}, {method}: learning rates {', '.join(map(str, RATES))}")
        rates[method], found[method] = at_best_rate(task, method, settings, RATES, seeds)
    parts = (0.1, 0.5, 0.9)
    published = {SGD: "1", PGD_A: "2x to 5x, 1.6x in all", PGD_S: "below 1x late"}
    rows, ends, gains = [], {}, {}
    for method, own in found.items():
        ends[method] = float(np.mean([final(curve) for curve in own]))
        work, steps = ([gain(own, found[SGD], part, unit) for part in parts]
                       for unit in ("work", "step"))  # fmt: skip
        both = (f"{factor(w, 2)} ({factor(s, 2)})" for w, s in zip(work, steps, strict=True))
        rows.append([method, rates[method], f"{ends[method]:.4f}", *both, published[method]])
        gains[method] = work
    early, _, late = gains[PGD_A]
    claims = [
        times("PGD-A is faster at first: to SGD's loss after a tenth of its run", 2, early),
        times("and in all: to SGD's loss at nine tenths of its run", 1.6, late),
        Claim("PGD-S becomes slower than SGD: its loss ends above", "slower",
              f"{ends[PGD_S]:.4f} against {ends[SGD]:.4f}", ends[PGD_S] > ends[SGD]),
        Claim("in the worst case PGD-A is almost like SGD: at most 1.1 of its loss at the end",
              "almost the same", f"{ends[PGD_A] / ends[SGD]:.2f} of it",
              ends[PGD_A] <= 1.1 * ends[SGD]),
    ]  # fmt: skip
    goals = (f"to SGD's at {part:.0%} (in steps)" for part in parts)
    head = ["method", "lr", "loss at the end", *goals, "paper"]
    return Finding(head, rows, claims)


figure_10a = partial(convergence, model="mlp")
figure_10b = partial(convergence, model="cnn")


COSTS = {"mlp": (3.4e-5, 238_510), "cnn": (2.6e-4, 8490)}
"""Seconds per example of a PGD step on one core, as the study pgd measures, and parameters."""
PER_STEP = 1200
"""Examples of a step of all workers: 2 % of 60,000 images."""
LINKS = (10_000.0, 1000.0)
"""Mbit/s of each worker; the first decides."""
FLEETS = (1, 2, 4, 8)


def round_s(model: str, workers: int, link_mbps: float) -> float:
    """Time a step as with the paper's images: its part of the work, the model there and back."""
    seconds, parameters = COSTS[model]
    # section V-E: computing is divided, the exchange is not
    return seconds * PER_STEP / workers + 2 * 32 * parameters / (1e6 * link_mbps)


def figure_11(options: Options) -> Finding:
    rows, best = [], {}
    for model in COSTS:
        options.say(f"{model}: {', '.join(map(str, FLEETS))} workers")
        task, settings = of_figure(options, model), Ratios(0.01, 0.01, LR, options.pick(200, 2000))
        found = [train(task, PGD_A, replace(settings, workers=m), options.seed) for m in FLEETS]
        # what one worker has reached at that part of its steps
        goal = part_of(found[0], 0.6)
        steps = [work_to(curve, goal, "step") for curve in found]
        for link in LINKS:
            seconds = [n * round_s(model, m, link) for n, m in zip(steps, FLEETS, strict=True)]
            speedups = [seconds[0] / each for each in seconds]
            rows.append([model, f"{link:g} Mbit/s", *(f"{value:.1f}x" for value in speedups)])
            if link == LINKS[0]:
                best[model] = speedups[-1]
        rows.append([model, "steps", *(f"{count:.0f}" for count in steps)])
    claims = [
        *(times(f"PGD scales linearly: 8 workers with the {model.upper()}", 8, value)
          for model, value in best.items()),
        Claim("the CNN scales better than the MLP", "yes",
              f"{best['cnn']:.1f}x, {best['mlp']:.1f}x", best["cnn"] > best["mlp"]),
    ]  # fmt: skip
    return Finding(["model", "link", *(f"{n} workers" for n in FLEETS)], rows, claims)
