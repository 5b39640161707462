"""Figures 11 to 18, and under which conditions the gains appear."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import exp, inf, log
from typing import Any

import numpy as np

from flwr_hetero_studies.core import curves
from flwr_hetero_studies.core.criteria import Claim, at_scale, falls, higher, made, times, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury.clock import MBPS, costs, overlapped_s
from flwr_hetero_studies.papers.mercury.training import (
    ADACOMM,
    FLAT,
    MERCURY,
    RANDOM,
    Runs,
    Sampling,
    TrainedRun,
    cell,
)

PUBLISHED = {"images": 3.74, "numbers": 2.74, "texts": 1.85}
"""Most that Mercury gains on CIFAR-10, on speech commands and on AG News."""
BY_LINK = dict(zip(MBPS, (3.74, 3.64, 3.62, 3.48), strict=True))
FIXED_BY_LINK = dict(zip(MBPS, (3.43, 3.38, 3.33, 3.25), strict=True))
"""On CIFAR-10, with and without adaptation to the bandwidth."""
BY_ALPHA = {10.0: 2.75, 1.0: 2.5, 0.5: 2.41}
NOISE = 0.1
"""Standard deviation of the bandwidth on the paper's testbed, relative."""
EARLY = 0.1
LATE = 0.005
"""Accuracy below the plateau that counts as the early stage, and as the end."""
KEPT = 0.8
"""Part of the speedup that more devices must keep for it to be maintained."""
SAME = 0.5
"""Points of accuracy that do not count."""
GROUPWISE = Sampling("paper", share=1 / 16, is_hidden=False)
"""For figures in which no link matters: 16 groups, as in the package, scored before the batch."""

BELOW = (0.0025, 0.005, 0.01)
"""Targets: accuracy below the plateau of standard SGD; a gain is the geometric mean of three."""
PLATEAU = 0.2
"""The plateau is the last part of a run."""
WINDOW = 5
"""Evaluations that are averaged before a crossing is looked for."""


def smooth(run: TrainedRun) -> Vector:
    return curves.smooth(run.accuracy, WINDOW, centred=True)


def plateau(run: TrainedRun) -> float:
    return float(smooth(run)[-max(1, int(PLATEAU * len(run.accuracy))) :].mean())


def spent(run: TrainedRun, target: float, what: str = "seconds") -> float:
    """Return the seconds, exchanges or steps until an accuracy; infinite if never reached."""
    wrong = 1.0 - smooth(run)
    return curves.time_to(getattr(run, what), wrong, 1.0 - target, below=True)


def gain(base: TrainedRun, run: TrainedRun, what: str = "seconds") -> float:
    """Return how many times as much the base spends to come near its plateau; 0: never there."""
    targets = [plateau(base) - below for below in BELOW]
    # one crossing is chance; three of them are less so
    ratios = [spent(base, target, what) / spent(run, target, what) for target in targets]
    return exp(sum(map(log, ratios)) / len(ratios)) if min(ratios) > 0 else 0.0


def mean_of(runs: Runs) -> TrainedRun:
    *columns, moved = (np.mean(each, axis=0).tolist() for each in zip(*runs, strict=True))
    return TrainedRun._make([*columns, round(moved)])


def jackknife(measure: Callable[..., float], *groups: Runs) -> Vector:
    """Return each seed's part in a measure of mean curves (Tukey's pseudo-values).

    A seed alone has a test accuracy in steps of a third of a point, too coarse for a crossing.
    """
    count = len(groups[0])
    whole = measure(*map(mean_of, groups))
    if count == 1:
        return np.array([whole])
    rest = [measure(*(mean_of(g[:n] + g[n + 1 :]) for g in groups)) for n in range(count)]
    # what is never reached is infinite
    with np.errstate(invalid="ignore"):
        return count * whole - (count - 1) * np.array(rest)


def gains(base: Runs, runs: Runs, what: str = "seconds") -> Vector:
    def measure(one: TrainedRun, other: TrainedRun) -> float:
        ratio = gain(one, other, what)
        return log(ratio) if ratio else -inf

    return np.nan_to_num(np.exp(jackknife(measure, base, runs)), nan=0.0, posinf=0.0)


def typical(ratios: Vector) -> float:
    return exp(float(np.log(ratios).mean())) if min(ratios) > 0 else 0.0


def plateaus(runs: Runs) -> Vector:
    """Return each seed's plateau in percent."""
    return 100 * np.array([plateau(run) for run in runs])


def written(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio else "never"


def end_of(runs: Runs) -> str:
    return f"{plateaus(runs).mean():.2f} %"


def step_s(runs: Runs) -> float:
    """Return the mean seconds of a step."""
    return sum(run.seconds[-1] / run.steps[-1] for run in runs) / len(runs)


def on_link(runs: Runs, mbps: float, workers: int = 4) -> Runs:
    """Return runs that scored nothing with the seconds that they take on another link."""
    cost = costs(mbps, workers)
    timed = []
    for run in runs:
        counts = zip(run.steps, run.exchanges, strict=True)
        seconds = [s * cost.compute_s + e * cost.exchange_s for s, e in counts]
        timed.append(run._replace(seconds=seconds))
    return timed


def figure_11(options: Options) -> Finding:
    kinds = list(PUBLISHED) if options.fast or not options.data else ["images"]
    tictacs = [
        (costs(mbps).compute_s + costs(mbps).exchange_s) / overlapped_s(costs(mbps))
        for mbps in MBPS
    ]
    rows = []
    claims = []
    for kind in kinds:
        task = cell(options, kind)
        dataset = task.task.dataset
        options.say(f"{kind}: {dataset}")
        base = task.train(RANDOM)
        adacomm = task.train(ADACOMM)
        speedups: list[Vector] = []
        ahead = []
        for mbps, tictac in zip(MBPS, tictacs, strict=True):
            standard = on_link(base, mbps)
            mercury = gains(standard, task.train(MERCURY, costs(mbps)))
            flat = gains(standard, task.train(FLAT, costs(mbps)))
            local = gains(standard, on_link(adacomm, mbps))
            with np.errstate(divide="ignore", invalid="ignore"):
                ahead += [np.log(mercury) - np.log(rival) for rival in (tictac, local)]
            paper = "" if speedups else f"up to {PUBLISHED[kind]:.2f}x"
            if kind == "images":
                paper = f"{BY_LINK[mbps]:.2f}x"
            speedups.append(mercury)
            typicals = (typical(mercury), typical(flat), tictac, typical(local))
            rows.append((dataset, mbps, *map(written, typicals), paper))
        claims += [
            times(f"{kind}: Mercury's speedup over distributed SGD, at 10 Mbit/s", PUBLISHED[kind],
                  speedups[0]),
            higher(f"{kind}: it outperforms TicTac and AdaComm across all bandwidths (logarithms)",
                   "in all", *ahead, form="+.1f"),
        ]  # fmt: skip
    # Figure 2 in another form: a formula of the emulated clock
    claims.append(made("Overlapping alone, as in TicTac, gains little on wireless links",
                       "1.01x to 1.21x", f"{min(tictacs):.2f}x to {max(tictacs):.2f}x",
                       max(tictacs) <= 1.21))  # fmt: skip
    head = ("data", "Mbit/s", "Mercury", "package", "TicTac", "AdaComm", "paper: Mercury")
    return Finding(head, rows, claims)


def uncompromised(base: Runs, runs: Runs) -> Claim:
    text = f"Accuracy is not compromised (at most {SAME} points lower)"
    return within(text, "same", plateaus(runs) - plateaus(base), low=-SAME, unit=" points")


def rounds_saved(plain: TrainedRun, one: TrainedRun, other: TrainedRun, below: float) -> float:
    """Return how many rounds fewer the other run takes to come near the plateau of plain SGD."""
    goal = plateau(plain) - below
    return spent(one, goal, "exchanges") - spent(other, goal, "exchanges")


def figure_12(options: Options) -> Finding:
    task = cell(options, "images")
    base, adacomm, mercury = (task.train(method) for method in (RANDOM, ADACOMM, MERCURY))
    # TicTac trains as plain SGD, and has its own clock
    step_s = overlapped_s(costs(100))
    tictac = [run._replace(seconds=[n * step_s for n in run.exchanges]) for run in base]
    goals = [plateau(mean_of(tictac)) - below for below in (EARLY, LATE)]
    rows = []
    for name, runs in {"TicTac": tictac, "AdaComm": adacomm, "Mercury": mercury}.items():
        mean = mean_of(runs)
        counts = (f"{spent(mean, goal, 'exchanges'):.0f}" for goal in goals)
        paper = "2.4x to 2.7x fewer rounds than TicTac" if name == "Mercury" else ""
        rows.append((name, *counts, f"{spent(mean, goals[1]):.0f}", end_of(runs), paper))
    early, late = (
        jackknife(partial(rounds_saved, below=below), tictac, adacomm, mercury)
        for below in (EARLY, LATE)
    )
    claims = [
        times("Mercury takes fewer communication rounds than TicTac", 2.4,
              gains(tictac, mercury, "exchanges")),
        higher("AdaComm converges faster than Mercury in the early stage (rounds fewer)", "faster",
               -early, form="+.0f"),
        higher("Mercury eventually outperforms AdaComm in communications (rounds fewer)", "fewer",
               late, form="+.0f"),
        uncompromised(tictac, mercury),
    ]  # fmt: skip
    to = (f"rounds to {100 * goal:.1f} %" for goal in goals)
    head = ("method", *to, "seconds to it", "end accuracy", "paper")
    return Finding(head, rows, claims)


def compare(
    options: Options, methods: dict[str, Sampling], more_steps: float, speedup: float
) -> Finding:
    """Compare two methods, of which the second takes more and shorter iterations.

    more_steps: how many times as many in the paper; speedup: the paper's in all.
    """
    task = cell(options, "images")
    _, name = methods
    base, runs = (task.train(method) for method in methods.values())
    rows = []
    paper = ("1.00x, 1.00x", f"{1 / more_steps:.2f}x, {speedup:.2f}x")
    for label, of_method, published in zip(methods, (base, runs), paper, strict=True):
        in_steps = written(typical(gains(base, of_method, "steps")))
        in_seconds = written(typical(gains(base, of_method)))
        seconds = f"{step_s(of_method):.1f}"
        rows.append((label, in_steps, in_seconds, published, seconds, end_of(of_method)))
    with np.errstate(divide="ignore"):
        more = 100 * (1 / gains(base, runs, "steps") - 1)
    # the seconds of a step are constants of the emulated clock
    shorter = step_s(base) / step_s(runs)
    wanted = more_steps - 1
    claims = [
        within(f"{name} needs few iterations more (at most twice as many more)",
               f"{wanted:.0%} more", more, high=200 * wanted, form="+.0f", unit=" %"),
        made("its steps are shorter by more than it needs more of", f"{speedup:g}x in all",
             f"{shorter:.1f}x a step", shorter > 1),
    ]  # fmt: skip
    head = ("method", "in iterations", "speedup", "paper", "seconds a step", "end accuracy")
    return Finding(head, rows, claims)


figure_13 = partial(
    compare,
    methods={"all-inclusive": replace(GROUPWISE, share=1.0), "group-wise": GROUPWISE},
    more_steps=1.2,
    speedup=4.2,
)
figure_15 = partial(
    compare,
    methods={"sequential": replace(MERCURY, is_hidden=False), "BACC": MERCURY},
    more_steps=1.05,
    speedup=2.2,
)
RESHARDING = {
    "none": ("", 0.0, ""),
    "random, a third of the data": ("random", 1 / 3, "+1.84 points"),
    "by importance, a sixth": ("importance", 1 / 6, "the same"),
    "random, a sixth": ("random", 1 / 6, ""),
}
"""Which samples move, how many of a device's data in all, and what the paper finds."""


def figure_14(options: Options) -> Finding:
    iid = cell(options, "images")
    splits = {"IID": iid, "Dirichlet 0.5": iid.changed(alpha=0.5)}
    rows = []
    ends = []
    for name, (which, share, paper) in RESHARDING.items():
        method = replace(MERCURY, resharding=which, reshard_share=share)
        runs = [task.train(method) for task in splits.values()]
        rows.append((name, mean_of(runs[0]).moved, *map(end_of, runs), paper))
        ends.append(plateaus(runs[0]))
    claims = [
        higher("Resharding raises the accuracy (IID)", "by up to 1.84 points", ends[1] - ends[0],
               size=1.84, unit=" points"),
        within(f"By importance half the transfer gives the same (IID, within {SAME} points)",
               "50 % of the data", ends[2] - ends[1], low=-SAME, high=SAME, unit=" points"),
    ]  # fmt: skip
    head = ("resharding", "samples moved", *(f"{split}: end" for split in splits), "paper")
    return Finding(head, rows, claims)


def figure_16(options: Options) -> Finding:
    task = cell(options, "images")
    if options.fast:
        # chance in a run of 300 steps is larger than what adaptation changes
        task = task.changed(num_steps=1000)
    base = task.train(RANDOM)
    noisy = replace(MERCURY, bandwidth_noise=NOISE)
    rows = []
    claims = []
    for mbps in MBPS:
        standard = on_link(base, mbps)
        cost = costs(mbps)
        # the same seeds, and so the same bandwidths, with and without
        adaptive, fixed = (task.train(replace(noisy, is_adaptive=on), cost) for on in (True, False))
        steps_s = f"{step_s(adaptive):.2f}, {step_s(fixed):.2f}"
        speedups = [written(typical(gains(standard, runs))) for runs in (adaptive, fixed)]
        paper = f"{BY_LINK[mbps]:.2f}x, {FIXED_BY_LINK[mbps]:.2f}x"
        rows.append((mbps, steps_s, ", ".join(speedups), paper))
        published = 100 * (BY_LINK[mbps] / FIXED_BY_LINK[mbps] - 1)
        claims.append(higher(f"{mbps} Mbit/s: with bandwidth adaptation the speedup is larger",
                             f"by {published:.1f} %", 100 * (gains(fixed, adaptive) - 1),
                             size=published, form="+.1f", unit=" %"))  # fmt: skip
    return Finding(("Mbit/s", "seconds a step", "speedup: adaptive, fixed", "paper"), rows, claims)


def figure_17(options: Options) -> Finding:
    rows = []
    speedups: dict[tuple[int, int], Vector] = {}
    links = options.pick((MBPS[0], MBPS[-1]), MBPS)
    for workers in (4, 8, 12):
        task = cell(options, "images").changed(workers=workers)
        base = task.train(RANDOM)
        for mbps in links:
            run = task.train(MERCURY, costs(mbps, workers))
            speedups[workers, mbps] = gains(on_link(base, mbps, workers), run)
        texts = [written(typical(speedups[workers, mbps])) for mbps in links]
        paper = " / ".join(f"{BY_LINK[mbps]:.2f}x" for mbps in links if workers == 4)
        rows.append((workers, *texts, paper))
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = [np.divide(speedups[12, m], speedups[4, m]) for m in links]
    # a step of 12 devices must not see a large part of the data
    claims = [
        at_scale(claim, not options.fast)
        for claim in (
            within(f"The speedup is maintained from 4 to 12 devices ({KEPT:.0%} of it)",
                   "maintained", *kept, low=KEPT, form=".2f"),
            *(times(f"The speedup with 12 devices, {m} Mbit/s", BY_LINK[m], speedups[12, m])
              for m in links),
        )
    ]  # fmt: skip
    return Finding(("devices", *(f"{mbps} Mbit/s" for mbps in links), "paper"), rows, claims)


def figure_18(options: Options) -> Finding:
    faster = {}
    rows = []
    for alpha, published in BY_ALPHA.items():
        task = cell(options, "images").changed(workers=12, alpha=alpha)
        base = task.train(RANDOM)
        run = task.train(GROUPWISE)
        faster[f"{alpha:g}:"] = gains(base, run, "steps")
        speedup = written(typical(faster[f"{alpha:g}:"]))
        rows.append((alpha, end_of(base), end_of(run), speedup, f"{published:.2f}x"))
    claims = [
        times(f"Importance sampling speeds up federated learning, alpha = {alpha} in iterations",
              published, gained)
        for (alpha, gained), published in zip(faster.items(), BY_ALPHA.values(), strict=True)
    ]  # fmt: skip
    claims.append(falls("The gain is smaller the less alike the data are", "2.75x > 2.50x > 2.41x",
                        faster))  # fmt: skip
    head = ("alpha", "Non-IS: end", "Groupwise-IS: end", "gain in iterations", "paper")
    # as in figure 17
    return Finding(head, rows, [at_scale(claim, not options.fast) for claim in claims])


Change = dict[str, Any]
CONDITIONS: dict[str, tuple[Change, Change, Change]] = {
    "as in the paper, 10 Mbit/s": ({}, {}, {}),
    "unbiased (package's default)": ({}, {}, {"sampling": "flat"}),
    "a 20th scored (200 Mbit/s)": ({}, {}, {"share": 0.05}),
    "scores of training only": ({}, {}, {"sampling": "flat", "share": 0.0}),
    "scores before each batch": ({}, {}, {"is_hidden": False}),
    "five batches per exchange": ({}, {"local_steps": 5}, {"local_steps": 5}),
    "standard SGD reshuffles": ({}, {"sampling": "reshuffle"}, {}),
    "Adam, rate falls to 0": ({"decays": True}, {}, {}),
    "Adam, a tenth of the rate": ({"rate": 0.0004}, {}, {}),
    "plain SGD, rate 0.1": ({"optimizer": "sgd", "rate": 0.1}, {}, {}),
    "as in flwr_hetero_studies/papers/mercury": (
        {"optimizer": "sgd", "rate": 0.1}, {"sampling": "reshuffle", "local_steps": 5},
        {"sampling": "flat", "local_steps": 5, "share": 0.1}),
}  # fmt: skip
"""What differs from the paper: changes of the task, of standard SGD, and of Mercury."""


def section_6_2(options: Options) -> Finding:
    cost = costs(10)
    rows: list[tuple[str, ...]] = []
    claims: list[Claim] = []
    bases: dict[str, Runs] = {}
    for name, (of_task, of_base, of_run) in CONDITIONS.items():
        options.say(name)
        task = cell(options, "images").changed(**of_task)
        key = f"{of_task} {of_base}"
        if key not in bases:
            bases[key] = task.train(replace(RANDOM, **of_base), cost)
        base = bases[key]
        run = task.train(replace(MERCURY, **of_run), cost)
        fewer = gains(base, run, "steps")
        # the paper's own setting decides
        if not rows:
            text = "Mercury needs fewer iterations than random sampling"
            claims = [times(text, 2.4, fewer), uncompromised(base, run)]
        published = "" if rows else "2.4x to 2.7x"
        speedups = [written(typical(ratios)) for ratios in (fewer, gains(base, run))]
        rows.append((name, *speedups, end_of(base), end_of(run), published))
    head = ("changed", "iterations", "time", "SGD", "Mercury", "paper: iterations")
    return Finding(head, rows, claims)
