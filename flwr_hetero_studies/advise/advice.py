"""Advice on a fleet: rank the settings on it by runs of a small task, and say which to take."""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from flwr.app import RecordDict

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_count, check_number
from flwr_hetero.records import payload_bytes
from flwr_hetero_studies.advise.candidates import Candidate, candidates
from flwr_hetero_studies.advise.fleet import for_task, read_fleet
from flwr_hetero_studies.advise.simulate import Point, Row, Work, rank
from flwr_hetero_studies.advise.task import Task

PARTITIONS = {"mixed": "dirichlet", "slow nodes hold classes alone": "classes-by-speed"}
"""What the nodes may hold, for nobody knows but the user."""
SEEDS = 3
ROUNDS, ROUNDS_S = 40, 60.0
"""Rounds of FedAvg, for seconds of wall time on two cores; measured by the study advise."""
UNKNOWN = (
    "It trains a small network on generated data: your own model and data may rank close settings "
    "differently. Links and sizes are as you gave them; a history's times count as computing."
)


@dataclass(frozen=True)
class Advice:
    """Rows for each way that data may lie, each with the best setting first."""

    devices: list[DeviceProfile]
    clients_per_round: int
    fast_steps: int
    rows: dict[str, list[Row]]

    def order(self) -> list[str]:
        """Name the settings, the best in both ways of lying first."""
        product: dict[str, float] = {}
        for rows in self.rows.values():
            for row in rows:
                name = row.candidate.name
                product[name] = product.get(name, 1.0) * row.speedup
        return sorted(product, key=lambda name: -product[name])

    @property
    def best(self) -> Candidate:
        """The best setting of those that reached the target in all their runs."""
        by_name = [{row.candidate.name: row for row in rows} for rows in self.rows.values()]
        names = self.order()
        sure = [n for n in names if all(own[n].reached == own[n].seeds for own in by_name)]
        return by_name[0][(sure or names)[0]].candidate

    def run_config(self, candidate: Candidate) -> str:
        """Write what ``flwr run apps/fleet --run-config`` takes."""
        config = candidate.run_config
        if config.get("steps", "epochs") != "epochs":
            config = config | {"fast-steps": self.fast_steps}
        parts = (f"{k}={v!r}" if isinstance(v, str) else f"{k}={v}" for k, v in config.items())
        return " ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON; None where the target was not reached."""
        return {
            "nodes": len(self.devices),
            "best": self.best.name,
            "order": self.order(),
            "settings": {
                task: [
                    row._asdict()
                    | {
                        "candidate": row.candidate.name,
                        "run-config": self.run_config(row.candidate),
                        "python": row.candidate.python(self.fast_steps),
                    }
                    | {k: getattr(row, k) if row.reached else None for k in ("bytes", "device_s")}
                    for row in rows
                ]
                for task, rows in self.rows.items()
            },
        }


def advise(
    path: str,
    *,
    nodes: int = 20,
    clients_per_round: int | None = None,
    examples: int = 256,
    batch_size: int = 16,
    model_mb: float = 1.0,
    seconds: float = ROUNDS_S,
    jobs: int | None = None,
    seed: int = 0,
) -> Advice:
    """Rank settings on a fleet.

    Parameters
    ----------
    path : str
        A TOML file of devices or the name of a fleet (see :func:`~flwr_hetero.fleet.named_fleet`),
        or a run directory, or its ``history.jsonl``.
    nodes : int
        Size of a fleet from a file; a history has its own.
    clients_per_round : int, optional
        Nodes that FedAvg trains in a round; default 15 % of them, at least 2.
    examples, batch_size : int
        Of a usual node.
    model_mb : float
        Size of the model, which counts where links are limited.
    seconds : float
        Wall time that it should take on two cores. It sets how much is simulated, so that the
        ranking is the same on any machine.
    jobs : int, optional
        Processes; default one for each core.
    seed : int
        Of the first run.
    """
    check_count("examples", examples, 1), check_count("batch_size", batch_size, 1)
    check_number("model_mb", model_mb, "(0, inf)"), check_number("seconds", seconds, "(0, inf)")
    devices = read_fleet(path, check_count("nodes", nodes, 3), examples, model_mb)
    some = clients_per_round or max(2, round(0.15 * len(devices)))
    check_count("clients_per_round", some, 1)
    rounds = max(10, round(ROUNDS * seconds / ROUNDS_S))
    rows, choices = {}, candidates(len(devices), min(some, len(devices)))
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:

        def execute(work: Iterable[Work]) -> list[list[Point]]:
            return list(pool.map(Work.run, work))

        for name, partition in PARTITIONS.items():

            def make(
                choice: Candidate, number: int, target: float | None, partition: str = partition
            ) -> Work:
                task = Task(len(devices), partition=partition, seed=number)
                own_mb = payload_bytes(RecordDict({"arrays": task.first()})) / 1e6
                profiles = for_task(devices, examples, model_mb, task.examples, own_mb)
                fast_steps = task.examples // task.batch_size
                return Work(choice, task, profiles, fast_steps, some, rounds, number, target)

            rows[name] = rank(choices, range(seed, seed + SEEDS), make, execute)
    return Advice(devices, some, max(1, round(examples / batch_size)), rows)
