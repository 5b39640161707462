"""Through how many files of flwr_hetero the server's part of a round runs.

``python -m flwr_hetero_studies.cost.journeys`` counts the files whose functions are called during
one round, or one server update, on a LocalGrid. The grid and the nodes do not count.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import flwr_hetero
from flwr_hetero._flwr import only_errors
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedSlice, TiFL, Wrapper
from flwr_hetero_studies.core.emulate import Enough, Moment, drive
from flwr_hetero_studies.core.tables import table
from flwr_hetero_studies.cost.scale import EchoFleet, fedavg

ROOT = str(Path(flwr_hetero.__file__).parent) + "/"
NODES = 20
CLIENTS = 4
ROUND = 4
UPDATE = 10
"""The round and the server update whose calls are counted, late enough to do nothing new."""


class Journey(NamedTuple):
    """A server update or a whole round, and through how many files it may run."""

    name: str
    make: Callable[[], Wrapper]
    updates: bool
    limit: int


JOURNEYS = (
    Journey("a round of TiFL(BiasedLocalSGD(CDGraB(FedAvg)))",
            lambda: TiFL(BiasedLocalSGD(CDGraB(fedavg()), fast_steps=8), CLIENTS), False, 18),
    Journey("a server update of FedSlice", lambda: FedSlice(fedavg()), True, 15),
    Journey("a round of TiFL", lambda: TiFL(fedavg(), CLIENTS), False, 12),
)  # fmt: skip


def visited(journey: Journey) -> set[str]:
    files: set[str] = set()
    # The depth of calls that the grid has made.
    inside = 0
    seen = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        name = frame.f_code.co_filename
        if inside or (name.startswith(ROOT + "fleet/") and event == "call"):
            inside += (event == "call") - (event == "return")
        elif event == "call" and name.startswith(ROOT):
            files.add(name.removeprefix(ROOT))

    def note(moment: Moment) -> None:
        nonlocal seen
        seen += 1
        at = seen if journey.updates else moment.round
        last = UPDATE if journey.updates else ROUND
        # The profiler is switched off before anything else is called.
        sys.setprofile(profile if at == last - 1 else None)
        if at == last:
            raise Enough

    with only_errors():
        grid = LocalGrid(EchoFleet().app, named_fleet("paper-5", NODES))
        drive(journey.make(), grid, EchoFleet.first(), note, seed=0, updates=journey.updates)
    return files


def main() -> None:
    found = [(journey, visited(journey)) for journey in JOURNEYS]
    rows = [[journey.name, len(files), journey.limit] for journey, files in found]
    print(table(["journey", "files", "at most"], rows))
    print(*(f"{journey.name}: {', '.join(sorted(files))}\n" for journey, files in found), sep="\n")


if __name__ == "__main__":
    main()
