"""The user's fleet, from a file of devices or from the history of an earlier run."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import inf, isnan, log
from pathlib import Path
from statistics import fmean, median, pstdev

from flwr_hetero.client.device import DeviceProfile, message_time_s, named_fleet
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.report.history import HISTORY, PARTS, as_dict, as_number, read_history
from flwr_hetero_studies.race import watch

AWAY = "error 5:"
"""Start of the reason of a failure when the node was away."""
MOST_NODES = 60
"""At most so many nodes are emulated, evenly by speed."""
COSTS = {"flower": (2.2, 2.3, 3.0), "warm": (0.15, 0.15, 0.0), "none": (0.0, 0.0, 0.0)}
"""Seconds of a message, by what runs the nodes: round trips, the start on a whole core, and the
pause between two polls."""
MOST_JOBS = 200
"""Newest messages by which a node is timed."""
SPREAD = 1.5
"""Ratio between numbers of steps that is enough to separate their time from the rest."""
LEAST_S = 5e-4
"""Least time of a message's steps, because the history is in milliseconds."""
POLL = "wait"
"""The part of a message's seconds in which it waits until its node asks for work."""
Timed = tuple[float, float, float, float]
"""A message's steps, NaN if unknown, and its seconds for the steps, for all else, and to wait."""


def read_fleet(
    path: str,
    nodes: int,
    examples: int,
    model_mb: float,
    batch_size: int = 16,
    node: str = "none",
) -> list[DeviceProfile]:
    """Return the devices, the quickest first.

    ``node``: what runs the nodes, and so what a message costs on devices that do not state it.
    """
    wait_s, start_s, poll_s = COSTS[check_choice("node", node, tuple(COSTS))]
    where = Path(path).expanduser()
    if where.is_dir() or where.name == HISTORY:
        folder = where if where.is_dir() else where.parent
        found, is_real = from_history(folder, examples, examples / batch_size)
        lacking = [not is_real] * len(found)
    else:
        found = named_fleet(path, nodes)
        lacking = [message_time_s(device) == 0 for device in found]
    found = [
        replace(device, wait_s=device.wait_s + wait_s, start_s=start_s, poll_s=poll_s)
        if lacks
        else device
        for device, lacks in zip(found, lacking, strict=True)
    ]
    found.sort(key=lambda device: watch.epoch_s(device, examples, model_mb))
    if len(found) < 3:
        hint = "run it until all nodes have replied" if where.exists() else "give --nodes"
        raise invalid("fleet", path, f"have at least 3 nodes, and has {len(found)}", hint)
    # Take them evenly by speed, because the extremes of a fleet matter most.
    count = min(len(found), MOST_NODES)
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def is_limited(devices: Sequence[DeviceProfile]) -> bool:
    """Return whether the speed of some node's link is known, which it is not after a real run."""
    return any(min(each.uplink_mbps, each.downlink_mbps) < inf for each in devices)


def from_history(
    folder: Path, examples: int, epoch_steps: float
) -> tuple[list[DeviceProfile], bool]:
    """Estimate devices by how long each node took and how often it was away.

    Also return whether nodes were real, so that their times include what a message costs.
    """
    timed: dict[str, list[Timed]] = defaultdict(list)
    asked: Counter[str] = Counter()
    away: Counter[str] = Counter()
    rounds = read_history(folder).rounds
    for record in rounds:
        infos = [as_dict(value).get("num_steps") for value in record.values()]
        steps = next((info for info in infos if isinstance(info, dict)), {})
        parts = {name: as_dict(times) for name, times in as_dict(record.get("seconds")).items()}
        for node, seconds in as_dict(record.get("latency")).items():
            time_s = as_number(seconds)
            if time_s > 0:
                own_s = max(LEAST_S, as_number(parts.get("steps", {}).get(node, time_s)))
                total_s = sum(as_number(parts.get(part, {}).get(node, 0.0)) for part in PARTS)
                wait_s = as_number(parts.get(POLL, {}).get(node, 0.0))
                # Without parts, the time outside the app is unknown.
                rest_s = max(0.0, total_s - own_s - wait_s)
                timed[node].append((as_number(steps.get(node)), own_s, rest_s, wait_s))
        asked.update(map(str, record.get("selected") or ()))
        for failure in map(as_dict, record.get("failures") or ()):
            away[str(failure.get("node"))] += str(failure.get("reason", "")).startswith(AWAY)
    if not timed:
        raise invalid("history", str(folder), "have the latency of nodes", "run some rounds first")
    estimates = {node: estimate(own[-MOST_JOBS:], epoch_steps) for node, own in timed.items()}
    # The quickest node is the reference device.
    quickest_s = min(epoch_s for epoch_s, *_ in estimates.values())
    devices = []
    for node, (epoch_s, fixed_s, jitter) in estimates.items():
        device = DeviceProfile(
            quickest_s / epoch_s,
            jitter=jitter,
            availability=max(0.05, 1 - away[node] / max(asked[node], len(timed[node]))),
            wait_s=fixed_s,
            # An instruction comes at any moment of the pause between two polls.
            poll_s=2 * fmean(wait_s for *_, wait_s in timed[node][-MOST_JOBS:]),
            seconds_per_example=quickest_s / examples,
            name=node,
        )
        devices.append(device)
    return devices, not any(record.get("simulated") for record in rounds)


def estimate(messages: Sequence[Timed], epoch_steps: float) -> tuple[float, float, float]:
    """Estimate a node's seconds for an epoch, those of a message besides, and its jitter."""
    # A message without a number of steps is for an epoch.
    jobs = [(1.0 if isnan(steps) else steps / epoch_steps, s) for steps, s, *_ in messages]
    epoch_s = median(time_s / epochs for epochs, time_s in jobs)
    fixed_s = 0.0
    # The first message has costs that later ones do not have.
    later = jobs[1:] if len(jobs) > 2 else jobs
    slopes = [(t - u) / (e - f) for (e, t), (f, u) in combinations(later, 2) if e != f]
    sizes = [epochs for epochs, _ in later]
    if max(sizes) >= SPREAD * min(sizes):
        # Fit a robust line (Theil and Sen): its slope is an epoch, its start is fixed.
        slope_s = median(slopes)
        start_s = median(time_s - slope_s * epochs for epochs, time_s in later)
        if slope_s > 0 and start_s > 0:
            epoch_s = slope_s
            fixed_s = start_s
    # The emulation draws jitter as a normal logarithm.
    logs = [log(time_s / (fixed_s + epoch_s * epochs)) for epochs, time_s in jobs]
    jitter = pstdev(logs) if len(logs) > 2 else 0.0
    return epoch_s, fixed_s + median(rest_s for *_, rest_s, _ in messages), jitter


def for_task(
    devices: list[DeviceProfile], examples: int, model_mb: float, own: int, own_mb: float
) -> tuple[DeviceProfile, ...]:
    """Scale devices, so that epochs and transfers of the small task take as long as the user's."""
    scale = examples / own
    ratio = own_mb / model_mb
    return tuple(
        replace(d, seconds_per_example=d.seconds_per_example * scale,
                uplink_mbps=d.uplink_mbps * ratio, downlink_mbps=d.downlink_mbps * ratio)
        for d in devices
    )  # fmt: skip
