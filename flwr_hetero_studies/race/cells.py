"""Where the race is run: fleets, links and tasks, and which methods run in each."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

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
    Base,
    fedavg,
)
from flwr_hetero_studies.race.node import NORMED, NUMPY, Learning

Fleet = Callable[[int], list[DeviceProfile]]
"""Makes the devices for a seed."""


def paper_5(nodes: int = 20, **changes: Any) -> Fleet:
    return lambda seed: [replace(device, **changes) for device in named_fleet("paper-5", nodes)]


# The fastest kind comes first, as in the named fleets.
def mild(seed: int) -> list[DeviceProfile]:
    return [DeviceProfile(speed) for speed in np.repeat(np.geomspace(1.4, 0.7, 5), 4).tolist()]


def two_kinds(seed: int) -> list[DeviceProfile]:
    return [DeviceProfile(4.0)] * 6 + [DeviceProfile(0.5)] * 14


def log_normal(seed: int) -> list[DeviceProfile]:
    """Draw speeds and links that spread as in traces of phones: sigma of the logs is 1 and 0.8."""
    # This must be another draw than that of the partition.
    rng = np.random.default_rng([seed, 7])
    speeds = np.exp(rng.normal(0, 1.0, 20)).tolist()
    links = (20 * np.exp(rng.normal(0, 0.8, 20))).tolist()
    both = zip(speeds, links, strict=True)
    return [DeviceProfile(s, uplink_mbps=mbps / 2, downlink_mbps=mbps) for s, mbps in both]


def phones(seed: int) -> list[DeviceProfile]:
    """Draw phones that were measured; the median one is as quick as the reference device."""
    measured = json.loads((Path(__file__).parent / "phones.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng([seed, 11])
    scores = rng.choice(measured["score"], 20) / np.median(measured["score"])
    links = rng.integers(len(measured["down_kBps"]), size=20)
    profiles = []
    for speed, link in zip(scores.tolist(), links.tolist(), strict=True):
        up_mbps, down_mbps = (measured[f"{way}_kBps"][link] * 8e-3 for way in ("up", "down"))
        profiles.append(DeviceProfile(speed, uplink_mbps=up_mbps, downlink_mbps=down_mbps))
    return profiles


def adam_base() -> FedAvg:
    return FedAdam(fraction_evaluate=0.0, eta=0.01, tau=1e-3)


def momentum_base() -> FedAvg:
    return FedAvgM(fraction_evaluate=0.0, server_learning_rate=1.0, server_momentum=0.9)


BEST = (BASE, OURS, "FedBuff, published", "FedProx, partial work",
        "FedCompass", "biased local SGD", "TiFL")  # fmt: skip
"""The best rivals in the main cell, of those that ran there at first."""
ADDED = (COMPOSED, EAGER, RINGLEADER, RESCALED, QUICK)
"""Rivals that were added when the others' results were known."""
FIRST = (*BEST, *ADDED)
"""Methods that are run in most other cells."""
PAIR = (BASE, OURS)
USUAL_RATES = (0.1, 0.05, 0.2)
TEXT_RATES = (1.0, 0.5, 2.0)
"""A bag of words needs larger rates."""
MOMENTUM_RATES = (0.01, 0.005, 0.02)
ADAM_RATES = (0.001, 0.0005, 0.002)


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
    rates: tuple[float, ...] = ()
    """Rates to try in this cell. Without them, all is as tuned in the main cell."""
    base: Base = fedavg
    """The strategy of Flower inside all methods."""
    optimizer: str = "sgd"
    """The nodes' optimizer."""

    @property
    def examples_a_round(self) -> float:
        """Examples that FedAvg trains on with three nodes: 810 of 6,000 examples on 20 nodes."""
        return 810 * self.rows[0] * 20 / (6000 * self.nodes)

    def learning(self, data: Data, seed: int) -> Learning:
        train, valid, test = self.rows
        dataset = data.first(train + valid, test)
        return Learning(
            dataset, self.model, self.partition, self.nodes, self.rows, seed, self.optimizer
        )


MAIN = "dirichlet"
TEXTS = RaceCell(
    paper_5(), data="stdlib", model="bag", rows=(6000, 1000, 2000), rates=TEXT_RATES,
    methods=(*BEST[:5], *ADDED),
)  # fmt: skip
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
    "texts": TEXTS,
    "100 nodes": RaceCell(paper_5(100), nodes=100, rows=(30000, 2000, 2000), methods=FIRST),
    "60,000 images": RaceCell(
        paper_5(), rows=(60000, 0, 2000), methods=(*BEST[:6], *ADDED), length=0.4
    ),
    # Many inputs need smaller rates.
    "CIFAR-10": RaceCell(
        paper_5(), data="cifar10", methods=(*BEST[:6], *ADDED), rates=(0.05, 0.025, 0.1)
    ),
    # This is no race: it shows what compression does to the statistics of batch normalisation.
    "CNN": RaceCell(paper_5(), model=NORMED, methods=PAIR),
}
WIDE = "wide: "
"""Begins the names of cells on which FedSlice had lost. Rates are tuned in each of them."""
CELLS |= {
    WIDE + name: cell._replace(
        methods=(*PAIR, *ADDED, *cell.methods), rates=cell.rates or USUAL_RATES
    )
    for name, cell in {
        "two kinds": RaceCell(two_kinds, methods=("FedCompass",)),
        "main": RaceCell(
            paper_5(), methods=("FedCompass", "FedProx, partial work", "over-selection")
        ),
        "momentum": RaceCell(paper_5(), optimizer="momentum", rates=MOMENTUM_RATES),
        "FedAvgM": RaceCell(paper_5(), base=momentum_base),
        "FedAdam": RaceCell(paper_5(), base=adam_base),
        "Adam": RaceCell(paper_5(), optimizer="adam", rates=ADAM_RATES),
        "phones": RaceCell(phones),
        "6 s a message": RaceCell(paper_5(wait_s=3.8, start_s=2.2)),
        "CNN": RaceCell(paper_5(), model=NORMED, rows=(3000, 1000, 2000), length=0.5),
        "1 s a message": RaceCell(paper_5(wait_s=0.6, start_s=0.4)),
        "mild": RaceCell(mild),
        "unreliable": RaceCell(UNRELIABLE),
        "two kinds, momentum": RaceCell(two_kinds, optimizer="momentum", rates=MOMENTUM_RATES),
        "texts": TEXTS._replace(methods=()),
    }.items()
}
PACKED: dict[tuple[str, int], tuple[str, ...]] = {
    ("10 Mbit/s", 5): BEST[:5], ("10 Mbit/s", 20): PAIR, ("log-normal", 5): (OURS,),
    (MAIN, 5): (OURS,), ("classes by speed", 5): (OURS,), ("texts", 5): PAIR, ("CNN", 5): (OURS,),
}  # fmt: skip
"""Methods that are also run with ``Compressed`` around them, by cell and nodes at work."""


def rounds_in(cell: str, options: Options) -> int:
    rounds: int = options.settings["rounds"]
    return round(CELLS[cell].length * rounds)


def case_of(kind: str, cell: str, at_work: int, name: str, options: Options, **more: Any) -> Case:
    where = f"{kind}{cell}, {at_work} at work"
    case = {"experiment": where, "name": name, "cell": cell, "at_work": at_work}
    return {**case, "rounds": rounds_in(cell, options), **more}
