"""The quickstart of tests/dropin with a method in it, in a real ``flwr run``."""

import re
import shutil
from pathlib import Path

import pytest
from dropin.patching import apply

DROPIN = Path(__file__).parents[2] / "dropin"


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_of_tifl(flower, tmp_path):
    app = tmp_path / "quickstart"
    shutil.copytree(DROPIN / "quickstart", app)
    apply((DROPIN / "tifl.diff").read_text(encoding="utf-8"), app)
    log = flower(app, 4, num_server_rounds=3)
    before = log[: log.index("round 1/3")]
    ours = [line for line in before.splitlines() if "TiFL" in line]
    assert len(ours) <= 5, ours
    assert "Traceback" not in log
    # nodes of one machine are equally fast, but for noise
    assert re.search(r"TiFL: tiers of \[(4|2, 2|3, 1|1, 3)\] nodes", log), log[-3000:]
    assert len(re.findall(r"tier [01]   \d nodes", log)) == 2  # from the second round
    assert "accuracy {" in log


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_without_the_nodes_half(flower, tmp_path):
    app = tmp_path / "quickstart"
    shutil.copytree(DROPIN / "quickstart", app)
    apply((DROPIN / "tifl.diff").read_text(encoding="utf-8"), app)
    client = app / "quickstart" / "client_app.py"
    client.write_text(client.read_text(encoding="utf-8").replace("mods=[hetero]", ""))
    log = flower(app, 4, num_server_rounds=3)
    assert "MissingClientSupportError: TiFL: no node reports 'flwr-hetero.timing'" in log, log[
        -3000:
    ]


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_of_biased_local_sgd(flower, tmp_path):
    app = tmp_path / "quickstart"
    shutil.copytree(DROPIN / "quickstart", app)
    apply((DROPIN / "biased.diff").read_text(encoding="utf-8"), app)
    with (app / "quickstart" / "server_app.py").open("a", encoding="utf-8") as server:
        server.write("    for record in result.train_metrics_clientapp.values():\n")
        server.write("        print('steps', record['num-steps'])\n")
    log = flower(app, 4, num_server_rounds=3)
    assert "Traceback" not in log
    first, *others = map(float, re.findall(r"steps (\d\S*)", log))
    assert first == 1, log[-3000:]  # no node was timed before
    assert len(others) == 2
    assert all(num_steps > 1 for num_steps in others)
    assert "accuracy {" in log
