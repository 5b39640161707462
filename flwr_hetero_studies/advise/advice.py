"""Advice on a fleet: rank the settings on it by runs of a small task, and say which to take."""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from typing import Any

from flwr.app import RecordDict

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_choice, check_count, check_number
from flwr_hetero.records import payload_bytes
from flwr_hetero_studies.advise.candidates import BASES, Candidate, candidates
from flwr_hetero_studies.advise.fleet import for_task, is_limited, read_fleet
from flwr_hetero_studies.advise.simulate import Point, Row, Simulation, rank
from flwr_hetero_studies.advise.task import BATCH_SIZE, EXAMPLES, RATES, run_config, small_task

SEEDS = 3
PARTITIONS = {"mixed": "dirichlet", "slow nodes hold classes alone": "classes-by-speed"}
"""What the nodes may hold, for nobody knows but the user."""
SLOW_LESS = 0.05
"""Of accuracy on the slow nodes' data: what a setting may have less than the base."""
IN_APP: dict[str, dict[str, Any]] = {
    "sgd": {}, "momentum": {"momentum": 0.9}, "adam": {"optimizer": "adam"},
}  # fmt: skip
"""An optimizer of the nodes, in the run-config of ``apps/fleet``."""
ROUNDS, ROUNDS_S = 40, 60.0
"""Rounds of FedAvg, for seconds of wall time on two cores; measured by the study advise."""
UNKNOWN = (
    "It trains a small network on generated data: your own model and data may rank close settings "
    "differently. Links, sizes and what a message costs are as you gave them, or as a real run's "
    "history has them."
)


@dataclass(frozen=True)
class Advice:
    """Rows for each way that data may lie, each with the best setting first."""

    devices: list[DeviceProfile]
    clients_per_round: int
    fast_steps: int
    rows: dict[str, list[Row]]
    optimizer: str = "sgd"
    base: str = "FedAvg"

    def order(self) -> list[str]:
        """Name the settings, the best in both ways of lying first."""
        # nobody but the user knows how data lie: both ways count alike
        product: dict[str, float] = {}
        for row in chain(*self.rows.values()):
            name = row.candidate.name
            product[name] = product.get(name, 1.0) * row.speedup
        return sorted(product, key=lambda name: -product[name])

    def rows_of(self, name: str) -> dict[str, Row]:
        """Return a setting's rows, by how data lie."""
        every = ((task, row) for task, rows in self.rows.items() for row in rows)
        return {task: row for task, row in every if row.candidate.name == name}

    @property
    def sure(self) -> list[str]:
        """The settings that reached the target in all their runs, the best first; all, if none."""
        # a setting that misses the target in a run is no advice, whatever its mean
        every = {name: self.rows_of(name).values() for name in self.order()}
        return [n for n, own in every.items() if all(r.reached == r.seeds for r in own)] or [*every]

    @property
    def best(self) -> Candidate:
        return self._candidate(self.sure[0])

    @property
    def fair(self) -> Candidate | None:
        """The best setting that is nowhere much worse than the base on the slow nodes' data."""
        found = (name for name in self.sure if self.unfair_in(name) is None)
        return next(map(self._candidate, found), None)

    def unfair_in(self, name: str) -> str | None:
        """Say how data lie where a setting has most less on the slow nodes' data, if it has."""
        own, base = self.rows_of(name), self.rows_of(self.base)
        less = {task: base[task].slow - own[task].slow for task in self.rows}
        worst = max(less, key=lambda task: less[task])
        return worst if less[worst] > SLOW_LESS else None

    def _candidate(self, name: str) -> Candidate:
        return next(row.candidate for row in self.rows_of(name).values())

    def run_config(self, candidate: Candidate) -> str:
        config = candidate.run_config | IN_APP[self.optimizer]
        if config.get("steps", "epochs") != "epochs":
            config = config | {"fast-steps": self.fast_steps}
        parts = (f"{k}={v!r}" if isinstance(v, str) else f"{k}={v}" for k, v in config.items())
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        settings = {task: [*map(self.figures, rows)] for task, rows in self.rows.items()}
        head = {"nodes": len(self.devices), "best": self.best.name, "order": self.order()}
        head["fair"] = self.fair.name if self.fair else None
        return {**head, "settings": settings}

    def figures(self, row: Row) -> dict[str, Any]:
        costs = {k: getattr(row, k) if row.reached else None for k in ("bytes", "device_s")}
        choice, lines = row.candidate, row.candidate.python(self.fast_steps)
        made = {"candidate": choice.name, "run-config": self.run_config(choice), "python": lines}
        return row._asdict() | made | costs


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
) -> Advice:
    """Rank settings on a fleet, by simulations that take ``seconds`` on two cores of any age."""
    check_choice("optimizer", optimizer, tuple(RATES)), check_choice("base", base, BASES)
    check_count("examples", examples, 1), check_count("batch_size", batch_size, 1)
    check_number("model_mb", model_mb, "(0, inf)"), check_number("seconds", seconds, "(0, inf)")
    sizes = check_count("nodes", nodes, 3), examples, model_mb, batch_size
    devices = read_fleet(path, *sizes, node=node)
    some = clients_per_round or max(2, round(0.15 * len(devices)))
    check_count("clients_per_round", some, 1)
    # so many that FedAvg learns, however short the time
    rounds = max(10, round(ROUNDS * seconds / ROUNDS_S))
    counts = len(devices), min(some, len(devices))
    rows, choices = {}, candidates(*counts, limited=is_limited(devices), base=base)
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:

        def execute(work: Iterable[Simulation]) -> list[list[Point]]:
            return list(pool.map(Simulation.run, work))

        for name, partition in PARTITIONS.items():

            def make(
                choice: Candidate, number: int, target: float | None, partition: str = partition
            ) -> Simulation:
                shape = len(devices), EXAMPLES, partition, number, optimizer
                task, config = small_task(*shape), run_config(optimizer)
                own_mb = payload_bytes(RecordDict({"arrays": task.first()})) / 1e6
                # the small task is to wait for devices and links as the user's would
                profiles = for_task(devices, examples, model_mb, EXAMPLES, own_mb)
                length = (EXAMPLES // BATCH_SIZE, some, rounds)
                return Simulation(choice, task, profiles, *length, number, target, config)

            rows[name] = rank(choices, range(seed, seed + SEEDS), make, execute)
    steps = max(1, round(examples / batch_size))
    return Advice(devices, some, steps, rows, optimizer, choices[0].name)
