"""The figures of a run that matter most, as text."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.report.fleet_facts import TIFL, faults, node_facts, num_tiers, of_tiers
from flwr_hetero.report.history import History
from flwr_hetero.report.progress import best_round
from flwr_hetero.report.units import UNKNOWN, duration, figure, size, words


class Fact(NamedTuple):
    """One figure.

    Parameters
    ----------
    label, value, note : str
        What it is, the figure, and what else to know of it.
    """

    label: str
    value: str
    note: str


class TierRow(NamedTuple):
    """What a run did with one tier.

    Parameters
    ----------
    tier : int
        0 is the fastest.
    nodes : int
        Its size at the end.
    latency_s : float
        Median over its nodes, in seconds; NaN if unknown.
    rounds : int
        Rounds it trained in.
    seconds : float
        Time of these rounds by the fleet's clock.
    accuracy : float
        The last one measured; NaN if none was.
    """

    tier: int
    nodes: int
    latency_s: float
    rounds: int
    seconds: float
    accuracy: float


def summary(history: History, settings: Mapping[str, Any] | None = None) -> list[Fact]:
    """Sum up a run.

    Parameters
    ----------
    history : History
        A run with at least one round.
    settings : mapping, optional
        Its settings; ``num-server-rounds`` tells whether it came to its end.

    Returns
    -------
    list of Fact
        The most important first.

    Examples
    --------
    >>> rounds = [{"round": 0, "virtual_s": 0.0}, {"round": 1, "virtual_s": 75.0}]
    >>> [fact.value for fact in summary(History(tuple(rounds)))][:2]
    ['1', '1 min 15 s']
    """
    facts = [*_quality(history), _rounds(history, settings or {}), *_times(history)]
    return [*facts, _traffic(history), _nodes(history), _failures(history)]


def tier_rows(history: History) -> list[TierRow]:
    """Sum up each tier.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    list of TierRow
        Empty without TiFL.
    """
    nodes, tiers = node_facts(history), history.column(TIFL, "tier")
    seconds = np.diff(history.column("virtual_s"), prepend=np.nan)
    last = history.rounds[-1] if history.rounds else {}
    accuracy = dict(enumerate(of_tiers(last, "tier_accuracy")))
    return [
        TierRow(
            tier=tier,
            nodes=sum(node.tier == tier for node in nodes),
            latency_s=_median([node.typical_s for node in nodes if node.tier == tier]),
            rounds=int((tiers == tier).sum()),
            seconds=float(np.nansum(seconds[tiers == tier])),
            accuracy=accuracy.get(tier, float("nan")),
        )
        for tier in range(num_tiers(history))
    ]


def _quality(history: History) -> list[Fact]:
    metric = history.main_metric()
    if metric is None:
        return []
    values, best = history.metric(metric), best_round(history, metric)
    final = values[~np.isnan(values)][-1]
    note = f"best {figure(metric, values[best])} in round {history.rounds[best]['round']}"
    return [Fact(f"Final {words(metric)}", figure(metric, float(final)), note)]


def _rounds(history: History, settings: Mapping[str, Any]) -> Fact:
    planned = settings.get("num-server-rounds")
    note = "as planned" if planned == history.last_round else f"of {planned} planned"
    note = "" if planned is None else note
    return Fact("Rounds", str(history.last_round), note)


def _times(history: History) -> list[Fact]:
    virtual, wall = history.column("virtual_s"), history.column("wall_s")
    first = virtual[0] if history.rounds[0]["round"] == 0 else 0.0
    profiling = f"{duration(first)} of it before round 1" if first > 0 else ""
    facts = [
        Fact("Time on the fleet's clock", duration(virtual[-1]), profiling),
        Fact("Time on the server's clock", duration(wall[-1]), ""),
    ]
    actual = history.column(TIFL, "actual_s")[-1]
    if actual > 0:
        errors = {
            key: 100 * (history.column(TIFL, key)[-1] / actual - 1)
            for key in ("exact_estimate_s", "paper_estimate_s")
        }
        exact, paper = (f"{error:+.1f} %" for error in errors.values())
        facts.append(Fact("Estimated against actual time", exact, f"TiFL's Eq. 6: {paper}"))
    return facts


def _traffic(history: History) -> Fact:
    up, down = (float(np.nansum(history.column(key))) for key in ("bytes_up", "bytes_down"))
    return Fact("Traffic of training", size(up + down), f"{size(up)} up, {size(down)} down")


def _nodes(history: History) -> Fact:
    nodes = node_facts(history)
    trained = sum(node.selected > node.in_vain for node in nodes)
    return Fact("Nodes", str(len(nodes)) if nodes else UNKNOWN, f"{trained} of them trained")


def _failures(history: History) -> Fact:
    found = faults(history)
    count = sum(len(fault.rounds) for fault in found)
    rounds = len({number for fault in found for number in fault.rounds})
    return Fact("Failures", str(count), f"in {rounds} rounds" if count else "every reply was good")


def _median(values: list[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return float(np.median(known)) if known else float("nan")
