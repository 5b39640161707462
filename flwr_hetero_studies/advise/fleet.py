"""The user's fleet, from a file of devices or from the history of a former run."""

from collections import Counter, defaultdict
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median, pstdev

from flwr_hetero.client.device import DeviceProfile, named_fleet
from flwr_hetero.errors import invalid
from flwr_hetero.report.history import HISTORY, as_dict, as_number, read_history
from flwr_hetero_studies.race.watch import epoch_s

AWAY, MOST_NODES = "error 5:", 60
"""Begin of the failure of a node that was away; so many nodes are emulated, evenly by speed."""


def read_fleet(path: str, nodes: int, examples: int, model_mb: float) -> list[DeviceProfile]:
    """Return the devices, the quickest first; an example's time is a share of 1/examples epoch."""
    where = Path(path).expanduser()
    if where.is_dir() or where.name == HISTORY:
        found = from_history(where if where.is_dir() else where.parent, examples)
    else:
        found = named_fleet(path, nodes)
    found.sort(key=lambda device: epoch_s(device, examples, model_mb))
    if len(found) < 3:
        raise invalid("fleet", path, "have at least 3 nodes", "give --nodes")
    # evenly by speed: the ends of a fleet decide more than its middle
    count = min(len(found), MOST_NODES)
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def from_history(folder: Path, examples: int) -> list[DeviceProfile]:
    """Estimate devices from what each node took, by the step, and how often it was away."""
    took: dict[str, list[float]] = defaultdict(list)
    asked, away = Counter[str](), Counter[str]()
    all_steps: list[float] = []
    for record in read_history(folder).rounds:
        steps = next((as_dict(v["num_steps"]) for v in map(as_dict, record.values())
                      if isinstance(v.get("num_steps"), dict)), {})  # fmt: skip
        for node, seconds in as_dict(record.get("latency")).items():
            if (time_s := as_number(seconds)) > 0:
                # times count by the step where nodes take different numbers of them
                count = as_number(steps.get(node, 1.0))
                took[node].append(time_s / count)
                all_steps += [count] if node in steps else []
        asked.update(map(str, record.get("selected") or ()))
        for failure in map(as_dict, record.get("failures") or ()):
            away[str(failure.get("node"))] += str(failure.get("reason", "")).startswith(AWAY)
    if not took:
        raise invalid("history", str(folder), "have the latency of nodes", "run some rounds first")
    epoch_steps = median(all_steps) if all_steps else 1.0
    return [
        DeviceProfile(
            1 / (median(times) * epoch_steps),
            # of the logarithm, as the emulation draws it
            jitter=pstdev([log(t) for t in times]) if len(times) > 2 else 0.0,
            availability=max(0.05, 1 - away[node] / max(asked[node], len(times))),
            seconds_per_example=1 / examples,
            name=node,
        )
        for node, times in took.items()
    ]


def for_task(
    devices: list[DeviceProfile], examples: int, model_mb: float, own: int, own_mb: float
) -> tuple[DeviceProfile, ...]:
    """Scale devices, so that epochs and transfers of the small task take what the user's do."""
    scale, ratio = examples / own, own_mb / model_mb
    return tuple(
        replace(d, seconds_per_example=d.seconds_per_example * scale,
                uplink_mbps=d.uplink_mbps * ratio, downlink_mbps=d.downlink_mbps * ratio)
        for d in devices
    )  # fmt: skip
