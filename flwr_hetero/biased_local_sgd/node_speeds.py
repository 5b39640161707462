"""How fast each node computes and transfers, smoothed over its rounds."""

from collections.abc import Iterable
from math import ceil, inf, isfinite
from statistics import median_low
from typing import NamedTuple

from flwr.app import ConfigRecord, Message

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.algorithm import SAME_CLASS_RATIO, class_gamma, fast_class
from flwr_hetero.records import read_number
from flwr_hetero.server.context import Latency

SMOOTHING = 0.5
"""Weight of the past in a node's measured times."""
QUICK_SHARE = 0.1
"""Of the nodes measured, those quicker than the one that a deadline is made for.

It is at least half of what the quickest third needs, so that fewer nodes cannot set it.
"""
LONGEST_S = 1e9
"""Times are kept within 1/LONGEST_S and LONGEST_S: a node may report anything."""


MOST_PASSES = 1_000
"""Local epochs of a message that are believed."""


class Job(NamedTuple):
    """What a node would do in a round of FedAvg: passes over its data, steps, and examples."""

    passes: int
    steps: float
    """Infinite if unknown."""
    examples: float


class NodeSpeeds:
    """Smoothed seconds per step and per message of every node measured so far.

    ``link_s`` is the fixed cost of a message: its transfer, and all else that is no step.
    ``jobs`` is what each node would do in a round of FedAvg.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.step_s: dict[str, float] = {}
        self.link_s: dict[str, float] = {}

    def observe(self, node: str, steps: int, compute_s: float, link_s: float) -> None:
        """Update a node's times with those of a round."""
        step_s = min(max(compute_s / steps, 1 / LONGEST_S), LONGEST_S)
        for times, time_s in ((self.step_s, step_s), (self.link_s, min(link_s, LONGEST_S))):
            if node in times:
                time_s = SMOOTHING * times[node] + (1 - SMOOTHING) * time_s
            times[node] = time_s

    def note_job(self, node: str, reply: Message, steps: int) -> None:
        """Learn from a reply of so many steps what the node's whole job would be."""
        (metrics,) = reply.content.metric_records.values()
        work = reply.content.config_records.get(keys.WORK, ConfigRecord())
        passes = min(max(1, int(read_number(work, keys.PASSES, 1.0))), MOST_PASSES)
        examples = passes * read_number(metrics, keys.NUM_EXAMPLES, 0.0)
        processed = read_number(metrics, keys.EXAMPLES_PROCESSED, 0.0)
        batch = processed / steps
        whole = read_number(work, keys.JOB_STEPS, examples / batch if batch > 0 else inf)
        known = isfinite(whole) and whole >= 1
        self.jobs[node] = Job(passes, whole if known else inf, examples)

    def usual_passes(self) -> int:
        """Return the local epochs of most nodes."""
        return median_low([job.passes for job in self.jobs.values()]) if self.jobs else 1

    def classes(self) -> tuple[set[str], float]:
        """Return the fast nodes, and gamma between the two classes.

        Less than a third of the nodes are no class: they count as a little faster than a third.
        """
        least_s = _third(self.step_s.values()) / SAME_CLASS_RATIO
        step_s = [max(time_s, least_s) for time_s in self.step_s.values()]
        fast = fast_class(step_s)
        names = {node for node, is_fast in zip(self.step_s, fast, strict=True) if is_fast}
        return names, class_gamma(step_s, fast)

    def quick_round_s(self, num_steps: int, *, with_link: bool = True) -> float:
        """Return the seconds that a quick node needs; a few cannot set it."""
        link_s = self.link_s if with_link else dict.fromkeys(self.link_s, 0.0)
        rounds_s = sorted(link_s[n] + num_steps * self.step_s[n] for n in self.step_s)
        if not rounds_s:
            return inf
        quick_s = rounds_s[max(1, int(QUICK_SHARE * len(rounds_s))) if len(rounds_s) > 3 else 0]
        return max(quick_s, _third(rounds_s) / 2)


def divided(reply: Message, latency: Latency, steps: int, seen_s: float) -> tuple[float, float]:
    """Divide a node's latency into computing and the fixed cost of a message.

    ``seen_s`` is the round trip by the same clock, 0 if that is unknown.
    """
    compute_s, fixed_s = latency.seconds, 0.0
    work = reply.content.config_records.get(keys.WORK, ConfigRecord())
    if latency.emulated:
        timing = reply.content.config_records[keys.TIMING]
        fixed_s = read_number(timing, keys.TRANSFER_TIME, 0.0)
        compute_s -= fixed_s
    elif (step_s := read_number(work, keys.STEP_TIME, 0.0)) > 0:
        compute_s = min(steps * step_s, latency.seconds)
        fixed_s = latency.seconds - compute_s
    if latency.source != "observed":
        fixed_s = max(fixed_s, round(seen_s - compute_s, 6))  # no rounding errors
    return compute_s, fixed_s


def _third(times_s: Iterable[float]) -> float:
    """Return the longest time of the quickest third."""
    ordered = sorted(times_s)
    return ordered[ceil(len(ordered) / 3) - 1] if ordered else 0.0
