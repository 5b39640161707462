"""The same runs on an emulated fleet, whose devices cost what the real ones were measured to."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies import tasks
from flwr_hetero_studies.core.apps import app_modules
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.real.race import Found, curve_of, reached
from flwr_hetero_studies.real.workloads import SPEEDS

TIMED_STEPS = 20


class StartingGrid(LocalGrid):
    """A fleet whose nodes have another cost for their first messages than for later ones."""

    later: Mapping[int, list[DeviceProfile]]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = list(messages)
        ids = super().push_messages(asked)
        for node in {message.metadata.dst_node_id for message in asked}:
            if self.later[node]:
                self.set_profile(node, self.later[node].pop(0))
        return ids


def foretell(
    config: dict[str, Any],
    links: Sequence[DeviceProfile],
    nodes: Mapping[str, Mapping[str, Any]],
    warm: bool,
    target: float | None,
    budget_s: float,
) -> Found:
    """Emulate a run of the app on devices as they were measured with FedAvg on free links."""
    app, task = app_modules("fleet", "fleet_app")
    settings = task.FleetSettings.from_run_config(config | {"fleet": "uniform"})
    share = 0.0 if warm else reading_share(settings)
    first, *later = measured(links, list(nodes.values()), examples_of(settings), share)
    grid = StartingGrid(app, first, seed=settings.seed, run_config=config)
    grid.later = {
        n: list(own) for n, own in zip(grid.get_node_ids(), zip(*later, strict=True), strict=True)
    }
    lines: list[tuple[dict[str, Any], float]] = []

    def note(moment: Moment) -> None:
        lines.append((dict(moment.record), moment.virtual_s))
        found = reached(curve_of(lines), target)["target_s"] if target is not None else None
        if moment.virtual_s > budget_s or found is not None:
            raise Enough

    strategy, rounds = settings.strategy(len(SPEEDS)), settings.num_server_rounds
    how: dict[str, Any] = {"seed": settings.seed, "rounds": rounds}
    evaluate = tasks.central_evaluate(settings)
    drive(strategy, grid, tasks.initial_arrays(settings), note, evaluate_fn=evaluate, **how)
    curve = curve_of(lines)
    return {"metrics": reached(curve, target), "curve": curve}


def measured(
    links: Sequence[DeviceProfile],
    nodes: Sequence[Mapping[str, Any]],
    examples: int,
    reading: float,
) -> list[list[DeviceProfile]]:
    """Return devices as measured in epochs of so many examples: at the first messages, and later.

    ``reading``: part of the seconds to train in which a node reads its data.
    """
    speeds = np.array([link.compute_factor for link in links])
    train_s, message_s = (np.array([node[n] for node in nodes]) for n in ("train_s", "message_s"))
    # what work takes on the quickest, by all nodes
    epoch_s = float(np.median(train_s * speeds))
    start_s, wait_s = np.polyfit(1 / speeds, message_s - train_s, 1)
    # waiting is no less than nothing: all of it is proportional then
    if wait_s < 0:
        start_s, wait_s = np.median((message_s - train_s) * speeds), 0.0
    fixed_s = max(0.0, float(start_s)) + reading * epoch_s
    example_s = (1 - reading) * epoch_s / examples
    usual = [
        replace(link, wait_s=float(wait_s), start_s=fixed_s, seconds_per_example=example_s)
        for link in links
    ]
    # a warm node imports and reads at first only
    more_s = [np.maximum(0.0, np.array(node["first_s"]) - node["message_s"]) for node in nodes]
    early = [
        [replace(u, wait_s=u.wait_s + float(m[k])) for u, m in zip(usual, more_s, strict=True)]
        for k in range(min(map(len, more_s)))
    ]
    return [*early, usual]


def examples_of(settings: tasks.Settings) -> int:
    """Return the examples of an epoch: all nodes have equally many."""
    return len(part_of(settings, 0))


def part_of(settings: tasks.Settings, node: int) -> tasks.Examples:
    how = settings.partitioning
    return tasks.hold_out(tasks.load_partition(settings.dataset, node, len(SPEEDS), **how))[0]


def reading_share(settings: tasks.Settings) -> float:
    """Measure which part of a node's work in a new process is the reading of its data."""
    start_s = time.process_time()
    examples = part_of(settings, 0)
    read_s = time.process_time() - start_s
    model = tasks.make_model(settings.model, *settings.shape)
    sampler = UniformSampler(len(examples), settings.batch_size, seed=0)
    # the first steps warm up
    for _ in range(2):
        start_s = time.process_time()
        tasks.train(model, examples, sampler, num_steps=TIMED_STEPS, lr=settings.learning_rate)
    epoch_s = (time.process_time() - start_s) / TIMED_STEPS * len(sampler)
    return read_s / (read_s + epoch_s)
