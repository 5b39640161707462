"""Each app in a real `flwr run`: its run directory, a resume, the same seed again.

CI runs the ServerApps of all apps in its own process (``test_server_apps.py``), strategies in
Flower's simulation (``tests/e2e/grids``) and `flwr run` on a SuperLink (``tests/e2e/deploy``).
"""

import json
from pathlib import Path

import pytest
from app_run import failures
from e2e.flower import flwr_run
from recording import history

pytestmark = [pytest.mark.app, pytest.mark.nightly]
APPS = Path(__file__).parents[3] / "apps"
FILES = ("config.json", "model.safetensors", "report.html", "checkpoint/state.npz")


@pytest.fixture
def flower(tmp_path):
    """Give a function that runs an app to its end and returns what it printed."""

    def run(app, num_nodes, **config):
        settings = " ".join(
            f"{key.replace('_', '-')}={json.dumps(value, default=str)}"
            for key, value in config.items()
        )
        home = tmp_path / "home"
        return flwr_run(APPS / app, home, settings, f"num-supernodes={num_nodes}")

    return run


@pytest.mark.parametrize(
    ("app", "num_nodes", "key", "settings"),
    [
        ("fleet", 2, "fedslice", {"num_server_rounds": 3, "sampler": "mercury"}),
        ("biased-local-sgd", 10, "biased_local_sgd", {"num_server_rounds": 5}),
        ("cd-grab", 4, "cd_grab", {"num_server_rounds": 6, "batch_size": 16}),
        ("mercury", 4, "sampler", {"num_server_rounds": 8}),
        ("pgd", 4, "sampler", {"num_server_rounds": 6}),
        ("tifl", 20, "tifl", {"num_server_rounds": 8, "interval": 4}),
        ("fedslice", 10, "fedslice", {"num_server_rounds": 6}),
    ],
)
def test_app_leaves_a_run_directory(flower, tmp_path, app, num_nodes, key, settings):
    out = tmp_path / "run"
    log = flower(app, num_nodes, output_dir=out, **settings)
    assert f"{out}/report.html" in log, log[-3000:]
    records = history(out)
    assert [record["round"] for record in records] == [*range(settings["num_server_rounds"] + 1)]
    assert not failures(records)
    for name in FILES:
        assert (out / name).stat().st_size > 0, name
    assert key in records[-1]
    assert records[-1]["global"]["accuracy"] > records[0]["global"]["accuracy"]
    if app == "tifl":
        assert f"{out}/compare.html" in log, log[-3000:]
        assert len(history(out / "baseline")) == 5  # ceil(0.4 * 8), and round 0


TIERS = {"engine": "rounds", "steps": "epochs", "selection": "tifl", "sync_rounds": 1}


@pytest.mark.parametrize(
    ("app", "num_nodes", "same", "settings"),
    [("cd-grab", 3, ["global"], {}), ("fleet", 20, ["global", "latency"], TIERS)],
)
def test_resume_equals_unbroken(flower, tmp_path, app, num_nodes, same, settings):
    flower(app, num_nodes, num_server_rounds=4, output_dir=tmp_path / "whole", **settings)
    broken_dir = tmp_path / "broken"
    flower(app, num_nodes, num_server_rounds=2, output_dir=broken_dir, **settings)
    flower(app, num_nodes, num_server_rounds=4, output_dir=broken_dir, resume=True, **settings)
    whole = history(tmp_path / "whole")
    broken = history(broken_dir)
    assert [record["round"] for record in broken] == [0, 1, 2, 3, 4]
    assert [broken[-1][key] for key in same] == [whole[-1][key] for key in same]
