"""Tables 1 to 7, Figures 3 and 4 and Theorem 1: accuracy and time of the algorithms."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from flwr_hetero_studies.core.criteria import (
    PAIRS,
    UNTESTED,
    Claim,
    falls,
    higher,
    made,
    times,
    within,
)
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.biased_local_sgd.runs import (
    DECAYS,
    EPOCHS,
    GAPS,
    PAPER,
    TAU_F,
    Case,
    MeanRun,
    compare,
)

SYNCHRONOUS = "synchronous SGD"
BALANCED = "balanced local SGD"
BIASED = "biased local SGD"
FAST_ONLY = "synchronous SGD, 8 fast only"
CASES = {
    SYNCHRONOUS: Case(steps=1, balanced=True, sampling=False, weights=False),
    FAST_ONLY: Case(slow=0, steps=1, balanced=True, sampling=False, weights=False),
    BALANCED: Case(balanced=True, sampling=False, weights=False),
    **{f"{BIASED}, {n}x epochs": Case(times=n) for n in (1, 2, 3)},
}
TABLE_1 = {
    SYNCHRONOUS: "1298 s, 90.91 %",
    FAST_ONLY: "1235 s, 91.28 %",
    BALANCED: "548 s, 88.93 %",
    f"{BIASED}, 1x epochs": "40.6 s, 89.16 %",
    f"{BIASED}, 2x epochs": "81.2 s, 91.26 %",
    f"{BIASED}, 3x epochs": "121.7 s, 91.95 %",
}
TABLE_3 = {16: (88.83, 89.71), 4: (88.09, 89.47), 1: (87.98, 89.16)}
TABLE_7 = {16: (91.16, 91.63), 4: (90.58, 91.22), 1: (90.21, 91.08)}
"""Accuracy on CIFAR-10, unbiased and biased, by tau_S."""
NEARLY = 1.75
"""Points between synchronous and biased SGD on CIFAR-10, in Table 1: a slight decline."""


def outcome(runs: Mapping[str, MeanRun], claims: list[Claim], paper: Mapping[str, str]) -> Finding:
    rows = []
    for name, run in runs.items():
        per_epoch = f"{run.rounds_per_epoch:.1f}"
        seconds = f"{np.mean(run.times):.1f}"
        rows.append((name, run.rounds, per_epoch, seconds, run.percent, paper.get(name, "")))
    head = ("algorithm", "rounds", "rounds per epoch", "virtual s", "accuracy %", "paper")
    return Finding(head, rows, claims)


def above(text: str, published: tuple[float, float], low: MeanRun, high: MeanRun) -> Claim:
    """Claim a higher accuracy by about as many points as the paper's two figures differ."""
    size = published[1] - published[0]
    gains = np.subtract(high.finals, low.finals)
    return higher(text, "{} to {}".format(*published), gains, size=size, unit=" points")


def table_1(options: Options) -> Finding:
    runs = compare(options, CASES)
    seconds = {name: float(cell.split(" s")[0]) for name, cell in TABLE_1.items()}
    once, twice, thrice = (f"{BIASED}, {n}x epochs" for n in (1, 2, 3))
    plain = runs[SYNCHRONOUS]
    biased = runs[once]
    claims = [
        times(f"biased local SGD is faster than {name}", round(seconds[name] / seconds[once], 1),
              np.divide(runs[name].times, biased.times))
        for name in (SYNCHRONOUS, FAST_ONLY, BALANCED)
    ]  # fmt: skip
    claims += [
        within(f"its accuracy declines slightly (by {NEARLY} points at most)", "90.91 to 89.16",
               np.subtract(biased.finals, plain.finals), low=-NEARLY, unit=" points"),
        above("it is above that of balanced local SGD", (88.93, 89.16), runs[BALANCED], biased),
        above("with twice the epochs it is above synchronous SGD", (90.91, 91.26), plain,
              runs[twice]),
        above("with 3 times the epochs too", (90.91, 91.95), plain, runs[thrice]),
        above("and above the fast nodes alone", (91.28, 91.95), runs[FAST_ONLY], runs[thrice]),
    ]  # fmt: skip
    return outcome(runs, claims, TABLE_1)


def figure_3(options: Options) -> Finding:
    runs = compare(options, {name: CASES[name] for name in (SYNCHRONOUS, BALANCED)})
    runs |= compare(options, {BIASED: Case()})
    biased = runs[BIASED]
    claims = [
        higher(f"when biased local SGD ends, it is ahead of {name}", "much faster",
               np.subtract(biased.finals, runs[name].at(biased.times)), unit=" points")
        for name in (SYNCHRONOUS, BALANCED)
    ]  # fmt: skip
    return outcome(runs, claims, {})


def table_2(options: Options) -> Finding:
    biased = Case()
    alone = Case(slow=0, balanced=True, sampling=False, as_long_as=biased)
    runs = compare(options, {"8 fast": alone, "2 slow + 8 fast": biased})
    text = "slow nodes raise the accuracy in equal time"
    paper = {"8 fast": "38.1 s, 88.75 %", "2 slow + 8 fast": "40.6 s, 89.16 %"}
    return outcome(runs, [above(text, (88.75, 89.16), *runs.values())], paper)


def bias(options: Options, nodes: Case, printed: Mapping[int, tuple[float, float]]) -> Finding:
    cases = {}
    paper = {}
    for slow_steps in GAPS:
        case = replace(nodes, slow_steps=slow_steps, as_long_as=nodes)
        cases[f"unbiased, {slow_steps}"] = replace(case, sampling=False, weights=False)
        cases[f"biased, {slow_steps}"] = case
        for name, percent in zip(("unbiased", "biased"), printed[slow_steps], strict=True):
            paper[f"{name}, {slow_steps}"] = f"{percent} %"
    runs = compare(options, cases)
    claims = [
        above(f"({TAU_F}, {gap}): biased local SGD is more accurate in equal time", printed[gap],
              runs[f"unbiased, {gap}"], runs[f"biased, {gap}"])
        for gap in GAPS
    ]  # fmt: skip
    text = "the wider the gap, the less accurate unbiased local SGD (in this order)"
    published = " > ".join(str(printed[gap][0]) for gap in GAPS)
    plain = {f"{gap}:": runs[f"unbiased, {gap}"].finals for gap in GAPS}
    return outcome(runs, [*claims, falls(text, published, plain)], paper)


table_3 = partial(bias, nodes=Case(), printed=TABLE_3)
table_7 = partial(bias, nodes=Case(fast=1, slow=1), printed=TABLE_7)


def table_6(options: Options) -> Finding:
    cases = {"unbiased": Case(sampling=False, weights=False)}
    for unified, name in ((True, "unified"), (False, "separate")):
        for to_slow, target in ((True, "slow"), (False, "fast")):
            case = Case(unified=unified, high_loss_to_slow=to_slow)
            cases[f"{name}, high loss to {target}"] = case
    runs = compare(options, cases)
    plain, *others, ours = (np.array(one.finals) for one in runs.values())
    claims = [
        higher("separate sampling with high losses on fast nodes is the best", "89.16, others up "
               "to 89.05", *(ours - each for each in (plain, *others)), unit=" points"),
        higher("all of them are more accurate than unbiased local SGD", "87.98, others from 88.79",
               *(each - plain for each in (*others, ours)), unit=" points"),
    ]  # fmt: skip
    printed = (87.98, 88.79, 88.96, 89.05, 89.16)
    paper = {name: f"{percent} %" for name, percent in zip(cases, printed, strict=True)}
    return outcome(runs, claims, paper)


def figure_4(options: Options) -> Finding:
    names = {"unbiased": (False, False), "sampling": (True, False)}
    names |= {"weights": (False, True), "both": (True, True)}
    cases = {}
    for gap in GAPS:
        for name, (in_sampling, in_weights) in names.items():
            case = Case(slow_steps=gap, sampling=in_sampling, weights=in_weights)
            cases[f"{name}, {gap}"] = replace(case, as_long_as=Case())
    runs = compare(options, cases)
    plain, sampling, weights, both = (runs[f"{name}, 1"] for name in names)
    gains = [np.subtract(each.finals, plain.finals) for each in (sampling, weights)]
    more = [np.subtract(both.finals, each.finals) for each in (sampling, weights)]
    claims = [
        higher("(32, 1): bias in sampling restores accuracy", "effectively", gains[0]),
        higher("(32, 1): so does bias in aggregation", "similarly", gains[1]),
        higher("(32, 1): both together gain more than either", "substantial", *more),
    ]
    return outcome(runs, claims, {})


# --- Tables 4 and 5, Theorem 1 ----------------------------------------------------------------

SETTINGS = ("batch size", "epochs", "learning rate", "decay after", "weight decay")
TABLE_4 = (128, 100, 0.3, (60, 80), 0.0001)
TABLE_5 = (32, 100, 0.1, (60, 80), 0.0001)
"""Settings of CIFAR-10 (ResNet20), the first of five data sets and models."""


def settings(options: Options, printed: tuple[object, ...], num_nodes: int) -> Finding:
    given = PAPER[num_nodes]
    decays = tuple(round(EPOCHS * part) for part in DECAYS)
    ours = (given["batch-size"], EPOCHS, given["learning-rate"], decays, given["weight-decay"])
    text = "the full form has the settings of CIFAR-10 (ResNet20)"
    claims = [
        made(text, str(printed), str(ours), printed == ours),
        Claim("and those of four more data sets and models", "four rows", "not had", UNTESTED),
    ]
    rows = list(zip(SETTINGS, printed, ours, strict=True))
    return Finding(("setting", "paper", "here"), rows, claims)


table_4 = partial(settings, printed=TABLE_4, num_nodes=2)
table_5 = partial(settings, printed=TABLE_5, num_nodes=10)


def theorem_1(options: Options) -> Finding:
    """Compare the bound (6) with local SGD on two parabolas, of which one is drawn more often."""
    num_steps = 8
    rounds = options.pick(200, 2000)
    rate = 1 / num_steps  # Lemma 1: at most 1 / (L tau), of parabolas with L = 1
    claims = []
    rows = []
    for chance in (0.5, 0.9, 1.0):
        below = []
        cells = []
        for seed in options.seeds_or(range(PAIRS)):
            mean, gain = parabolas(chance, rate, num_steps, rounds, seed)
            bound = gradient_bound(gain, rate, rounds, num_steps, variance=chance * (1 - chance))
            below.append(bound - mean)
            cells.append((mean, bound))
        rows.append((chance, *(f"{value:.4f}" for value in np.mean(cells, axis=0))))
        text = f"the mean squared gradient is below the bound, sampling {chance:g}"
        claims.append(higher(text, "for any sampling p", below, form=".4f"))
    return Finding(("chance of the second", "mean squared gradient", "bound (6)"), rows, claims)


def gradient_bound(
    decrease: float, rate: float, rounds: int, num_steps: int, variance: float
) -> float:
    r"""Bound the mean squared gradient over rounds (Theorem 1, Eq. 6), for L = 1.

    .. math:: 2 (F(x_0) - F(x_T)) / (\eta T) + L \eta \tau^2 \sigma_p^2

    The paper has it for any sampling p. Its proof drops a positive term.

    >>> gradient_bound(1.0, 0.5, 100, num_steps=2, variance=0.25)
    0.54
    """
    return 2 * decrease / (rate * rounds) + rate * num_steps**2 * variance


def parabolas(
    chance: float, rate: float, num_steps: int, rounds: int, seed: int
) -> tuple[float, float]:
    """Run local SGD on 10 workers from the minimum of F, the mean of x^2 / 2 and (x - 1)^2 / 2.

    Return the mean squared gradient of F over the rounds and F(x_0) - F(x_T).
    """
    rng = np.random.default_rng(seed)
    start = 0.5
    x = start
    squares = []
    for _ in range(rounds):
        local = np.full(10, x)
        for _ in range(num_steps):
            local -= rate * (local - (rng.random(10) < chance))
        x = float(local.mean())
        squares.append((x - start) ** 2)
    return float(np.mean(squares)), -((x - start) ** 2) / 2
