"""What a comparison of runs shows, in words."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flwr_hetero.report.compare import verdict
from flwr_hetero.report.compare.verdict import Judge, Side, Speed, mean
from flwr_hetero.report.style import duration, figure, size, words

Names = tuple[str, str]
Sides = tuple[Side, Side]
NEVER = "never"
# Name of a figure of a result, how it is written, and what it is.
PRICES = (("bytes", size, "sent and received"), ("device_s", duration, "of device time"))
HOW_TO_EVALUATE = (
    "To measure the slowest nodes, set fraction_evaluate=1.0 in FedAvg(...) of the ServerApp, and "
    "give the ClientApp an @app.evaluate() function."
)


class Verdict(NamedTuple):
    """What runs show in comparison with a baseline."""

    text: str = ""
    """The outcome, and lines with the final values, the slowest nodes, the price and the reason."""
    winner: str | None = None
    """Name of the side that has the better final value or is faster, and is worse in neither."""
    speed: Speed | None = None


def say(judge: Judge, names: Names, sides: Sides, unlike: str = "") -> Verdict:
    """Say how the second group of runs compares with the first, the baseline.

    ``unlike`` is the reason why the two cannot be compared at all, if there is one.
    """
    has_finals, has_times, doubt = verdict.comparable(judge, [*sides[0], *sides[1]], unlike)
    speed = verdict.speed_up(*sides) if has_times else None
    better = verdict.better_side(judge, sides) if has_finals else None
    faster = verdict.faster_side(sides, speed, better) if has_times else None
    lines = [
        _time_sentence(judge, names, sides, speed, faster),
        _final_sentence(judge, names, sides, better, is_known=has_finals),
        slow_nodes_line(names, sides),
        price_line(sides),
        _round_sentence(sides, names[1]) if speed else "",
        doubt,
    ]
    winners = {names[side] for side in (better, faster) if side is not None}
    winner = winners.pop() if len(winners) == 1 else None
    return Verdict("\n".join(filter(None, lines)), winner, speed)


def _time_sentence(
    judge: Judge, names: Names, sides: Sides, speed: Speed | None, faster: int | None
) -> str:
    base, name = names
    target = f"{words(judge.metric)} {figure(judge.metric, judge.target)}"
    costs = [cost_text(judge.clock, mean(side, "to_target"), side[0].unit) for side in sides]
    count = sum(run.to_target is not None for run in sides[1])
    some = f" in {count} of {len(sides[1])} runs" if 0 < count < len(sides[1]) else ""
    if speed is None:
        if count == 0 and costs[0] == NEVER:
            return f"Neither {name} nor {base} reaches {target}."
        if count == 0:
            return f"{name} never reaches {target}, but {base} does after {costs[0]}."
        other = f"but {base} never does" if costs[0] == NEVER else f"and {base} after {costs[0]}"
        return f"{name} reaches {target} after {costs[1]}{some}, {other}."
    ratio = times(max(speed.factor, 1 / speed.factor))
    details = f"{costs[1]} to {target} instead of {costs[0]}"
    if faster is not None:
        comparison = f"{ratio} {'faster' if faster else 'slower'} than"
    else:
        comparison = "about as fast as"
        details += ", within one evaluation" if costs[0] != costs[1] else ""
    pairs = ""
    if speed.pairs > 1:
        is_above = speed.factor > 1
        low = speed.low if is_above else 1 / speed.high
        high = speed.high if is_above else 1 / speed.low
        pairs = f" ({times(low)} to {times(high)} over {speed.pairs} pairs)"
    return f"{name} is {comparison} {base}{some}{pairs}: {details}."


def _final_sentence(
    judge: Judge, names: Names, sides: Sides, better: int | None, *, is_known: bool
) -> str:
    metric = words(judge.metric)
    finals = [figure(judge.metric, mean(side, "end")) for side in sides]
    if better is not None:
        word = "lower" if judge.falls else "higher"
        value = finals[better]
        other = finals[1 - better]
        return f"{names[better]} has the {word} final {metric} ({value} against {other})."
    is_noise = is_known and finals[0] != finals[1]
    within = ", within the noise of one seed" if is_noise else ""
    return f"Final {metric}: {finals[1]} against {finals[0]}{within}."


def slow_nodes_line(names: Sequence[str], sides: Sequence[Side]) -> str:
    """Say how good the models of one or two sides are on the slowest nodes."""
    metrics = [side[0].node_metric for side in sides]
    for key, nodes in (("slow", "Slowest fifth"), ("worst", "Worst tenth")):
        values = [mean(side, key) for side in sides]
        if len(set(metrics)) == 1 and not np.isnan(values).any():
            shown = " against ".join(figure(metrics[0], value) for value in reversed(values))
            return f"{nodes} of the nodes: {words(metrics[0])} {shown} on their own data."
    missing = [name for name, metric in zip(names, metrics, strict=True) if not metric]
    where = " and ".join(missing or names)
    return f"Slowest nodes: unknown, since no node of {where} evaluated a model."


def price_line(sides: Sides) -> str:
    """Say what the two sides cost in bytes and device time; empty if nothing is known."""
    is_reached = all(run.to_target is not None for side in sides for run in side)
    label = "Price until then" if is_reached else "Price until then, or of the whole run"
    parts = []
    for key, write, what in PRICES:
        costs = [mean(side, key) for side in sides]
        if min(costs) > 0:
            ratio = f" ({costs[1] / costs[0]:.2g}x)" if is_reached else ""
            parts.append(f"{write(costs[1])} {what} instead of {write(costs[0])}{ratio}")
    return f"{label}: {', '.join(parts)}." if parts else ""


def _round_sentence(sides: Sides, name: str) -> str:
    """Say how long rounds take and how many are needed, which explains the speed-up."""
    base_unit = sides[0][0].unit
    unit = sides[1][0].unit
    base_s = mean(sides[0], "round_s")
    other_s = mean(sides[1], "round_s")
    if not min(base_s, other_s) > 0:
        return ""
    if unit != base_unit:
        # A server update is less work than a round, so their numbers cannot be compared.
        return f"A {unit} takes {duration(other_s)} and a {base_unit} {duration(base_s)}."
    before = mean(sides[0], "reached")
    after = mean(sides[1], "reached")
    return (
        f"A {unit} takes {duration(other_s)} instead of {duration(base_s)}, and {name} needs "
        f"{after:.0f} {unit}s instead of {before:.0f}."
    )


def times(factor: float) -> str:
    """Write a ratio."""
    return f"{factor:.1f}x"


def cost_text(clock: str, cost: float | None, unit: str = "round") -> str:
    """Write a cost by a clock; None or NaN if the target was never reached."""
    if cost is None or np.isnan(cost):
        return NEVER
    return f"{cost:.0f} {unit}s" if clock == "round" else duration(cost)
