"""What a method costs in CPU time in apps of five kinds: ``python -m ...`` writes docs/apps.md.

Each app, one of the tests, with and without the method, turn by turn, where both do the same work:
all nodes train in every round, and take the steps of one epoch. Evaluation is left out.
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

REPEATS, ROUNDS, NUM_DIGITS = 3, 3, 1600
KINDS = ("torch", "scikit-learn", "xgboost", "lightning", "hugging-face")
TESTS = Path(__file__).parents[2] / "tests"


def plan() -> Iterator[Trial]:
    """Yield a run for each kind of app; without a checkout there is none."""
    if TESTS.is_dir():
        yield from (Trial({"experiment": "apps", "name": kind}, alone=True) for kind in KINDS)


def run(case: Case, data: Data) -> dict[str, Any]:
    """Return each method's overhead as a part of the plain run, least time against least time."""
    sys.path.insert(0, str(TESTS))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    from e2e.examples import methods, running

    kind = case["name"]

    def cpu_s(wrapped: str | None = None, half: str | None = None) -> float:
        # of one epoch
        wrapped = wrapped and wrapped.replace("STEPS", "10" if kind == "hugging-face" else "20")
        with tempfile.TemporaryDirectory() as folder:
            where = (Path(folder), wrapped, half, ROUNDS, [DeviceProfile()] * 4, NUM_DIGITS)
            try:
                return float(running.run(running.APPS[kind], *where).cpu_s)
            except ModuleNotFoundError as error:
                raise NotHereError(f"{error.name} is not installed") from error

    own = {n: m for n, m in methods.METHODS.items() if (kind, n) not in methods.REFUSED}
    plain_s, times_s = [cpu_s()], dict.fromkeys(own, float("inf"))
    for _ in range(REPEATS):
        for name, method in own.items():
            # the least: anything else on the machine only adds
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
