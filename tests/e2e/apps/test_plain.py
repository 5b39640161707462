"""FedSlice in place of FedAvg: apps of five kinds, plain ``flwr run``, devices not emulated.

Nodes sleep by their speed, 4 to 0.1. Both runs have the same node's half: FedAvg passes over it.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from dropin.patching import apply
from e2e.examples.running import APPS, App, node_half, server_half, write

pytestmark = [pytest.mark.app, pytest.mark.nightly]
HERE = Path(__file__).parent
OLDER = App(
    *("NumPyClient", HERE / "plain" / "older_app", "older_numpy", ("sklearn",)),
    initial="[np.zeros((64, 10))]",
    taken="import numpy as np\nfrom flwr_hetero.older import OlderClients",
    grid="OlderClients(grid)",
)
KINDS = {name: app for name, app in APPS.items() if name != "xgboost"} | {"older": OLDER}
ROUNDS, NODES = 6, 8
STEP_S = {"hugging-face": 0.3}
"""Of a node of speed 1, else as in slow_device.py: making a Trainer takes long too."""


class Outcome(NamedTuple):
    """What a run printed."""

    seconds: float
    loss: float


def run(flower, kind, folder, strategy):
    """Run a copy of an app with unequal devices; ``strategy`` stands in for FedAvg."""
    app = KINDS[kind]
    write(app, folder)
    apply(node_half(app, "steps"), folder)
    apply(server_half(app, f"{strategy}({{}})"), folder)
    package = folder / app.package
    shutil.copy(HERE / "slow_device.py", package)
    if kind in STEP_S:
        change(package / "slow_device.py", {r"STEP_S = .*": f"STEP_S = {STEP_S[kind]}"})
    taken = f"from {app.package}.slow_device import"
    change(
        package / "client_app.py",
        {
            "from flwr.clientapp import ClientApp\n": f"\\g<0>{taken} slow\n",
            r"mods=\[hetero\]": "mods=[hetero, slow]",
        },
    )
    change(
        package / "server_app.py",
        {
            "from flwr.serverapp import .*\n": f"\\g<0>{taken} timed\n",
            "    strategy = (.*)\n": r"    strategy = timed(\1)\n",
        },
    )
    log = flower(folder, NODES, workers=4, num_server_rounds=ROUNDS)
    found = [re.search(rf"{name}\S* (\d+\.\d+)", log) for name in ("seconds", "eval_loss")]
    assert all(found), log[-3000:]
    assert f"Starting {strategy} >" in log
    return Outcome(*(float(match[1]) for match in found))


def change(path, patterns):
    """Replace what is there of some patterns, once each."""
    text = path.read_text(encoding="utf-8")
    for pattern, new in patterns.items():
        text = re.sub(pattern, new, text, count=1)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_fedslice_is_sooner_than_fedavg(kind, flower, tmp_path):
    for name in KINDS[kind].needs:
        pytest.importorskip(name)
    usual = run(flower, kind, tmp_path / "usual", "Wrapper")
    mine = run(flower, kind, tmp_path / "mine", "FedSlice")
    assert mine.seconds < 0.7 * usual.seconds
    assert mine.loss < 1.2 * usual.loss
