"""What a method costs in CPU time in apps of five kinds, and the table of docs/apps.md.

``python -m flwr_hetero_studies.cost.apps``: each app with and without the method, turn by turn,
where both do the same work: all nodes train in every round, and take the steps of one epoch.
Evaluation is left out. ``--table`` only writes the table again.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from flwr_hetero.fleet import DeviceProfile

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from e2e.examples.methods import METHODS, REFUSED
from e2e.examples.running import APPS, run
from e2e.examples.table import PAGE, made, parts

REPEATS, ROUNDS, NUM_DIGITS = 3, 3, 1600
STEPS = dict.fromkeys(APPS, 20) | {"hugging-face": 10}
FILE = Path(__file__).with_name("apps.json")


def cpu_s(kind: str, wrapped: str | None = None, half: str | None = None) -> float:
    """Run an app on four equal nodes."""
    wrapped = wrapped and wrapped.replace("STEPS", str(STEPS[kind]))
    with tempfile.TemporaryDirectory() as folder:
        fleet = [DeviceProfile()] * 4
        where = (Path(folder), wrapped, half, ROUNDS, fleet, NUM_DIGITS)
        return run(APPS[kind], *where).cpu_s


def measured(kind: str) -> dict[str, float]:
    """Return each method's overhead as a part of the plain run, least time against least time."""
    names = [name for name in METHODS if (kind, name) not in REFUSED]
    plain_s, times_s = [cpu_s(kind)], dict.fromkeys(names, float("inf"))
    for _ in range(REPEATS):
        for name in names:
            method = METHODS[name]
            run_s = cpu_s(kind, method.same_work, method.half)
            # the least: anything else on the machine only adds
            times_s[name] = min(times_s[name], run_s)
        plain_s += [cpu_s(kind), cpu_s(kind)]
        overhead = {name: round(run_s / min(plain_s) - 1, 3) for name, run_s in times_s.items()}
        print(kind, overhead, flush=True)
    return overhead


def main() -> None:
    """Measure, and write figures and table."""
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if "--table" not in sys.argv:
        text = json.dumps({"overhead": {kind: measured(kind) for kind in APPS}}, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
    before, _, after = parts()
    table = made(json.loads(FILE.read_text(encoding="utf-8"))["overhead"])
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
