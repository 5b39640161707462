"""What is trained in the race on real nodes, with which methods, and on which fleet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.core.plan import DIGITS, Data, NotHereError

SPEEDS = (1.0, 0.63, 0.4, 0.25, 0.16, 0.1)
"""Speeds of the SuperNodes, in about equal ratios."""
BASE = "FedAvg"
METHODS: dict[str, dict[str, Any]] = {
    BASE: {"engine": "rounds", "steps": "epochs"},
    "FedSlice": {},
    "FedBuff": {"engine": "buffered", "steps": "epochs"},
    "TiFL": {"engine": "rounds", "selection": "tifl", "steps": "epochs",
             "num-tiers": 3, "clients-per-round": 2},
}  # fmt: skip
"""What each sets in the run-config of ``apps/fleet``. All nodes are in flight, except in TiFL."""
ENDLESS = 100_000
CLASSES = {"partition": "classes", "classes-per-node": 5}
"""Each of six nodes has five of ten classes, and all have the same number of examples."""


@dataclass(frozen=True)
class RealTask:
    """First rows of a folder in ``--data``, a model, and FedAvg's learning rate and rounds.

    ``cpu``: the share of a core that the quickest node has.
    """

    folder: str
    train: int
    test: int
    model: str
    rate: float
    rounds: int
    cpu: float

    def dataset(self, data: Data) -> str:
        # Digits need no folder, and show whether everything works.
        if data.source == DIGITS:
            return DIGITS
        folder = Path(data.source).expanduser() / self.folder
        if not folder.is_dir():
            raise NotHereError(f"--data {data.source}: there is no folder {self.folder} in it")
        return Data(str(folder), data.scratch).first(self.train, self.test)

    def run_config(self, method: str, dataset: str, seed: int, rounds: int) -> dict[str, Any]:
        """Return the run-config of ``apps/fleet``; only FedAvg has a fixed number of rounds."""
        model = "auto" if dataset == DIGITS else self.model
        config = {"dataset": dataset, "model": model, "learning-rate": self.rate, "seed": seed}
        rounds = rounds if method == BASE else ENDLESS
        return config | CLASSES | {"num-server-rounds": rounds} | METHODS[method]


LARGE = "flwr_hetero_studies.real.network:large_cnn"
WORKLOADS = {
    "light": RealTask("fashion_mnist", 12_000, 1000, "cnn", 0.1, 30, cpu=0.6),
    # Two threads of one core are slower if both are busy, and nodes that compute all the time need
    # both: with a share of 0.6, the quickest node was 4.7 instead of 10 times as fast as the last.
    "heavy": RealTask("cifar10", 20_000, 1000, LARGE, 0.025, 4, cpu=0.4),
}


def fleet() -> list[DeviceProfile]:
    return [DeviceProfile(speed) for speed in SPEEDS]
