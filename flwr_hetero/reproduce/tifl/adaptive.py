"""Figures 7 to 9: Algorithm 2."""

from collections.abc import Mapping
from dataclasses import replace

from flwr_hetero.reproduce.experiment import Claim, Options, Outcome
from flwr_hetero.reproduce.tifl.runs import (
    ADAPTIVE,
    ALIKE,
    CAPPED,
    CIFAR_CPUS,
    COMBINED,
    FAST,
    LEVELS,
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
from flwr_hetero.tifl.algorithm import VANILLA


def better(ours: Mapping[str, Trained]) -> dict[str, float]:
    """Return the points by which the adaptive policy is more accurate than the others."""
    own = ours[ADAPTIVE].accuracy
    return {name: own - ours[name].accuracy for name in (VANILLA, UNIFORM)}


def said(points: Mapping[str, float]) -> str:
    """Write gains in points."""
    return ", ".join(f"{value:+.2f} to {name}" for name, value in points.items())


def figure_7(options: Options) -> Outcome:
    """Compare the adaptive policy where amounts, classes or everything is unequal."""
    plans = {
        "amount": Plan(partition=QUANTITY),
        "class": Plan(partition=classes(5)),
        "combine": Plan(CIFAR_CPUS, COMBINED),
    }
    found = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE, CAPPED))
    amount, skewed, combined = (better(one) for one in found.values())
    share = found["combine"][ADAPTIVE].seconds / found["combine"][VANILLA].seconds
    text = "adaptive is more accurate than vanilla and uniform"
    claims = [
        Claim(f"amount: {text}", "outperforms", said(amount), min(amount.values()) > 0),
        Claim(f"class: {text}", "outperforms", said(skewed), min(skewed.values()) > 0),
        Claim(
            "combine: adaptive takes almost half of vanilla's time (at most 0.6)",
            "almost half",
            f"{share:.2f}",
            share <= 0.6,
        ),
        Claim(
            f"combine: as accurate as vanilla (within {ALIKE}), a point above uniform",
            "comparable; significantly",
            said(combined),
            combined[VANILLA] >= -ALIKE and combined[UNIFORM] >= 1,
        ),
    ]
    return outcome(found, claims)


def figure_8(options: Options) -> Outcome:
    """Compare the adaptive policy on equal devices by the number of classes per client."""
    plans = {f"non-IID({n})": Plan(partition=classes(n)) for n in LEVELS}
    found = compare(options, plans, (VANILLA, UNIFORM, ADAPTIVE))
    gains = {setting: better(one) for setting, one in found.items()}
    claims = [
        Claim(
            f"{setting}: adaptive is more accurate than vanilla and uniform",
            "consistently outperforms",
            said(gain),
            min(gain.values()) > 0,
        )
        for setting, gain in gains.items()
    ]
    return outcome(found, claims, by_time=False)


def figure_9(options: Options) -> Outcome:
    """Compare all policies on many small clients of unequal amounts and classes."""
    config = PAPER | {"optimizer": "sgd", "learning-rate": 0.004, "lr-decay": 1.0}
    partition = {"partition": "dirichlet", "alpha": 0.5}
    nodes, per_round = options.pick((60, 6), (182, 10))
    plan = Plan(CIFAR_CPUS, partition, "leaf_cnn", nodes, per_round, 2000)
    plan = replace(plan, config=options.pick(PAPER, config))
    found = compare(options, {"LEAF": plan}, (*STATIC, ADAPTIVE, CAPPED))
    ours = found["LEAF"]
    faster = speed(ours, CAPPED), speed(ours, CAPPED, UNIFORM)
    claims = [
        lowest("fast loses almost 10 points to vanilla", "-10 points", ours, FAST),
        Claim(
            "slow is more accurate than fast, for its tier has more data",
            "+3 points",
            f"{ours[SLOW].accuracy - ours[FAST].accuracy:+.1f} points",
            ours[SLOW].accuracy > ours[FAST].accuracy,
        ),
        alike(
            "adaptive, with credits, is on par with vanilla and uniform",
            "82.1, 82.4, 82.6 %",
            percents(ours, (CAPPED, VANILLA, UNIFORM)),
        ),
        Claim(
            "adaptive, with credits, takes less time than vanilla and uniform (at least 2/3 of it)",
            "7x and 2x",
            f"{faster[0]:.1f}x and {faster[1]:.1f}x",
            faster[0] >= 7 * 2 / 3 and faster[1] >= 2 * 2 / 3,
        ),
    ]
    paper = {VANILLA: "82.4 %", UNIFORM: "82.6 %", ADAPTIVE: "82.1 %; 7x", SLOW: "75 %"}
    paper |= {FAST: "72 %", CAPPED: ""}
    return outcome(found, claims, {f"LEAF, {name}": text for name, text in paper.items()})
