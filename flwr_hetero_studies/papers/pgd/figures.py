"""Figures 6 to 11: the ratios k and r, aggressive updates, convergence and scaling.

The paper's x-axes are seconds; here they count gradients of examples, those of the first pass and
of renewed priorities among them, which is what the paper's time goes into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from flwr_hetero_studies.core.curves import Columns, time_to
from flwr_hetero_studies.core.experiment import Claim, Curve, Finding, times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd.tasks import images, points
from flwr_hetero_studies.papers.pgd.workers import (
    METHODS,
    PGD_A,
    PGD_S,
    SGD,
    Settings,
    Task,
    at_best_rate,
    final,
    jumps,
    run,
)

RATES = (0.03, 0.1, 0.3)
"""Learning rates tried; the paper gives none."""
LR = 0.1
"""Of the experiments on k and r."""
RATIOS = (0.001, 0.01, 0.05, 0.1, 0.3)
WORK = "gradients of examples"


def curve_of(curve: Columns) -> Curve:
    """Draw the loss over the work, as far as it is finite."""
    pairs = zip(curve["work"], curve["loss"], strict=True)
    kept = [(x, y) for x, y in pairs if isfinite(y)]
    return Curve(*map(list, zip(*kept, strict=True)))


def smooth(values: Sequence[float]) -> list[float]:
    """Average each point with its neighbours; single ones jump."""
    return [float(np.mean(values[max(0, i - 1) : i + 2])) for i in range(len(values))]


def work_to(curve: Columns, goal: float, unit: str = "work") -> float:
    """Return the gradients, or steps, that it took to get to a loss; infinite if it never did."""
    return time_to(curve[unit], smooth(curve["loss"]), goal, below=True)


def gain(
    curves: Sequence[Columns], base: Sequence[Columns], part: float, unit: str = "work"
) -> float:
    """How many times less work than SGD, to SGD's loss at a part of its run; over seeds."""
    found = []
    for curve, sgd in zip(curves, base, strict=True):
        goal = smooth(sgd["loss"])[round(part * (len(sgd["loss"]) - 1))]
        found.append(work_to(sgd, goal, unit) / work_to(curve, goal, unit))
    return float(np.median(found))


def factor(value: float, digits: int = 1) -> str:
    """Write how many times; 0 and infinity are never."""
    return f"{value:.{digits}f}x" if 0 < value < inf else "never"


def percent(ratio: float) -> str:
    """Write a ratio as in the paper."""
    return f"{100 * ratio:g}%"


def ratios(
    options: Options, task: Task, pairs: Sequence[tuple[float, float]]
) -> dict[tuple[float, float], Columns]:
    """Train PGD-A with pairs of k and r."""
    steps, found = options.pick(200, 10_000), {}
    for top, renewal in pairs:
        options.say(f"k = {percent(top)}, r = {percent(renewal)}")
        found[top, renewal] = run(task, PGD_A, Settings(top, renewal, LR, steps), options.seed)
    return found


def ratio_rows(found: Mapping[tuple[float, float], Columns]) -> list[list[str]]:
    """Write a row per pair."""
    return [
        [percent(top), percent(renewal), f"{final(curve):.4f}", f"{jumps(curve):.3f}",
         f"{curve['work'][-1]:.3g}"]
        for (top, renewal), curve in found.items()
    ]  # fmt: skip


RATIO_HEAD = ["k", "r", "loss at the end", "rises / first loss", "gradients"]


def ratio_curves(found: Mapping[tuple[float, float], Columns]) -> dict[str, Curve]:
    """Draw a curve per pair."""
    return {f"k={percent(k)}, r={percent(r)}": curve_of(c) for (k, r), c in found.items()}


def figure_6(options: Options) -> Finding:
    """Vary the top ratio k, with a small and a large renewal ratio."""
    small, large = 0.001, 0.1
    found = ratios(options, points(options), [(k, r) for r in (small, large) for k in RATIOS])
    diverged, start = final(found[0.001, small]), found[0.001, small]["loss"][0]
    goal = max(smooth(found[k, large]["loss"])[-1] for k in (0.01, 0.3))
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
    return Finding(RATIO_HEAD, ratio_rows(found), claims, ratio_curves(found), (WORK, "loss"))


def figure_7(options: Options) -> Finding:
    """Vary the renewal ratio r, with a small and a large top ratio."""
    small, large = 0.01, 0.1
    found = ratios(options, points(options), [(k, r) for k in (small, large) for r in RATIOS])
    ends = {k: [final(found[k, r]) for r in RATIOS] for k in (small, large)}
    rough = [jumps(found[small, r]) for r in RATIOS]
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
    return Finding(RATIO_HEAD, ratio_rows(found), claims, ratio_curves(found), (WORK, "loss"))


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
BOTH = 0.02
"""k + r."""


def figure_8(options: Options) -> Finding:
    """Vary k and r, together fixed."""
    settings = Settings(0.0, 0.0, LR, options.pick(200, 10_000))
    rows, curves, leads, rough = [], {}, [], []
    for name, task in (("LR", points(options)), ("CNN", images(options, "cnn"))):
        ends, rises = [], []
        for share in SHARES:
            options.say(f"{name}, r = {share:g} of 2%")
            own = replace(settings, top=BOTH * (1 - share), renewal=BOTH * share)
            curve = run(task, PGD_A, own, options.seed)
            ends.append(final(curve))
            rises.append(jumps(curve))
            rows.append([name, percent(own.top), percent(own.renewal), f"{ends[-1]:.4f}",
                         f"{rises[-1]:.3f}"])  # fmt: skip
            curves[f"{name}, k={percent(own.top)}, r={percent(own.renewal)}"] = curve_of(curve)
        leads.append((float(np.mean(ends[-2:])), float(np.mean(ends[:2]))))
        rough.append((float(np.mean(rises[-2:])), float(np.mean(rises[:2]))))
    claims = [
        Claim(f"{name}: with r > k the loss ends lower than with r < k", "lower",
              f"{small:.4f} against {large:.4f}", small < large)
        for name, (small, large) in zip(("LR", "CNN"), leads, strict=True)
    ]  # fmt: skip
    claims.append(
        Claim("LR: with r < k it bumps more", "drastically",
              f"{rough[0][1]:.4f} against {rough[0][0]:.4f}", rough[0][1] > rough[0][0])
    )  # fmt: skip
    head = ["model", "k", "r", "loss at the end", "rises / first loss"]
    return Finding(head, rows, claims, curves, (WORK, "loss"))


def figure_9(options: Options) -> Finding:
    """With aggressive updates and without."""
    task, renewals = images(options, "cnn"), (0.005, 0.01, 0.02)
    settings = Settings(0.01, 0.0, LR, options.pick(200, 5000))
    found = {}
    for renewal in renewals:
        for method in (PGD_A, PGD_S):
            options.say(f"{method}, r = {percent(renewal)}")
            own = replace(settings, renewal=renewal)
            found[method, renewal] = run(task, method, own, options.seed)
    found_of: list[str] = []
    gains, goal = [], max(final(found[PGD_A, r]) for r in renewals)
    for renewal in renewals:
        losses = smooth(found[PGD_A, renewal]["loss"])
        half = losses[len(losses) // 2]
        work = [work_to(found[method, renewal], half) for method in (PGD_A, PGD_S)]
        gains.append(work[1] / work[0])
        found_of.append("PGD-S never" if work[1] == inf else factor(gains[-1]))
    work_of = [work_to(found[PGD_A, renewal], goal) for renewal in renewals]
    rows = [
        [method, percent(renewal), f"{final(curve):.4f}", f"{jumps(curve):.3f}"]
        for (method, renewal), curve in found.items()
    ]
    claims = [
        Claim("to the loss at half of its run PGD-A needs at least 1.1 times less work than PGD-S, "
              "with any r", "1.1 to 6 times", ", ".join(found_of),
              min(gains) >= 1.1),
        Claim("the larger r, the faster PGD-A: less work to one loss from each to the next",
              "yes", ", ".join(f"{work:.3g}" for work in work_of),
              all(b < a for a, b in pairwise(work_of))),
    ]  # fmt: skip
    curves = {f"{method}, r={percent(r)}": curve_of(c) for (method, r), c in found.items()}
    head = ["method", "r", "loss at the end", "rises / first loss"]
    return Finding(head, rows, claims, curves, (WORK, "loss"))


def convergence(options: Options, model: str) -> Finding:
    """Compare PGD with SGD at its best learning rate, each method at its own best."""
    task = images(options, model)
    settings = Settings(0.01, 0.01, LR, options.pick(300, 5000))
    seeds = range(options.seed, options.seed + options.pick(1, 3))
    found, rates = {}, {}
    for method in METHODS:
        options.say(f"{model}, {method}: learning rates {', '.join(map(str, RATES))}")
        rates[method], found[method] = at_best_rate(task, method, settings, RATES, seeds)
    parts = (0.1, 0.5, 0.9)
    gains = {m: [gain(found[m], found[SGD], part) for part in parts] for m in METHODS}
    in_steps = {m: [gain(found[m], found[SGD], part, "step") for part in parts] for m in METHODS}
    ends = {m: float(np.mean([final(curve) for curve in found[m]])) for m in METHODS}
    rows = [
        [method, rates[method], f"{ends[method]:.4f}",
         *(f"{factor(work, 2)} ({factor(steps, 2)})"
           for work, steps in zip(gains[method], in_steps[method], strict=True)),
         {SGD: "1", PGD_A: "2x to 5x, 1.6x in all", PGD_S: "below 1x late"}[method]]
        for method in METHODS
    ]  # fmt: skip
    claims = [
        times("PGD-A is faster at first: to SGD's loss after a tenth of its run", 2,
              gains[PGD_A][0]),
        times("and in all: to SGD's loss at nine tenths of its run", 1.6, gains[PGD_A][2]),
        Claim("PGD-S becomes slower than SGD: its loss ends above", "slower",
              f"{ends[PGD_S]:.4f} against {ends[SGD]:.4f}", ends[PGD_S] > ends[SGD]),
        Claim("in the worst case PGD-A is almost like SGD: at most 1.1 of its loss at the end",
              "almost the same", f"{ends[PGD_A] / ends[SGD]:.2f} of it",
              ends[PGD_A] <= 1.1 * ends[SGD]),
    ]  # fmt: skip
    goals = (f"to SGD's at {part:.0%} (in steps)" for part in parts)
    head = ["method", "lr", "loss at the end", *goals, "paper"]
    curves = {method: curve_of(curves[0]) for method, curves in found.items()}
    return Finding(head, rows, claims, curves, (WORK, "training loss"))


figure_10a = partial(convergence, model="mlp")
figure_10b = partial(convergence, model="cnn")


# --- Figure 11 --------------------------------------------------------------------------------

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
    return seconds * PER_STEP / workers + 2 * 32 * parameters / (1e6 * link_mbps)


def figure_11(options: Options) -> Finding:
    """Time to one loss on 1 to 8 workers."""
    rows, best, curves = [], {}, {}
    for model in COSTS:
        task, goal = images(options, model), inf
        speedups: dict[float, list[float]] = {link: [] for link in LINKS}
        steps: list[float] = []
        for workers in FLEETS:
            options.say(f"{model}, {workers} workers")
            settings = Settings(0.01, 0.01, LR, options.pick(200, 2000), workers)
            curve = run(task, PGD_A, settings, options.seed)
            losses = smooth(curve["loss"])
            goal = losses[round(0.6 * (len(losses) - 1))] if workers == 1 else goal
            steps.append(time_to(curve["step"], losses, goal, below=True))
            for link, found in speedups.items():
                alone = steps[0] * round_s(model, 1, link)
                found.append(alone / (steps[-1] * round_s(model, workers, link)))
        rows += [
            [model, f"{link:g} Mbit/s", *(f"{value:.1f}x" for value in found)]
            for link, found in speedups.items()
        ]
        rows.append([model, "steps", *(f"{count:.0f}" for count in steps)])
        best[model] = speedups[LINKS[0]][-1]
        curves[model] = Curve(list(map(float, FLEETS)), speedups[LINKS[0]])
    claims = [
        *(times(f"PGD scales linearly: 8 workers with the {model.upper()}", 8, value)
          for model, value in best.items()),
        Claim("the CNN scales better than the MLP", "yes",
              f"{best['cnn']:.1f}x, {best['mlp']:.1f}x", best["cnn"] > best["mlp"]),
    ]  # fmt: skip
    head = ["model", "link", *(f"{n} workers" for n in FLEETS)]
    return Finding(head, rows, claims, curves, ("workers", "speed-up"))
