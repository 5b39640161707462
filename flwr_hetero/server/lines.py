"""A round's line for the history and for the log."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from logging import INFO
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np
from flwr.app import Message

from flwr_hetero._flwr import log
from flwr_hetero.exchange.context import Exchange
from flwr_hetero.exchange.nodes import is_simulated
from flwr_hetero.records import Latency, metrics_in, read_number

MAX_NODES = 100
"""Nodes in the table of an evaluation: those on which the model is worst."""

Record = dict[str, Any]
"""A round's line of the history."""


def complete(run: Any, record: Record) -> None:
    """Add to a record what is known when all evaluation is over."""
    fleet = run.fleet
    record |= {"virtual_s": fleet.clock.virtual_s, "failures": fleet.failures}
    record |= {"fairness": fleet.by_node} if fleet.by_node else {}
    # A mean alone may be that of one node.
    limited = fleet.reported.pop("limited", {})
    record |= {"limited": limited} if limited else {}
    for kind, metrics in fleet.reported.items():
        ranges = {name: [min(v), median(v), max(v)] for name, v in metrics.items() if v}
        record |= {f"{kind}_range": ranges} if ranges else {}


def new_record(run: Any, context: Exchange, messages: Sequence[Message]) -> Record:
    """Make a round's line for the history, as far as it is known after training."""
    total = sum(context.weights.values())
    return {
        "round": context.round,
        "virtual_s": run.fleet.clock.virtual_s,
        "simulated": is_simulated(run.grid),
        "train": {},
        "evaluate": {},
        "global": {},
        "selected": [context.identity(message.metadata.dst_node_id) for message in messages],
        "weights": {node: weight / total for node, weight in context.weights.items()},
        **({"shortened": context.shortened} if context.shortened else {}),
        **_times_by_node(context),
        "failures": [],
    }


def _times_by_node(context: Exchange) -> Record:
    """Return how long each node took for a message on average; of real nodes also by part."""
    latencies: dict[str, list[Latency]] = defaultdict(list)
    for metadata in (message.metadata for message in context.messages):
        if latency := context.latency.get(metadata.message_id):
            latencies[context.identity(metadata.dst_node_id)].append(latency)
    total = {node: sum(each.seconds for each in own) / len(own) for node, own in latencies.items()}
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    for node, own in latencies.items():
        divided = [each.parts for each in own if each.parts]
        for part in dict.fromkeys(part for parts in divided for part in parts):
            mean_s = fmean(parts.get(part, 0.0) for parts in divided)
            # Milliseconds are enough, because a line has a number for each node.
            seconds[part][node] = round(mean_s, 3)
    return {"latency": total, **({"seconds": dict(seconds)} if seconds else {})}


def metric_of(names: Sequence[str]) -> str:
    """Return the first name with "acc" in it, else with "loss"; empty if there is none."""
    return next((n for part in ("acc", "loss") for n in names if part in n.lower()), "")


def by_node(context: Exchange, replies: Sequence[Message]) -> Record:
    """Sum up how good a model is on each node: mean, mean of the worst tenth, and a table."""
    metrics = {
        context.identity(reply.metadata.src_node_id): own
        for reply in replies
        for own in metrics_in(reply.content).values()
    }
    metric = metric_of([name for own in metrics.values() for name in own])
    read = {node: read_number(own, metric) for node, own in metrics.items()}
    known = {node: value for node, value in read.items() if isfinite(value)}
    if not known:
        return {}
    is_loss = "acc" not in metric.lower()
    worst_first = dict(sorted(known.items(), key=lambda pair: pair[1], reverse=is_loss))
    values = [*worst_first.values()]
    return {
        "metric": metric,
        "nodes": len(known),
        "mean": float(np.mean(values)),
        "worst_tenth": float(np.mean(values[: -(-len(known) // 10)])),
        "by_node": dict(islice(worst_first.items(), MAX_NODES)),
    }


def keep_infos(run: Any, record: Record) -> None:
    """Note what wrappers say of an update of the model, which may not be the last of its round."""
    for wrapper in run.strategy.wrappers():
        if info := wrapper.round_info():
            record[wrapper.name] = joined(record.get(wrapper.name), info)


def finish_round(run: Any, record: Record) -> None:
    """Let every wrapper add to the record and see it: here it is written, and the run saved."""
    fleet = run.fleet
    run.round = record["round"]
    record |= {"wall_s": run.wall_s, **fleet.costs.until(fleet.clock.virtual_s)}
    # The innermost comes first, so that the outermost writes what all have added.
    for wrapper in reversed(run.strategy.wrappers()):
        wrapper.on_round_end(run, record)
    if run.round:
        log(INFO, "%s", log_line(run, record))
    run.logged_s = record["virtual_s"]


def log_line(run: Any, record: Record) -> str:
    """Write a round's line of the log: who trained for how long, how well, and who failed."""
    clock_s = record["virtual_s"]
    width = len(str(run.num_rounds))
    tiers = [part["tier"] for part in record.values() if isinstance(part, dict) and "tier" in part]
    parts = [
        f"{run.unit} {record['round']:>{width}}/{run.num_rounds}",
        *(f"tier {'-' if tier is None else tier}" for tier in tiers),
        # One node may train several times.
        f"{len(set(record['selected'])):>2} nodes",
        f"{clock_s - run.logged_s:7.2f} s  at {clock_s:6.1f} s",
    ]
    # The server's figures go before those of nodes.
    figures = record["train"] | record["evaluate"] | record["global"]
    numbers = {name: v for name, v in figures.items() if isinstance(v, int | float)}
    if name := metric_of([*reversed(numbers)]):
        ranges = record.get("train_range", {}) | record.get("evaluate_range", {})
        usual = "" if name in record["global"] else ranges.get(name, "")
        parts.append(f"{name} {numbers[name]:.4g}" + (usual and f" (median {usual[1]:.4g})"))
    if failed := list(dict.fromkeys(failure["node"] for failure in record["failures"])):
        more = f" and {len(failed) - 2} more" if len(failed) > 2 else ""
        parts.append(f"failed: {', '.join(failed[:2])}{more}")
    return "  ".join(parts)


def joined(before: Any, after: Any) -> Any:
    """Put two updates' figures together: lists in a row, tables by key, else the later one.

    >>> joined({"nodes": ["a"], "step": 1}, {"nodes": ["b"], "step": 2})
    {'nodes': ['a', 'b'], 'step': 2}
    """
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {key: joined(before.get(key), value) for key, value in after.items()}
    return after
