"""What a method costs in CPU time in apps of five kinds: ``python -m ...`` writes docs/apps.md.

Each app is run with and without the method, in turn, where both do the same work: all nodes train
in every round and take the steps of one epoch. The apps are those of the tests. Evaluation is left
out.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.core.plan import Data, NotHereError, Trial
from flwr_hetero_studies.core.record import Case, of, read

REPEATS = 3
ROUNDS = 3
NUM_DIGITS = 1600
KINDS = ("torch", "scikit-learn", "xgboost", "lightning", "hugging-face")
TESTS = Path(__file__).parents[2] / "tests"


def plan() -> Iterator[Trial]:
    """Yield a run for each kind of app, or none without a checkout of the repository."""
    if TESTS.is_dir():
        for kind in KINDS:
            yield Trial({"experiment": "apps", "name": kind}, alone=True)


def run(case: Case, data: Data) -> dict[str, Any]:
    """Return each method's overhead as a share of the plain run, by the least times of both."""
    sys.path.insert(0, str(TESTS))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    from e2e.examples import methods, running

    kind = case["name"]
    epoch_steps = "10" if kind == "hugging-face" else "20"

    def cpu_s(wrapped: str | None = None, half: str | None = None) -> float:
        strategy = wrapped and wrapped.replace("STEPS", epoch_steps)
        devices = [DeviceProfile()] * 4
        app = running.APPS[kind]
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            try:
                found = running.run(app, where, strategy, half, ROUNDS, devices, NUM_DIGITS)
            except ModuleNotFoundError as error:
                raise NotHereError(f"{error.name} is not installed") from error
        return float(found.cpu_s)

    chosen = {n: m for n, m in methods.METHODS.items() if (kind, n) not in methods.REFUSED}
    plain_s = [cpu_s()]
    times_s = dict.fromkeys(chosen, float("inf"))
    for _ in range(REPEATS):
        for name, method in chosen.items():
            # The least time counts, because other work on the machine can only add to it.
            times_s[name] = min(times_s[name], cpu_s(method.same_work, method.half))
        plain_s += [cpu_s(), cpu_s()]
    return {"overhead": {n: round(time_s / min(plain_s) - 1, 3) for n, time_s in times_s.items()}}


def overheads() -> dict[str, dict[str, float]]:
    lines = of(read(Path(__file__).parent), experiment="apps")
    return {line["case"]["name"]: line["metrics"]["overhead"] for line in lines}


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    from e2e.examples import table

    before, _, after = table.parts()
    table.PAGE.write_text(before + table.made(overheads()) + after, encoding="utf-8")
