"""Advice on a fleet: rank settings by runs of a small task, and recommend one."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from logging import INFO
from math import prod

from flwr.app import RecordDict

from flwr_hetero._flwr import log
from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_choice, check_count, check_number
from flwr_hetero.records import payload_bytes
from flwr_hetero_studies.advise.candidates import BASES, Candidate, candidates
from flwr_hetero_studies.advise.fleet import for_task, is_limited, read_fleet
from flwr_hetero_studies.advise.simulate import Point, Row, Simulation, rank
from flwr_hetero_studies.advise.task import BATCH_SIZE, EXAMPLES, RATES, run_config, small_task
from flwr_hetero_studies.core.bench import process_pool

SEEDS = 3
PARTITIONS = {"mixed": "dirichlet", "slow nodes hold classes alone": "classes-by-speed"}
"""How data may be divided, which only the user knows."""
SLOW_LESS = 0.05
"""Accuracy on the slow nodes' data that a setting may have less than the base."""
ROUNDS = 40
ROUNDS_S = 60.0
"""With so many rounds of FedAvg, advice takes about these seconds on two cores."""
UNKNOWN = (
    "It trains a small network on generated data: your own model and data may rank close settings "
    "differently. Links, sizes and what a message costs are as you gave them, or as a real run's "
    "history has them."
)


Track = Callable[[Iterable[list[Point]], str, int], Iterable[list[Point]]]
"""Shows how many of the results of simulations are there."""


@dataclass(frozen=True)
class Advice:
    """A ranking for each way that data may be divided."""

    devices: list[DeviceProfile]
    clients_per_round: int
    fast_steps: int
    rows: dict[str, dict[str, Row]]
    """The rows by division and name, the best first."""
    base: str = "FedAvg"

    def rows_of(self, name: str) -> dict[str, Row]:
        """Return a setting's rows, by the division of the data."""
        return {task: rows[name] for task, rows in self.rows.items()}

    def order(self) -> list[str]:
        """Name the settings in the order of their speed-ups, with the same weight for each task.

        If some reached the target in all their runs, the others are left out.
        """
        names = next(iter(self.rows.values()))
        rows = {name: self.rows_of(name).values() for name in names}
        sure = [name for name in names if all(row.reached == row.seeds for row in rows[name])]
        return sorted(sure or [*names], key=lambda name: -prod(row.speedup for row in rows[name]))

    @property
    def best(self) -> Candidate:
        return self._candidate(self.order()[0])

    @property
    def fair(self) -> Candidate | None:
        """The best setting that is never much worse than the base on the slow nodes' data."""
        names = (name for name in self.order() if self.unfair_in(name) is None)
        return next(map(self._candidate, names), None)

    def unfair_in(self, name: str) -> str | None:
        """Return the division where a setting is far below the base on the slow nodes' data."""
        less = {task: rows[self.base].slow - rows[name].slow for task, rows in self.rows.items()}
        worst = max(less, key=lambda task: less[task])
        return worst if less[worst] > SLOW_LESS else None

    def _candidate(self, name: str) -> Candidate:
        return next(iter(self.rows_of(name).values())).candidate


def advise(
    path: str,
    *,
    nodes: int = 20,
    clients_per_round: int | None = None,
    examples: int = 256,
    batch_size: int = 16,
    model_mb: float = 1.0,
    node: str = "flower",
    optimizer: str = "sgd",
    base: str = "fedavg",
    seconds: float = ROUNDS_S,
    jobs: int | None = None,
    seed: int = 0,
    track: Track = lambda results, text, total: results,
) -> Advice:
    """Rank settings on a fleet, by simulations that take about ``seconds`` on two cores.

    ``track`` is called with the results of simulations, a text and their number, and may show how
    many are done.
    """
    check_choice("optimizer", optimizer, tuple(RATES))
    check_choice("base", base, BASES)
    check_count("nodes", nodes, 3)
    check_count("examples", examples, 1)
    check_count("batch_size", batch_size, 1)
    check_number("model_mb", model_mb, "(0, inf)")
    check_number("seconds", seconds, "(0, inf)")
    devices = read_fleet(path, nodes, examples, model_mb, batch_size, node=node)
    per_round = clients_per_round or max(2, round(0.15 * len(devices)))
    check_count("clients_per_round", per_round, 1)
    # With fewer rounds FedAvg would not learn.
    rounds = max(10, round(ROUNDS * seconds / ROUNDS_S))
    choices = candidates(
        len(devices), min(per_round, len(devices)), limited=is_limited(devices), base=base
    )

    def make(partition: str, choice: Candidate, seed: int, target: float | None) -> Simulation:
        task = small_task(len(devices), EXAMPLES, partition, seed, optimizer)
        task_mb = payload_bytes(RecordDict({"arrays": task.first()})) / 1e6
        # The small task has to wait for devices and links as the user's would.
        profiles = for_task(devices, examples, model_mb, EXAMPLES, task_mb)
        return Simulation(
            choice, task, profiles, EXAMPLES // BATCH_SIZE, per_round, rounds, seed, target,
            run_config(optimizer),
        )  # fmt: skip

    rows = {}
    with process_pool(jobs or os.cpu_count()) as pool:

        def execute(work: Iterable[Simulation]) -> list[list[Point]]:
            simulations = list(work)
            running = pool.map(Simulation.run, simulations)
            results = list(track(running, "Emulating the fleet", len(simulations)))
            log(INFO, "%d runs are done", len(results))
            return results

        for name, partition in PARTITIONS.items():
            seeds = range(seed, seed + SEEDS)
            ranked = rank(choices, seeds, partial(make, partition), execute)
            rows[name] = {row.candidate.name: row for row in ranked}
    steps = max(1, round(examples / batch_size))
    return Advice(devices, per_round, steps, rows, choices[0].name)
