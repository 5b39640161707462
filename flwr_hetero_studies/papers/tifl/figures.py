"""Figures 1b and 3 to 9: vanilla, the static policies and Algorithm 2."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flwr_hetero.tifl.algorithm import VANILLA
from flwr_hetero_studies.core.experiment import ENOUGH, Claim, Finding, times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.tifl.runs import (
    ADAPTIVE,
    ALIKE,
    CAPPED,
    CIFAR_CPUS,
    COMBINED,
    FAST,
    LEVELS,
    MNIST_CPUS,
    PAPER,
    QUANTITY,
    SLOW,
    STATIC,
    UNIFORM,
    Plan,
    Trained,
    alike,
    classes,
    compare,
    lowest,
    outcome,
    percents,
    speed,
)


def same_time(text: str, published: str, ratios: Sequence[float]) -> Claim:
    least, most = min(ratios), max(ratios)
    here, holds = f"{least:.2f} to {most:.2f} of it", least >= 0.9 and most <= 1.1
    return Claim(f"{text} (each policy within 10 %)", published, here, holds)


def figure_1b(options: Options) -> Finding:
    plans = {f"non-IID({count})": Plan(partition=classes(count), nodes=20) for count in LEVELS}
    found = compare(options, plans | {"IID": Plan(nodes=20)}, [VANILLA])
    percent = {setting: one[VANILLA].accuracy for setting, one in found.items()}
    order, drop = list(percent.values()), percent["IID"] - percent["non-IID(2)"]
    claims = [
        Claim("the fewer classes a client has, the lower the accuracy (in this order)",
              "2 < 5 < 10 < IID", ", ".join(f"{name} {v:.1f}" for name, v in percent.items()),
              order == sorted(order)),
        Claim("with 2 classes per client accuracy drops by 18 points (at least half of that)",
              "18 points", f"{drop:.1f} points", drop >= 9),
    ]  # fmt: skip
    paper = {"non-IID(2), vanilla": "-18 points", "non-IID(5), vanilla": "a further -8 points"}
    paper |= {"non-IID(10), vanilla": "-6 points"}
    return outcome(found, claims, paper)


def figure_3a(options: Options) -> Finding:
    found = compare(options, {"resource": Plan(cpus=CIFAR_CPUS)}, STATIC)
    ours = found["resource"]
    by_then = {name: one.by_time.at(ours[FAST].seconds) for name, one in ours.items()}
    gains = {name: accuracy - by_then[VANILLA] for name, accuracy in by_then.items()}
    best = max(gains, key=lambda name: gains[name])
    claims = [
        times("fast takes less time than vanilla", 11, speed(ours, FAST)),
        times("even uniform takes less time than vanilla", 6, speed(ours, UNIFORM)),
        alike("the policies' accuracies hardly differ", "within 3.71", percents(ours)),
        Claim("if time is short, TiFL is more accurate than vanilla (at the end of fast, at "
              "least 2/3 of the paper's gain)", "up to 6.19 points",
              f"{gains[best]:.1f} points ({best})", gains[best] >= 6.19 * ENOUGH),
    ]  # fmt: skip
    return outcome(found, claims, {"resource, fast": "almost 11x", "resource, uniform": "over 6x"})


def figure_3b(options: Options) -> Finding:
    found = compare(options, {"quantity": Plan(partition=QUANTITY)}, STATIC)
    ours = found["quantity"]
    best = max(speed(ours, policy) for policy in STATIC)
    slow = percents(ours, (VANILLA, SLOW))
    claims = [
        times("unequal amounts of data alone give a speed-up, at best", 3, best),
        lowest("fast has 10 % of the data and loses accuracy", "an obvious drop", ours, FAST),
        alike("slow, with 30 % of the data, keeps its accuracy", "good accuracy", slow),
    ]
    return outcome(found, claims, {"quantity, fast": "up to 3x"})


def figure_4(options: Options) -> Finding:
    plans = {f"non-IID({n})": Plan(partition=classes(n), fast_seeds=1) for n in LEVELS}
    found = compare(options, plans | {"IID": Plan(fast_seeds=1)}, STATIC)
    iid, two = found["IID"], found["non-IID(2)"]
    ratios = [one[name].seconds / iid[name].seconds for one in found.values() for name in STATIC]
    lost = {name: iid[name].accuracy - two[name].accuracy for name in STATIC}
    least, most = min(lost.values()), max(lost.values())
    groups = (VANILLA, UNIFORM), (SLOW, "random", FAST)
    even, biased = (float(np.mean([lost[name] for name in names])) for names in groups)
    claims = [
        same_time("non-IID data do not change the training time of IID", "no impact", ratios),
        Claim("they cost accuracy under all policies (2 classes against IID)", "a lower accuracy",
              f"{least:.1f} to {most:.1f} points lost", least > 0),
        Claim("vanilla and uniform lose less than slow, random and fast (means)",
              "better resilience", f"{even:.1f} against {biased:.1f} points lost", even < biased),
    ]  # fmt: skip
    return outcome(found, claims)


def figure_5(options: Options) -> Finding:
    plan = Plan(MNIST_CPUS, classes(2), "mnist_cnn")
    policies = (VANILLA, UNIFORM, "fast1", "fast2", "fast3")
    found = compare(options, {"resource + non-IID(2)": plan}, policies)
    ours = found["resource + non-IID(2)"]
    seconds = [ours[policy].seconds for policy in policies]
    claims = [
        Claim("policies that are more aggressive towards fast tiers take less time (in this order)",
              " > ".join(policies), " > ".join(f"{value:.0f} s" for value in seconds),
              seconds == sorted(seconds, reverse=True)),
        alike("all but fast3 are close to vanilla", "close", percents(ours, policies[:-1])),
        lowest("fast3 falls short, for it ignores tier 5", "falls short", ours, "fast3"),
    ]  # fmt: skip
    return outcome(found, claims)


def figure_6a(options: Options) -> Finding:
    plans = {"resource": Plan(CIFAR_CPUS), "resource + non-IID(5)": Plan(CIFAR_CPUS, classes(5))}
    found = compare(options, plans, STATIC)
    even, skewed = found.values()
    ratios = [skewed[name].seconds / even[name].seconds for name in STATIC]
    means = [float(np.mean(list(percents(one).values()))) for one in found.values()]
    claims = [
        same_time("times are as with unequal resources alone", "similar", ratios),
        Claim("accuracy degrades slightly more (mean of the policies)", "slightly",
              f"{means[0]:.1f} to {means[1]:.1f}", means[1] < means[0]),
    ]  # fmt: skip
    return outcome(found, claims)


def figure_6b(options: Options) -> Finding:
    found = compare(options, {"combined": Plan(CIFAR_CPUS, COMBINED)}, STATIC)
    ours, both = found["combined"], (VANILLA, UNIFORM)
    by_then = [ours[name].by_time.at(ours[UNIFORM].seconds) for name in both]
    claims = [
        lowest("fast degrades a lot more", "a lot more", ours, FAST),
        alike("uniform is almost the same as vanilla", "almost the same", percents(ours, both)),
        Claim("in the same time TiFL gets further (uniform against vanilla when uniform ends)",
              "more iterations in the same time", f"{by_then[1]:.1f} against {by_then[0]:.1f}",
              by_then[1] > by_then[0]),
    ]  # fmt: skip
    return outcome(found, claims)


def better(ours: Mapping[str, Trained]) -> tuple[dict[str, float], str]:
    points = {name: ours[ADAPTIVE].accuracy - ours[name].accuracy for name in (VANILLA, UNIFORM)}
    return points, ", ".join(f"{value:+.2f} to {name}" for name, value in points.items())


def outperforms(setting: str, published: str, ours: Mapping[str, Trained]) -> Claim:
    points, here = better(ours)
    text = f"{setting}: adaptive is more accurate than vanilla and uniform"
    return Claim(text, published, here, min(points.values()) > 0)


def figure_7(options: Options) -> Finding:
    plans = {"amount": Plan(partition=QUANTITY), "class": Plan(partition=classes(5))}
    plans["combine"] = Plan(CIFAR_CPUS, COMBINED)
    found = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE, CAPPED))
    combined = found["combine"]
    share, (points, here) = speed(combined, VANILLA, ADAPTIVE), better(combined)
    claims = [
        *(outperforms(name, "outperforms", found[name]) for name in ("amount", "class")),
        Claim("combine: adaptive takes almost half of vanilla's time (at most 0.6)",
              "almost half", f"{share:.2f}", share <= 0.6),
        Claim(f"combine: as accurate as vanilla (within {ALIKE}), a point above uniform",
              "comparable; significantly", here,
              points[VANILLA] >= -ALIKE and points[UNIFORM] >= 1),
    ]  # fmt: skip
    return outcome(found, claims)


def figure_8(options: Options) -> Finding:
    plans = {f"non-IID({n})": Plan(partition=classes(n)) for n in LEVELS}
    found = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE))
    claims = [outperforms(name, "consistently outperforms", one) for name, one in found.items()]
    return outcome(found, claims)


def figure_9(options: Options) -> Finding:
    config = PAPER | {"optimizer": "sgd", "learning-rate": 0.004, "lr-decay": 1.0}
    partition = {"partition": "dirichlet", "alpha": 0.5}
    nodes, per_round = options.pick((60, 6), (182, 10))
    plan = Plan(CIFAR_CPUS, partition, "leaf_cnn", nodes, per_round, 2000)
    plan = replace(plan, config=options.pick(PAPER, config))
    found = compare(options, {"LEAF": plan}, (*STATIC, ADAPTIVE, CAPPED))
    ours = found["LEAF"]
    more = ours[SLOW].accuracy - ours[FAST].accuracy
    faster = [speed(ours, CAPPED, over) for over in (VANILLA, UNIFORM)]
    claims = [
        lowest("fast loses almost 10 points to vanilla", "-10 points", ours, FAST),
        Claim("slow is more accurate than fast, for its tier has more data", "+3 points",
              f"{more:+.1f} points", more > 0),
        alike("adaptive, with credits, is on par with vanilla and uniform", "82.1, 82.4, 82.6 %",
              percents(ours, (CAPPED, VANILLA, UNIFORM))),
        Claim("adaptive, with credits, takes less time than vanilla and uniform (at least 2/3 of "
              "it)", "7x and 2x", f"{faster[0]:.1f}x and {faster[1]:.1f}x",
              faster[0] >= 7 * ENOUGH and faster[1] >= 2 * ENOUGH),
    ]  # fmt: skip
    paper = {VANILLA: "82.4 %", UNIFORM: "82.6 %", ADAPTIVE: "82.1 %; 7x", SLOW: "75 %"}
    paper |= {FAST: "72 %", CAPPED: ""}
    return outcome(found, claims, {f"LEAF, {name}": text for name, text in paper.items()})
