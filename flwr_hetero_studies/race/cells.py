"""Where the race is run: fleets, links and tasks, and which methods run in each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero.fleet import DeviceProfile, named_fleet
from flwr_hetero_studies.core.plan import Data, Options
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.race.methods import (
    BASE,
    COMPOSED,
    EAGER,
    OURS,
    QUICK,
    RESCALED,
    RINGLEADER,
)
from flwr_hetero_studies.race.node import NORMED, NUMPY, Learning

Fleet = Callable[[int], list[DeviceProfile]]
"""Makes the devices for a seed."""


def paper_5(nodes: int = 20, **changes: Any) -> Fleet:
    return lambda seed: [replace(device, **changes) for device in named_fleet("paper-5", nodes)]


def mild(seed: int) -> list[DeviceProfile]:
    # The fastest kind comes first, as in the named fleets.
    return [DeviceProfile(speed) for speed in np.repeat(np.geomspace(1.4, 0.7, 5), 4).tolist()]


def log_normal(seed: int) -> list[DeviceProfile]:
    """Draw speeds and links that spread as in traces of phones: sigma of the logs is 1 and 0.8."""
    # This must be another draw than that of the partition.
    rng = np.random.default_rng([seed, 7])
    speeds = np.exp(rng.normal(0, 1.0, 20)).tolist()
    links = (20 * np.exp(rng.normal(0, 0.8, 20))).tolist()
    both = zip(speeds, links, strict=True)
    return [DeviceProfile(s, uplink_mbps=mbps / 2, downlink_mbps=mbps) for s, mbps in both]


class RaceCell(NamedTuple):
    """A fleet with its links, a task, and how much of the race is run there."""

    fleet: Fleet
    partition: str = "dirichlet"
    data: str = "fashion_mnist"
    model: str = NUMPY
    nodes: int = 20
    rows: tuple[int, int, int] = (6000, 2000, 2000)
    at_work: tuple[int, ...] = (5,)
    seeds: int = 3
    methods: tuple[str, ...] = ()
    """Empty: all."""
    length: float = 1.0
    """Rounds of FedAvg, as a multiple of those in other cells."""

    @property
    def examples_a_round(self) -> float:
        """Examples that FedAvg trains on with three nodes: 810 of 6,000 examples on 20 nodes."""
        return 810 * self.rows[0] * 20 / (6000 * self.nodes)

    def learning(self, data: Data, seed: int, optimizer: str = "sgd") -> Learning:
        train, valid, test = self.rows
        dataset = data.first(train + valid, test)
        return Learning(dataset, self.model, self.partition, self.nodes, self.rows, seed, optimizer)


BEST = (BASE, OURS, "FedBuff, published", "FedProx, partial work",
        "FedCompass", "biased local SGD", "TiFL")  # fmt: skip
"""The best rivals in the main cell, of those that ran there at first."""
ADDED = (COMPOSED, EAGER, RINGLEADER, RESCALED, QUICK)
"""Rivals that were added when the others' results were known."""
FIRST = (*BEST, *ADDED)
"""Methods that are run in most other cells."""
PAIR = (BASE, OURS)
MAIN = "dirichlet"
TEXTS = (6000, 1000, 2000)
LINKED = paper_5(uplink_mbps=10.0, downlink_mbps=10.0)
UNRELIABLE = paper_5(jitter=0.3, availability=0.8)
CELLS: dict[str, RaceCell] = {
    MAIN: RaceCell(paper_5(), at_work=(3, 5, 20), seeds=5),
    "classes by speed": RaceCell(paper_5(), "classes-by-speed", at_work=(5, 20), methods=FIRST),
    "10 Mbit/s": RaceCell(LINKED, at_work=(5, 20), methods=FIRST),
    "5 s a message": RaceCell(paper_5(wait_s=5.0), methods=FIRST),
    "mild": RaceCell(mild, methods=(*BEST[:5], *ADDED)),
    "log-normal": RaceCell(log_normal, methods=(*BEST[:5], *ADDED)),
    "unreliable": RaceCell(UNRELIABLE, methods=FIRST),
    "texts": RaceCell(paper_5(), MAIN, "stdlib", "bag", rows=TEXTS, methods=(*BEST[:5], *ADDED)),
    "100 nodes": RaceCell(paper_5(100), nodes=100, rows=(30000, 2000, 2000), methods=FIRST),
    "60,000 images": RaceCell(
        paper_5(), rows=(60000, 0, 2000), methods=(*BEST[:6], *ADDED), length=0.4
    ),
    "CIFAR-10": RaceCell(paper_5(), data="cifar10", methods=(*BEST[:6], *ADDED)),
    # This is no race: it shows what compression does to the statistics of batch normalisation.
    "CNN": RaceCell(paper_5(), model=NORMED, methods=PAIR),
}
PACKED: dict[tuple[str, int], tuple[str, ...]] = {
    ("10 Mbit/s", 5): BEST, ("10 Mbit/s", 20): BEST, ("log-normal", 5): BEST[:5],
    (MAIN, 5): PAIR, ("classes by speed", 5): PAIR, ("texts", 5): PAIR, ("CNN", 5): PAIR,
}  # fmt: skip
"""Methods that are also run with ``Compressed`` around them, by cell and nodes at work."""


def case_of(kind: str, cell: str, at_work: int, name: str, options: Options, **more: Any) -> Case:
    where = f"{kind}{cell}, {at_work} at work"
    rounds = round(CELLS[cell].length * options.settings["rounds"])
    case = {"experiment": where, "name": name, "cell": cell, "at_work": at_work}
    return {**case, **options.settings, "rounds": rounds, **more}
