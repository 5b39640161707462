"""Figures 1b and 3 to 9: vanilla, the static policies and Algorithm 2."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flwr_hetero.tifl.algorithm import VANILLA
from flwr_hetero_studies.core.criteria import Claim, at_scale, falls, higher, made, times, within
from flwr_hetero_studies.core.curves import Vector
from flwr_hetero_studies.core.experiment import Finding
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.tifl.runs import (
    ADAPTIVE,
    CAPPED,
    CIFAR_CPUS,
    PAPER,
    Plan,
    Trained,
    compare,
    outcome,
)

MNIST_CPUS = (2.0, 1.0, 0.75, 0.5, 0.25)
UNIFORM = "uniform"
SLOW = "slow"
FAST = "fast"
STATIC = (VANILLA, SLOW, UNIFORM, "random", FAST)
COMBINED = {"partition": "quantity-classes", "classes-per-node": 5}
QUANTITY = {"partition": "quantity"}
LEVELS = (2, 5, 10)
"""Classes per client."""
ALIKE = 3.71
"""Points of accuracy that the paper calls a very small difference (section 5.2.2)."""


def classes(count: int) -> dict[str, str | int]:
    """Partition so that each client has examples of so many classes."""
    return {"partition": "classes", "classes-per-node": count}


def speed(runs: Mapping[str, Trained], policy: str, over: str = VANILLA) -> Vector:
    return np.divide(runs[over].seconds, runs[policy].seconds)


def lowest(text: str, published: str, runs: Mapping[str, Trained], policy: str) -> Claim:
    others = np.min([one.accuracy for name, one in runs.items() if name != policy], axis=0)
    gaps = np.subtract(others, runs[policy].accuracy)
    return higher(f"{text} (below all others)", published, gaps, unit=" points")


def alike(text: str, published: str, runs: Mapping[str, Trained], policies: Iterable[str]) -> Claim:
    """Claim that policies are as accurate as vanilla, with the whole intervals."""
    apart = [np.subtract(runs[name].accuracy, runs[VANILLA].accuracy) for name in policies]
    return within(f"{text} (within {ALIKE} points of vanilla)", published, *apart,
                  low=-ALIKE, high=ALIKE)  # fmt: skip


def same_time(text: str, published: str, ratios: ArrayLike) -> Claim:
    least = np.min(ratios)
    most = np.max(ratios)
    holds = least >= 0.9 and most <= 1.1
    # the emulated time of a node is that of its examples, whatever their classes
    here = f"{least:.2f} to {most:.2f} of it"
    return made(f"{text} (each policy within 10 %)", published, here, holds)


def figure_1b(options: Options) -> Finding:
    plans = {"IID": Plan(nodes=20)}
    plans |= {f"non-IID({n})": Plan(partition=classes(n), nodes=20) for n in LEVELS[::-1]}
    runs = compare(options, plans, [VANILLA])
    percent = {setting: one[VANILLA].accuracy for setting, one in runs.items()}
    drop = np.subtract(percent["IID"], percent["non-IID(2)"])
    claims = [
        falls("the fewer classes a client has, the lower the accuracy (in this order)",
              "IID > 10 > 5 > 2", percent, ".1f"),
        higher("with 2 classes per client accuracy drops by 18 points", "18 points", drop,
               size=18, form=".1f"),
    ]  # fmt: skip
    paper = {"non-IID(2), vanilla": "-18 points", "non-IID(5), vanilla": "a further -8 points"}
    paper |= {"non-IID(10), vanilla": "-6 points"}
    return outcome(runs, claims, paper)


def figure_3a(options: Options) -> Finding:
    runs = compare(options, {"resource": Plan(cpus=CIFAR_CPUS)}, STATIC)
    ours = runs["resource"]
    then = ours[FAST].seconds
    gain = np.subtract(ours[FAST].at(then), ours[VANILLA].at(then))
    claims = [
        times("fast takes less time than vanilla", 11, speed(ours, FAST)),
        times("even uniform takes less time than vanilla", 6, speed(ours, UNIFORM)),
        alike("the policies' accuracies hardly differ", "within 3.71", ours, STATIC[1:]),
        higher("if time is short, TiFL is more accurate than vanilla (fast, at its end)",
               "up to 6.19 points", gain, size=6.19, unit=" points"),
    ]  # fmt: skip
    return outcome(runs, claims, {"resource, fast": "almost 11x", "resource, uniform": "over 6x"})


def figure_3b(options: Options) -> Finding:
    runs = compare(options, {"quantity": Plan(partition=QUANTITY)}, STATIC)
    ours = runs["quantity"]
    claims = [
        times("unequal amounts of data alone give a speed-up (fast)", 3, speed(ours, FAST)),
        lowest("fast has 10 % of the data and loses accuracy", "an obvious drop", ours, FAST),
        alike("slow, with 30 % of the data, keeps its accuracy", "good accuracy", ours, (SLOW,)),
    ]
    return outcome(runs, claims, {"quantity, fast": "up to 3x"})


def figure_4(options: Options) -> Finding:
    plans = {f"non-IID({n})": Plan(partition=classes(n)) for n in options.pick(LEVELS[:1], LEVELS)}
    runs = compare(options, plans | {"IID": Plan()}, STATIC)
    iid = runs["IID"]
    two = runs["non-IID(2)"]
    ratios = [speed({**one, "IID": iid[n]}, n, "IID") for one in runs.values() for n in STATIC]
    lost = {name: np.subtract(iid[name].accuracy, two[name].accuracy) for name in STATIC}
    even, biased = (
        np.mean([lost[name] for name in names], axis=0)
        for names in ((VANILLA, UNIFORM), (SLOW, "random", FAST))
    )
    claims = [
        same_time("non-IID data do not change the training time of IID", "no impact",
                  np.mean(ratios, axis=1)),
        higher("they cost accuracy under all policies (2 classes against IID)",
               "a lower accuracy", *lost.values(), form=".1f"),
        higher("vanilla and uniform lose less than slow, random and fast (means)",
               "better resilience", biased - even, unit=" points"),
    ]  # fmt: skip
    return outcome(runs, claims)


def figure_5(options: Options) -> Finding:
    plan = Plan(MNIST_CPUS, classes(2), "mnist_cnn")
    policies = (VANILLA, UNIFORM, "fast1", "fast2", "fast3")
    runs = compare(options, {"resource + non-IID(2)": plan}, policies)
    ours = runs["resource + non-IID(2)"]
    # with two classes per client 30 rounds end far from where the accuracies do
    whole = not options.fast
    claims = [
        falls("policies that are more aggressive towards fast tiers take less time (in this order)",
              " > ".join(policies), {name: ours[name].seconds for name in policies}),
        at_scale(alike("all but fast3 are close to vanilla", "close", ours, policies[1:-1]), whole),
        at_scale(lowest("fast3 falls short, for it ignores tier 5", "falls short", ours, "fast3"),
                 whole),
    ]  # fmt: skip
    return outcome(runs, claims)


def figure_6a(options: Options) -> Finding:
    plans = {"resource": Plan(CIFAR_CPUS), "resource + non-IID(5)": Plan(CIFAR_CPUS, classes(5))}
    runs = compare(options, plans, STATIC)
    even, skewed = runs.values()
    ratios = [np.mean(np.divide(skewed[n].seconds, even[n].seconds)) for n in STATIC]
    lost = np.mean([np.subtract(even[n].accuracy, skewed[n].accuracy) for n in STATIC], axis=0)
    claims = [
        same_time("times are as with unequal resources alone", "similar", ratios),
        higher("accuracy degrades slightly more (mean of the policies)", "slightly", lost,
               unit=" points"),
    ]  # fmt: skip
    return outcome(runs, claims)


def figure_6b(options: Options) -> Finding:
    runs = compare(options, {"combined": Plan(CIFAR_CPUS, COMBINED)}, STATIC)
    ours = runs["combined"]
    then = ours[UNIFORM].seconds
    claims = [
        lowest("fast degrades a lot more", "a lot more", ours, FAST),
        alike("uniform is almost the same as vanilla", "almost the same", ours, (UNIFORM,)),
        higher("in the same time TiFL gets further (uniform against vanilla when uniform ends)",
               "more iterations in the same time",
               np.subtract(ours[UNIFORM].at(then), ours[VANILLA].at(then)), unit=" points"),
    ]  # fmt: skip
    return outcome(runs, claims)


def outperforms(setting: str, published: str, ours: Mapping[str, Trained]) -> Claim:
    more = [np.subtract(ours[ADAPTIVE].accuracy, ours[n].accuracy) for n in (VANILLA, UNIFORM)]
    text = f"{setting}: adaptive is more accurate than vanilla and uniform"
    return higher(text, published, *more)


LONG: dict[str, Any] = {"fast_rounds": 100, "fast_model": "mlp"}
"""Rounds in which Algorithm 2 has changed its probabilities ten times and more."""


def figure_7(options: Options) -> Finding:
    plans = {"amount": Plan(partition=QUANTITY, **LONG)}
    plans |= {"class": Plan(partition=classes(5), **LONG)}
    plans["combine"] = Plan(CIFAR_CPUS, COMBINED, **LONG)
    runs = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE))
    combined = runs["combine"]
    claims = [
        *(outperforms(name, "outperforms", runs[name]) for name in ("amount", "class")),
        times("combine: vanilla takes longer than adaptive", 2, speed(combined, ADAPTIVE)),
        alike("combine: adaptive is as accurate as vanilla", "comparable", combined, (ADAPTIVE,)),
        higher("combine: adaptive is more accurate than uniform", "significantly",
               np.subtract(combined[ADAPTIVE].accuracy, combined[UNIFORM].accuracy)),
    ]  # fmt: skip
    return outcome(runs, claims)


def figure_8(options: Options) -> Finding:
    plans = {f"non-IID({n})": Plan(partition=classes(n), **LONG) for n in LEVELS}
    runs = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE))
    claims = [outperforms(name, "consistently outperforms", one) for name, one in runs.items()]
    return outcome(runs, claims)


def figure_9(options: Options) -> Finding:
    config = PAPER | {"optimizer": "sgd", "learning-rate": 0.004, "lr-decay": 1.0}
    partition = {"partition": "dirichlet", "alpha": 0.5}
    nodes, per_round = options.pick((60, 6), (182, 10))
    plan = Plan(CIFAR_CPUS, partition, "leaf_cnn", nodes, per_round, 2000)
    plan = replace(plan, config=options.pick(PAPER, config))
    runs = compare(options, {"LEAF": plan}, (*STATIC, ADAPTIVE, CAPPED))
    ours = runs["LEAF"]
    percent = {name: one.accuracy for name, one in ours.items()}
    claims = [
        higher("fast is less accurate than vanilla", "10 points",
               np.subtract(percent[VANILLA], percent[FAST]), size=10, unit=" points"),
        higher("slow is more accurate than fast, for its tier has more data", "3 points",
               np.subtract(percent[SLOW], percent[FAST]), size=3, unit=" points"),
        alike("adaptive, with credits, and uniform are on par with vanilla", "82.1, 82.6, 82.4 %",
              ours, (CAPPED, UNIFORM)),
        times("adaptive, with credits, takes less time than vanilla", 7, speed(ours, CAPPED)),
        times("and than uniform", 2, speed(ours, CAPPED, UNIFORM)),
    ]  # fmt: skip
    paper = {VANILLA: "82.4 %", UNIFORM: "82.6 %", ADAPTIVE: "82.1 %; 7x", SLOW: "75 %"}
    paper |= {FAST: "72 %", CAPPED: ""}
    return outcome(runs, claims, {f"LEAF, {name}": text for name, text in paper.items()})
