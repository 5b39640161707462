"""A ServerApp is killed in the middle of a checkpoint, or its disk is full.

A separate process (``storage.py FOLDER [resume]``) runs FedAvg on a LocalGrid; its model has 32 MB.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import Recorded
from flwr_hetero_studies.faults.fleet_run import read_history
from flwr_hetero_studies.faults.one_node import small_disk
from flwr_hetero_studies.faults.scenarios import Found

SIZE = 8_000_000
ROUNDS = 5
DISK_MB = 80
"""Room for two checkpoints, but not for the draft of a third one."""
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + np.float32(1))})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def main(folder: str, resume: bool) -> None:
    run_dir = RunDirectory(folder, {}, resume=resume)
    strategy = Recorded(FedAvg(fraction_evaluate=0.0), run_dir=run_dir, resume=resume)
    start = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    strategy.start(LocalGrid(app, [DeviceProfile()] * 3), start, ROUNDS)


def start(folder: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "flwr_hetero_studies.faults.storage", str(folder), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def resumed(what: str, note: str, folder: Path) -> Found:
    """Resume a run; return whether it is complete, and how many rounds it repeated."""
    before = len(read_history(folder))
    process = start(folder, "resume")
    log = process.communicate()[1]
    with np.load(folder / "checkpoint" / "state.npz") as file:
        model = file["model/w"]
    again = int(log.split("Resumed after round ")[1].split()[0])
    rounds = [line["round"] for line in read_history(folder)]
    whole = rounds == list(range(ROUNDS + 1)) and bool((model == ROUNDS).all())
    found = {"survived": whole and process.returncode == 0, "rounds_lost": before - 1 - again}
    return {"faults": [{"fault": what, "injected": 1, "replies_lost": 0, "note": note, **found}]}


def killed_in_checkpoint(folder: Path) -> Found:
    """Kill the process while it writes a draft of round 2's checkpoint; resume the run."""
    folder /= "run"
    run = start(folder)
    draft = folder / "checkpoint" / "state.npz.draft"
    # The draft exists for some milliseconds only.
    while run.poll() is None and not (len(read_history(folder)) == 3 and draft.exists()):
        time.sleep(0.0005)
    run.kill()
    run.communicate()
    note = f"{draft.stat().st_size / 1e6:.1f} MB of a draft were left; `resume=true`"
    return resumed("ServerApp killed in the middle of a checkpoint", note, folder)


def disk_full(folder: Path) -> Found:
    """Fill a small disk in the middle of a checkpoint, make room, and resume the run."""
    with small_disk(folder, f"{DISK_MB}m") as mount:
        run = start(folder / "run")
        run.communicate()
        # The larger size stands for somebody who cleans up.
        subprocess.run([*mount, f"remount,size={4 * DISK_MB}m"], check=True)
        note = f"ends with exit code {run.returncode}; `resume=true` once there is room"
        return resumed("disk full in the middle of a checkpoint", note, folder / "run")


ON_A_DISK = {"killed_in_checkpoint": killed_in_checkpoint, "disk_full": disk_full}

if __name__ == "__main__":
    main(sys.argv[1], "resume" in sys.argv[2:])
