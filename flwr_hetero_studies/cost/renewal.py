"""Whether FedSlice learns the same if figures of all nodes are not renewed after each reply."""

from collections.abc import Iterator
from math import inf
from typing import Any
from unittest.mock import patch

from flwr.serverapp.strategy import FedAvg

from flwr_hetero.exchange import nodes
from flwr_hetero.fleet import named_fleet
from flwr_hetero.strategy import FedSlice
from flwr_hetero_studies.core.emulate import config_of, emulate
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.objectives.cases import app
from flwr_hetero_studies.tasks import Settings

NODES = 300
TRAINING = 20
ROUNDS = 60
ROWS = 12_000
FEW_NODES = {"after each reply": inf, "after a tenth of the nodes": nodes.FEW_NODES}
"""Number of nodes below which figures are renewed after each reply."""


def plan(options: Options) -> Iterator[Trial]:
    for seed in options.seeds_or(range(5)):
        for name in FEW_NODES:
            yield Trial({"experiment": "renewal", "name": name, "data": options.data}, seed)


def run(case: Case, data: Data, seed: int) -> dict[str, Any]:
    """Train on a large fleet; return its accuracy after each fourth of the run, and its time."""
    config = config_of(data.first(ROWS, ROWS // 3), "dirichlet", 0.1, seed, ROUNDS)
    strategy = FedSlice(FedAvg(fraction_evaluate=0.0), concurrency=TRAINING, seed=seed)
    fleet = named_fleet("paper-5", NODES)
    settings = Settings.from_run_config(config)
    with patch.object(nodes, "FEW_NODES", FEW_NODES[case["name"]]):
        curve = emulate(app, settings, strategy, fleet, config, every=ROUNDS // 4)
    return {"accuracy": curve["accuracy"][-4:], "virtual_s": curve["virtual_s"][-1]}
