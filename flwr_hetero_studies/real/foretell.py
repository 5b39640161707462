"""The same runs on an emulated fleet, whose devices take as long as the real ones did."""

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
    """A fleet whose nodes take longer for their first messages than for later ones."""

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
    """Emulate a run of the app on devices as measured with FedAvg."""
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

    drive(
        settings.strategy(len(SPEEDS)),
        grid,
        tasks.initial_arrays(settings),
        note,
        seed=settings.seed,
        rounds=settings.num_server_rounds,
        evaluate_fn=tasks.central_evaluate(settings),
    )
    curve = curve_of(lines)
    return {"metrics": reached(curve, target), "curve": curve}


def measured(
    links: Sequence[DeviceProfile],
    nodes: Sequence[Mapping[str, Any]],
    examples: int,
    reading: float,
) -> list[list[DeviceProfile]]:
    """Return the devices at the first messages and at later ones, for epochs of so many examples.

    ``reading``: the part of the seconds to train in which a node reads its data.
    """
    speeds = np.array([link.compute_factor for link in links])
    train_s, message_s = (np.array([node[n] for node in nodes]) for n in ("train_s", "message_s"))
    # The seconds of the work on the quickest node, by all nodes.
    epoch_s = float(np.median(train_s * speeds))
    start_s, wait_s = np.polyfit(1 / speeds, message_s - train_s, 1)
    # Waiting cannot be negative. If it would be, all the time is proportional to speed.
    if wait_s < 0:
        start_s = np.median((message_s - train_s) * speeds)
        wait_s = 0.0
    fixed_s = max(0.0, float(start_s)) + reading * epoch_s
    example_s = (1 - reading) * epoch_s / examples
    usual = [
        replace(link, wait_s=float(wait_s), start_s=fixed_s, seconds_per_example=example_s)
        for link in links
    ]
    # A warm node imports and reads only at its first messages.
    more_s = [np.maximum(0.0, np.array(node["first_s"]) - node["message_s"]) for node in nodes]
    early = [
        [replace(u, wait_s=u.wait_s + float(m[k])) for u, m in zip(usual, more_s, strict=True)]
        for k in range(min(map(len, more_s)))
    ]
    return [*early, usual]


def examples_of(settings: tasks.Settings) -> int:
    """Return the examples of an epoch, which are the same on all nodes."""
    return len(part_of(settings, 0))


def part_of(settings: tasks.Settings, node: int) -> tasks.Examples:
    part = tasks.load_partition(settings.dataset, node, len(SPEEDS), **settings.partitioning)
    return tasks.hold_out(part)[0]


def reading_share(settings: tasks.Settings) -> float:
    """Measure which part of a node's work in a new process is to read its data."""
    start_s = time.process_time()
    examples = part_of(settings, 0)
    read_s = time.process_time() - start_s
    model = tasks.make_model(settings.model, *settings.shape)
    sampler = UniformSampler(len(examples), settings.batch_size, seed=0)
    # The first steps warm up.
    for _ in range(2):
        start_s = time.process_time()
        tasks.train(model, examples, sampler, num_steps=TIMED_STEPS, lr=settings.learning_rate)
    epoch_s = (time.process_time() - start_s) / TIMED_STEPS * len(sampler)
    return read_s / (read_s + epoch_s)
