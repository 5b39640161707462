"""The quickstart of tests/dropin with TiFL in it, in a real ``flwr run``."""

import shutil
from pathlib import Path

import pytest
from dropin.patching import apply

DROPIN = Path(__file__).parents[2] / "dropin"


@pytest.mark.app
@pytest.mark.nightly
def test_flwr_run_with_three_lines_more(flower, tmp_path):
    app = tmp_path / "quickstart"
    shutil.copytree(DROPIN / "quickstart", app)
    apply((DROPIN / "tifl.diff").read_text(encoding="utf-8"), app)
    log = flower(app, 4, num_server_rounds=3)
    assert "TiFL: tiers of [2, 2] nodes" in log, log[-3000:]
    assert log.count("TiFL: tier ") == 3
    assert "accuracy {" in log
