import importlib
import shutil
import sys
from pathlib import Path

import pytest
from dropin.patching import apply
from flwr.app import Context, RecordDict

from flwr_hetero.fleet import DeviceProfile, LocalGrid

collect_ignore = ["quickstart"]  # a Flower app, with imports of its own
HERE = Path(__file__).parent
CONFIG = {"local-epochs": 1, "learning-rate": 0.1, "batch-size": 16}


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """Give a function that changes a copy of the app by a diff and runs it on four nodes."""

    def run(diff, num_rounds, slow=0.25, **config):
        shutil.copytree(HERE / "quickstart", tmp_path, dirs_exist_ok=True)
        if diff:
            apply((HERE / diff).read_text(encoding="utf-8"), tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        server, client = (importlib.import_module(f"quickstart.{s}_app") for s in sides)
        settings = {**CONFIG, **config, "num-server-rounds": num_rounds}
        profiles = [DeviceProfile(4.0), DeviceProfile(slow)] * 2
        grid = LocalGrid(client.app, profiles, run_config=settings)
        server.app(grid=grid, context=Context(1, 1, {}, RecordDict(), settings))
        return grid

    sides = ("server", "client")
    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]
