"""Faults of real processes (``scenarios.py`` and so on), and lies (``liars.py``)."""

import os
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.faults import liars
from flwr_hetero_studies.faults.one_node import ON_ONE_NODE
from flwr_hetero_studies.faults.scenarios import ON_A_FLEET, OWN_FLEET, Found, own_fleet

FLEETS = OWN_FLEET | ON_ONE_NODE
"""Faults that need a fleet of their own."""
SETTINGS = {"trust": 40}
"""Rounds among liars."""
FAST = {"trust": 3}
FAST_CASES = ["liars/FedBuff, *"]


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    # Flower's own nodes, and warm ones.
    for experiment, name in product(("process", "warm"), ON_A_FLEET | FLEETS):
        yield Trial({"experiment": experiment, "name": name}, alone=True)
    seeds = options.seeds_or(range(3))
    lies = [(0, 1.0), *product(liars.COUNTS, liars.FACTORS)]
    for strategy, seed, (count, factor) in product(liars.STRATEGIES, seeds, lies):
        case = {"experiment": "liars", "name": f"{strategy}, {count} x {factor:g}"}
        case |= {"strategy": strategy, "liars": count, "factor": factor}
        yield Trial(case | {"rounds": options.settings["trust"]}, seed)


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    if case["experiment"] == "liars":
        wanted = (case[key] for key in ("strategy", "liars", "factor", "rounds"))
        return {"metrics": liars.run(*wanted, seed)}
    load = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        found = inject(case["name"], Path(folder), warm=case["experiment"] == "warm")
        return {"metrics": {"faults": found, **load}}


def inject(name: str, folder: Path, *, warm: bool) -> list[Found]:
    """Cause a fault, or several in one fleet; if that fails, the error is the result."""
    try:
        if name in FLEETS:
            found = FLEETS[name](folder, warm=warm)
        else:
            with own_fleet(folder, warm=warm) as fleet:
                found = ON_A_FLEET[name](fleet, folder / name)
    # SubprocessError: a disk cannot be mounted here.
    except (TimeoutError, RuntimeError, LookupError, OSError, SubprocessError) as error:
        return [{"fault": name, "survived": False, "error": f"{error!r:.300}"}]
    # A log is for the tests.
    return [{key: row[key] for key in row if key != "log"} for row in found["faults"]]
