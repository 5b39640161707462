"""Figures 6 to 11: the ratios k and r, aggressive updates, convergence and scaling.

The x-axes of the paper are seconds; here they count gradients of examples, those of the first pass
included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from flwr_hetero_studies.core.criteria import (
    PAIRS,
    Claim,
    at_scale,
    falls,
    higher,
    made,
    times,
    within,
)
from flwr_hetero_studies.core.curves import Columns, Vector, time_to
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd.tasks import Problem, of_figure
from flwr_hetero_studies.papers.pgd.workers import (
    AUTHORS,
    PGD_A,
    PGD_S,
    SGD,
    Ratios,
    best_rate,
    final,
    jumps,
    train,
)

RATES = (0.03, 0.1, 0.3)
"""Learning rates of SGD; the paper gives none, the authors' code has one for all methods."""
LR = 0.1
"""Learning rate of the experiments on k and r."""
STEEP = 1.0
"""Learning rate of Figure 6: at a tenth of it nothing can diverge on its convex problem."""
LOW = 0.01
"""A rate at which longer steps are better steps, as the authors' 0.001 is for their lengths."""
TRIED = (0.001, 0.01, 0.05, 0.1, 0.3)
HEAD = ["k", "r", "loss at the end", "rises / first loss", "gradients"]
Curves = Sequence[Columns]
"""One of each seed."""
Pairs = Mapping[tuple[float, float], Curves]
"""Curves of PGD-A by k and r."""


def each_seed(measure: Callable[[Columns], float], curves: Curves) -> Vector:
    return np.array([measure(curve) for curve in curves])


def eased(curve: Columns) -> list[float]:
    """Average each loss with its neighbours; the first and the last loss have one."""
    losses = curve["loss"]
    return [float(np.mean(losses[max(0, i - 1) : i + 2])) for i in range(len(losses))]


def work_to(curve: Columns, goal: float, unit: str = "work") -> float:
    """Return the gradients, or steps, until a loss is reached; infinite if it never is."""
    return time_to(curve[unit], eased(curve), goal, below=True)


def part_of(curve: Columns, part: float) -> float:
    losses = eased(curve)
    return losses[round(part * (len(losses) - 1))]


def gains(curves: Curves, base: Curves, part: float, unit: str = "work") -> Vector:
    """How many times less work than SGD, to SGD's loss at a part of its run, of each seed."""
    ratios = []
    for curve, sgd in zip(curves, base, strict=True):
        goal = part_of(sgd, part)
        ratios.append(work_to(sgd, goal, unit) / work_to(curve, goal, unit))
    return np.array(ratios)


def factor(value: float) -> str:
    return f"{value:.2f}x" if 0 < value < inf else "never"


def percent(ratio: float) -> str:
    return f"{100 * ratio:g}%"


def runs_of(options: Options, task: Problem, method: str, settings: Ratios) -> Curves:
    ratios = f"k = {percent(settings.top)}, r = {percent(settings.renewal)}"
    options.say(f"{method}, {ratios}, lr {settings.lr:g}")
    return [train(task, method, settings, seed) for seed in options.seeds_or(range(PAIRS))]


def each_pair(
    options: Options, model: str, pairs: Sequence[tuple[float, float]], lr: float = LR
) -> Pairs:
    task = of_figure(options, model)
    steps = options.pick(200, 10_000)
    return {pair: runs_of(options, task, AUTHORS, Ratios(*pair, lr, steps)) for pair in pairs}


def ends_of(curves: Curves) -> list[str]:
    """Write the mean loss at the end, and the mean of the rises."""
    losses = each_seed(final, curves)
    rises = each_seed(jumps, curves)
    return [f"{losses.mean():.4f}", f"{rises.mean():.3f}"]


def written(curves_by_pair: Pairs) -> list[list[str]]:
    return [
        [percent(top), percent(renewal), *ends_of(curves), f"{curves[0]['work'][-1]:.3g}"]
        for (top, renewal), curves in curves_by_pair.items()
    ]


def figure_6(options: Options) -> Finding:
    small = 0.001
    large = 0.1
    runs = each_pair(options, "lr", [(k, r) for r in (small, large) for k in TRIED], STEEP)
    diverged = [final(curve) - curve["loss"][0] for curve in runs[0.001, small]]
    slower = []
    for curves in zip(runs[0.01, large], runs[0.3, large], strict=True):
        # a loss that both reach, or the slower one never does
        goal = max(part_of(curve, 1.0) for curve in curves)
        slower.append(work_to(curves[1], goal) / work_to(curves[0], goal))
    rough = [each_seed(jumps, runs[k, large]) for k in (0.001, 0.3)]
    claims = [
        higher("with r = 0.1% a small k (0.1%) diverges: the loss ends above its start",
               "diverges", diverged, form="+.3f"),
        higher("with r = 10% a large k is slower: k = 30% needs more gradients than k = 1% to the "
               "last loss that both reach (logarithm)", "slower", np.log(slower)),
        higher("with r = 10% a too small k bumps: k = 0.1% rises more than k = 30%", "big bumps",
               rough[0] - rough[1], form="+.4f"),
    ]  # fmt: skip
    return Finding(HEAD, written(runs), claims)


def figure_7(options: Options) -> Finding:
    small = 0.01
    large = 0.1
    runs = each_pair(options, "lr", [(k, r) for k in (small, large) for r in TRIED])
    ends = {k: [each_seed(final, runs[k, r]) for r in TRIED] for k in (small, large)}
    rough = [each_seed(jumps, runs[small, r]) for r in TRIED]
    middle = np.array(ends[large][1:-1])
    claims = [
        higher("with k = 1% the curve is the stabler the larger r: r = 0.1% rises more than r = "
               "30%", "stabler", rough[0] - rough[-1], form="+.4f"),
        falls("and ends the lower the larger r, from each to the next", "lower",
              {f"{percent(r)}:": end for r, end in zip(TRIED, ends[small], strict=True)}, ".4f"),
        within("with k = 10% r hardly matters, extremes apart: for 1 to 10% the losses at the end "
               "are within a factor of 1.25", "slightly", middle.max(0) / middle.min(0),
               high=1.25, form=".2f"),
    ]  # fmt: skip
    return Finding(HEAD, written(runs), claims)


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of r in k + r."""
BOTH = 0.02
"""k + r."""


def more_below(measure: Callable[[Columns], float], runs: Pairs) -> Vector:
    """Return by how much a measure is larger where r < k than where r > k, of each seed."""
    values = [each_seed(measure, curves) for curves in runs.values()]
    return (values[0] + values[1] - values[-2] - values[-1]) / 2


def figure_8(options: Options) -> Finding:
    pairs = [(BOTH * (1 - share), BOTH * share) for share in SHARES]
    rows: list[list[str]] = []
    claims: list[Claim] = []
    for model in ("LR", "CNN"):
        runs = each_pair(options, model.lower(), pairs)
        rows += [[model, *row[:-1]] for row in written(runs)]
        text = f"{model}: with r > k the loss ends lower than with r < k"
        claims.append(higher(text, "lower", more_below(final, runs), form="+.4f"))
        if model == "LR":
            bumps = more_below(jumps, runs)
            claims.append(higher("LR: with r < k it bumps more", "drastically", bumps, form="+.4f"))
    return Finding(["model", *HEAD[:-1]], rows, claims)


def figure_9(options: Options) -> Finding:
    task = of_figure(options, "cnn")
    renewals = (0.005, 0.01, 0.02)
    settings = Ratios(0.01, 0.0, LR, options.pick(200, 5000))
    runs = {
        (method, renewal): runs_of(options, task, method, replace(settings, renewal=renewal))
        for renewal in renewals
        for method in (AUTHORS, PGD_S)
    }
    claims = []
    for renewal in renewals:
        faster = []
        for slow, quick in zip(runs[PGD_S, renewal], runs[AUTHORS, renewal], strict=True):
            goal = part_of(quick, 0.5)
            # a run that does not reach the goal took its whole work at least
            spent = min(work_to(slow, goal), slow["work"][-1])
            faster.append(spent / work_to(quick, goal))
        text = f"r = {percent(renewal)}: PGD-A needs less work than PGD-S to half-way's loss"
        claims.append(times(text, 1.1, faster, most=6))
    work: dict[str, list[float]] = {f"{percent(r)}:": [] for r in renewals}
    for curves in zip(*(runs[AUTHORS, r] for r in renewals), strict=True):
        # one loss for all r, which the worst reaches at its end
        goal = max(final(curve) for curve in curves)
        for spent_by_seed, curve in zip(work.values(), curves, strict=True):
            spent_by_seed.append(work_to(curve, goal))
    text = "the larger r, the faster PGD-A: less work to one loss from each to the next"
    claims.append(falls(text, "yes", work, ".0f"))
    rows = [
        [method, percent(renewal), *ends_of(curves)] for (method, renewal), curves in runs.items()
    ]
    return Finding(["method", *HEAD[1:-1]], rows, claims)


def convergence(options: Options, model: str) -> Finding:
    """Compare at one rate for all, the best of SGD, as the authors have one."""
    task = of_figure(options, model)
    settings = Ratios(0.01, 0.01, LR, options.pick(300, 5000))
    settings = replace(settings, lr=best_rate(task, settings, RATES, options.seed))
    runs = {m: runs_of(options, task, m, settings) for m in (SGD, AUTHORS, PGD_S)}
    ends = {method: each_seed(final, curves) for method, curves in runs.items()}
    parts = (0.1, 0.5, 0.9)
    published = {SGD: "1", AUTHORS: "2x to 5x, 1.6x in all", PGD_S: "below 1x late"}
    rows = []
    for method, curves in runs.items():
        cells = []
        for part in parts:
            work = float(np.median(gains(curves, runs[SGD], part)))
            steps = float(np.median(gains(curves, runs[SGD], part, "step")))
            cells.append(f"{factor(work)} ({factor(steps)})")
        loss = f"{ends[method].mean():.4f}"
        rows.append([method, f"{settings.lr:g}", loss, *cells, published[method]])
    early, late = (gains(runs[AUTHORS], runs[SGD], part) for part in (0.1, 0.9))
    claims = [
        times("PGD-A is faster at first: to SGD's loss after a tenth of its run", 2, early, most=5),
        times("and in all: to SGD's loss at nine tenths of its run", 1.6, late),
        higher("PGD-S becomes slower than SGD: its loss ends above", "slower",
               ends[PGD_S] - ends[SGD], form="+.4f"),
        within("in the worst case PGD-A is almost like SGD: at most 1.1 of its loss at the end",
               "almost the same", ends[AUTHORS] / ends[SGD], high=1.1, form=".2f"),
    ]  # fmt: skip
    goals = (f"to SGD's at {part:.0%} (in steps)" for part in parts)
    head = ["method", "lr", "loss at the end", *goals, "paper"]
    return Finding(head, rows, claims)


figure_10a = partial(convergence, model="mlp")
figure_10b = partial(convergence, model="cnn")


def step_length(options: Options) -> Finding:
    """Separate the length of the authors' step from its direction, in steps to SGD's loss.

    The step is twice as long as SGD's. Its direction alone is PGD-A with the mean over S and T, its
    length alone is SGD at twice the rate.
    """
    rows = []
    claims = []
    for model in ("mlp", "cnn"):
        task = of_figure(options, model)
        settings = Ratios(0.01, 0.01, LOW, options.pick(300, 5000))
        for lr in (LOW, best_rate(task, settings, RATES, options.seed)):
            base = runs_of(options, task, SGD, replace(settings, lr=lr))
            arms = {
                "both: PGD-A, the authors' step": (AUTHORS, lr),
                "length alone: SGD at twice the rate": (SGD, 2 * lr),
                "direction alone: PGD-A, a step as long as SGD's": (PGD_A, lr),
            }
            where = f"{model}, rate {lr:g}"
            for name, (method, rate) in arms.items():
                runs = runs_of(options, task, method, replace(settings, lr=rate))
                gained = gains(runs, base, 0.9, "step")
                rows.append((where, name, factor(float(np.median(gained)))))
                claims.append(times(f"{where}: {name}", 1.6, gained))
    return Finding(["model", "what changes", "gain in steps, median"], rows, claims)


COSTS = {"mlp": (3.4e-5, 238_510), "cnn": (2.6e-4, 8490)}
"""Seconds per example of a PGD step on one core, as in the table of the page, and parameters."""
PER_STEP = 1200
"""Examples of a step of all workers: 2 % of 60,000 images."""
LINKS = (10_000.0, 1000.0)
"""Mbit/s of each worker; the first decides."""
FLEETS = (1, 2, 4, 8)


def round_s(model: str, workers: int, link_mbps: float) -> float:
    """Time a step as with the paper's images: its part of the work, and the model both ways."""
    seconds, parameters = COSTS[model]
    # section V-E: computing is divided, the exchange is not
    return seconds * PER_STEP / workers + 2 * 32 * parameters / (1e6 * link_mbps)


def figure_11(options: Options) -> Finding:
    rows = []
    claims = []
    best = {}
    for model in COSTS:
        task = of_figure(options, model)
        settings = Ratios(0.01, 0.01, LR, options.pick(200, 2000))
        runs = [runs_of(options, task, AUTHORS, replace(settings, workers=m)) for m in FLEETS]
        # the loss that one worker has reached at that part of its steps
        goals = [part_of(curve, 0.6) for curve in runs[0]]
        steps = [
            [work_to(curve, goal, "step") for curve, goal in zip(curves, goals, strict=True)]
            for curves in runs
        ]
        typical = np.median(steps, axis=1)
        for link in LINKS:
            seconds = [n * round_s(model, m, link) for n, m in zip(typical, FLEETS, strict=True)]
            speedups = [f"{seconds[0] / each:.1f}x" for each in seconds]
            rows.append([model, f"{link:g} Mbit/s", *speedups])
        rows.append([model, "steps", *(f"{count:.0f}" for count in typical)])
        best[model] = round_s(model, 1, LINKS[0]) / round_s(model, 8, LINKS[0])
        text = f"{model}: 8 workers need no more steps than one (at most 1.25 times)"
        ratios = np.divide(steps[-1], steps[0])
        # 1 % of the share of one of 8 workers are 2 images
        claims += [
            at_scale(within(text, "linear scaling", ratios, high=1.25, form=".2f"),
                     not options.fast),
            made(f"{model}: a step of 8 workers takes an eighth of the time (5.3 to 8 times less)",
                 "8x", f"{best[model]:.1f}x", best[model] >= 8 / 1.5),
        ]  # fmt: skip
    here = f"{best['cnn']:.1f}x, {best['mlp']:.1f}x"
    text = "the CNN's step scales better than the MLP's"
    claims.append(made(text, "yes", here, best["cnn"] > best["mlp"]))
    return Finding(["model", "link", *(f"{n} workers" for n in FLEETS)], rows, claims)
