"""Flower's simulation does with unusual messages what a LocalGrid does."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.app, pytest.mark.nightly]
APP = Path(__file__).parents[1] / "deploy" / "probe_app"


def test_simulation_is_like_local_grid(flower, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from probe_app.server_app import EXPECTED

    log = flower(str(APP), 3, output_dir=tmp_path)
    assert (tmp_path / "probe.json").exists(), log
    assert json.loads((tmp_path / "probe.json").read_text()) == EXPECTED
