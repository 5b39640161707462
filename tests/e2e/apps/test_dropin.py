"""The quickstart of tests/dropin with a method in it, in a real ``flwr run``."""

import re
import shutil
from pathlib import Path

import pytest
from dropin.patching import apply

pytestmark = [pytest.mark.app, pytest.mark.nightly]
DROPIN = Path(__file__).parents[2] / "dropin"
STEPS = """    for record in result.train_metrics_clientapp.values():
        print('steps', record['num-steps'])
"""


@pytest.fixture
def quickstart(flower, tmp_path):
    """Give a function that runs the quickstart with a method, and with another text in it."""

    def run(method, file, old, new):
        app = tmp_path / "quickstart"
        shutil.copytree(DROPIN / "quickstart", app)
        apply((DROPIN / f"{method}.diff").read_text(encoding="utf-8"), app)
        path = app / "quickstart" / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        return flower(app, 4, num_server_rounds=3)

    return run


def test_flwr_run_of_tifl(quickstart):
    log = quickstart("tifl", "client_app.py", "", "")
    before = log[: log.index("round 1/3")]
    ours = [line for line in before.splitlines() if "TiFL" in line]
    assert len(ours) <= 5, ours
    assert "Traceback" not in log
    # nodes of one machine are equally fast, but for noise
    assert re.search(r"TiFL: tiers of \[(4|2, 2|3, 1|1, 3)\] nodes", log), log[-3000:]
    assert len(re.findall(r"tier [01]   \d nodes", log)) == 2  # from the second round
    assert "accuracy {" in log


def test_flwr_run_of_biased_local_sgd(quickstart):
    end = '    print("accuracy"'
    log = quickstart("biased", "server_app.py", end, STEPS + end)
    assert "Traceback" not in log
    first, *others = map(float, re.findall(r"steps (\d\S*)", log))
    assert first == 1, log[-3000:]  # no node was timed before
    assert len(others) == 2
    assert all(num_steps > 1 for num_steps in others)
    assert "accuracy {" in log
