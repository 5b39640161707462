"""The user's fleet, from a file of devices or from the history of a former run."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import inf, isnan, log
from pathlib import Path
from statistics import median, pstdev

from flwr_hetero.client.device import DeviceProfile, named_fleet
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.report.history import HISTORY, PARTS, as_dict, as_number, read_history
from flwr_hetero_studies.race import watch

AWAY, MOST_NODES = "error 5:", 60
"""Begin of the failure of a node that was away; so many nodes are emulated, evenly by speed."""
COSTS = {"flower": (3.7, 2.3), "warm": (0.15, 0.15), "none": (0.0, 0.0)}
"""Seconds that a message costs, by what runs the nodes: of waiting, and of a whole core's start."""
MOST_JOBS, SPREAD = 200, 1.5
"""Newest messages that a node is timed by; between their steps, to tell these from the rest."""
LEAST_S = 5e-4
"""Of a message's steps: the history is in milliseconds."""
Timed = tuple[float, float, float]
"""A message's steps, NaN if unknown, and its seconds for them and for all else, as measured."""


def read_fleet(
    path: str,
    nodes: int,
    examples: int,
    model_mb: float,
    batch_size: int = 16,
    node: str = "none",
) -> list[DeviceProfile]:
    """Return the devices, the quickest first; an example's time is a share of 1/examples epoch.

    ``node``: what a message costs on devices that do not say it.
    """
    wait_s, start_s = COSTS[check_choice("node", node, tuple(COSTS))]
    where = Path(path).expanduser()
    if where.is_dir() or where.name == HISTORY:
        folder = where if where.is_dir() else where.parent
        found, is_real = from_history(folder, examples, examples / batch_size)
        lacking = [not is_real] * len(found)
    else:
        found = named_fleet(path, nodes)
        lacking = [device.wait_s + device.start_s == 0 for device in found]
    found = [
        replace(device, wait_s=device.wait_s + wait_s, start_s=start_s) if lacks else device
        for device, lacks in zip(found, lacking, strict=True)
    ]
    found.sort(key=lambda device: watch.epoch_s(device, examples, model_mb))
    if len(found) < 3:
        hint = "run it until all nodes have replied" if where.exists() else "give --nodes"
        raise invalid("fleet", path, f"have at least 3 nodes, and has {len(found)}", hint)
    # evenly by speed: the ends of a fleet decide more than its middle
    count = min(len(found), MOST_NODES)
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def is_limited(devices: Sequence[DeviceProfile]) -> bool:
    """Return whether some node's link is of a known speed; that of a real run's nodes is not."""
    return any(min(each.uplink_mbps, each.downlink_mbps) < inf for each in devices)


def from_history(
    folder: Path, examples: int, epoch_steps: float
) -> tuple[list[DeviceProfile], bool]:
    """Estimate devices from what each node took and how often it was away.

    Also whether nodes were real, so that their times tell what a message costs.
    """
    timed: dict[str, list[Timed]] = defaultdict(list)
    asked, away = Counter[str](), Counter[str]()
    rounds = read_history(folder).rounds
    for record in rounds:
        steps = next((as_dict(v["num_steps"]) for v in map(as_dict, record.values())
                      if isinstance(v.get("num_steps"), dict)), {})  # fmt: skip
        parts = {p: as_dict(own) for p, own in as_dict(record.get("seconds")).items()}
        for node, seconds in as_dict(record.get("latency")).items():
            if (time_s := as_number(seconds)) > 0:
                own_s = max(LEAST_S, as_number(parts.get("steps", {}).get(node, time_s)))
                total_s = sum(as_number(parts.get(p, {}).get(node, 0.0)) for p in PARTS)
                # without parts nothing is known of what was outside of the app
                rest_s = max(0.0, total_s - own_s)
                timed[node].append((as_number(steps.get(node)), own_s, rest_s))
        asked.update(map(str, record.get("selected") or ()))
        for failure in map(as_dict, record.get("failures") or ()):
            away[str(failure.get("node"))] += str(failure.get("reason", "")).startswith(AWAY)
    if not timed:
        raise invalid("history", str(folder), "have the latency of nodes", "run some rounds first")
    known = {node: estimate(own[-MOST_JOBS:], epoch_steps) for node, own in timed.items()}
    quickest_s, found = min(epoch_s for epoch_s, *_ in known.values()), []
    for node, (epoch_s, wait_s, jitter) in known.items():
        present = max(0.05, 1 - away[node] / max(asked[node], len(timed[node])))
        how = {"jitter": jitter, "availability": present, "wait_s": wait_s}
        # the quickest is the reference
        how["seconds_per_example"] = quickest_s / examples
        found.append(DeviceProfile(quickest_s / epoch_s, **how, name=node))
    return found, not any(record.get("simulated") for record in rounds)


def estimate(messages: Sequence[Timed], epoch_steps: float) -> tuple[float, float, float]:
    """Estimate a node's seconds of an epoch and of a message besides, and its jitter."""
    # a job without a number of steps is an epoch
    jobs = [(1.0 if isnan(steps) else steps / epoch_steps, s) for steps, s, _ in messages]
    epoch_s, own_s = median(time_s / epochs for epochs, time_s in jobs), 0.0
    # the first message warms up
    later = jobs[1:] if len(jobs) > 2 else jobs
    slopes = [(t - u) / (e - f) for (e, t), (f, u) in combinations(later, 2) if e != f]
    sizes = [epochs for epochs, _ in later]
    if max(sizes) >= SPREAD * min(sizes) and (slope := median(slopes)) > 0:
        # the slope of a robust line through them (Theil and Sen), and where it begins
        begin_s = median(time_s - slope * epochs for epochs, time_s in later)
        epoch_s, own_s = (slope, begin_s) if begin_s > 0 else (epoch_s, own_s)
    # of the logarithm, as the emulation draws it
    logs = [log(time_s / (own_s + epoch_s * epochs)) for epochs, time_s in jobs]
    jitter = pstdev(logs) if len(logs) > 2 else 0.0
    return epoch_s, own_s + median(rest_s for *_, rest_s in messages), jitter


def for_task(
    devices: list[DeviceProfile], examples: int, model_mb: float, own: int, own_mb: float
) -> tuple[DeviceProfile, ...]:
    """Scale devices, so that epochs and transfers of the small task take what the user's do."""
    # what a message costs besides stays as it is
    scale, ratio = examples / own, own_mb / model_mb
    return tuple(
        replace(d, seconds_per_example=d.seconds_per_example * scale,
                uplink_mbps=d.uplink_mbps * ratio, downlink_mbps=d.downlink_mbps * ratio)
        for d in devices
    )  # fmt: skip
