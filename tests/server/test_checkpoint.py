import pickle
import random
import re
from functools import partial

import numpy as np
import pytest
from attacker import leaf
from recording import Folder, checkpoint, history, killed_and_resumed, timeless, write
from toy import altered, toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import FedBuff, Recorded, Wrapper


def late(partition, number):
    return partition == 0 and number > 3


RUNS = {
    **{n: (partial(leaf, n), 15, ()) for n in ("FedAdam", "FedAvgM")},
    "FedAvg": (leaf, 15, ()),
    "sampling by Flower": (partial(leaf, fraction_train=0.3), 15, ()),
    "the usual metrics": (leaf, 2, [altered({"odd": 1.0}, late)]),
    "what nodes said first": (leaf, 4, [altered({"num-examples": 900}, late)]),
}


@pytest.mark.parametrize(("make", "num_nodes", "mods"), RUNS.values(), ids=RUNS)
def test_killed_and_resumed_equals_unbroken(tmp_path, make, num_nodes, mods):
    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(mods=mods), profiles=named_fleet("paper-5", num_nodes))
        strategy = Recorded(make(), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(buffer=False), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


def test_crash_while_writing_leaves_last_checkpoint(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Recorded(run_dir=folder).start(grid, toy_arrays(), num_rounds=2)
    before = (tmp_path / "state.npz").read_bytes()

    def torn(file, **arrays):
        file.write(b"half")
        raise OSError(28, "disk full")

    monkeypatch.setattr(np, "savez", torn)
    with pytest.raises(OSError, match="disk full"):
        Recorded(run_dir=folder).start(grid, toy_arrays(), num_rounds=1)
    assert (tmp_path / "state.npz").read_bytes() == before


def run(path, num_rounds=2, arrays=None, inner=None, **options):
    """Run, or resume, in a run directory; return the folder of its checkpoints."""
    strategy = Recorded(inner, run_dir=str(path), **options)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    strategy.start(grid, arrays or toy_arrays(), num_rounds)
    return path / "checkpoint"


def spoil(path, change=lambda meta: None, **model):
    """Write other arrays of the model, and another meta, into a checkpoint."""
    arrays, meta = checkpoint(path)
    change(meta)
    write(path, arrays | {f"model/{name}": value for name, value in model.items()}, meta)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "a flipped bit": lambda path: path.write_bytes(flipped(path.read_bytes(), 200)),
    "a pickle": lambda path: path.write_bytes(pickle.dumps([1])),
    "another file": lambda path: np.savez(path, meta=np.array("[3]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back(tmp_path, damage, caplog):
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    random.seed(0)
    run(whole, 4)
    random.seed(0)
    checkpoints = run(broken, 3)
    DAMAGES[damage](checkpoints / "state.npz")
    run(broken, 4, resume=True)
    assert [timeless(r) for r in history(broken)] == [timeless(r) for r in history(whole)]
    assert f"{checkpoints / 'state.npz'} cannot be read" in caplog.text
    DAMAGES[damage](checkpoints / "state.npz")
    (checkpoints / "previous.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"no checkpoint in {checkpoints} can be read") as caught:
        run(broken, 5, resume=True)
    assert "put back a copy of it, or leave resume out" in str(caught.value)


SHAPE, WIDE, NAN = np.zeros((3, 2), np.float32), np.zeros(4), np.full(4, np.nan, np.float32)
OTHERS = {
    "its model has w (3, 2) float32, this run's (4,) float32": {"w": SHAPE},
    "its model has w (4,) float64, this run's (4,) float32": {"w": WIDE},
    "its model has v (4,) float64, this run's missing": {"v": WIDE},
    "its model holds NaN or infinity in w, training has diverged": {"w": NAN},
    "KeyError('virtual_s')": {"change": lambda meta: meta.pop("virtual_s")},
    "it is of Recorded > FedAvg, this run is Recorded > Wrapper > FedAvg": {},
}


@pytest.mark.parametrize("reason", OTHERS)
def test_checkpoint_of_another_run_is_refused(tmp_path, reason):
    checkpoints = run(tmp_path / "run")
    spoil(checkpoints / "state.npz", **OTHERS[reason])
    lines = (tmp_path / "run" / "history.jsonl").read_bytes()
    text = re.escape(f"cannot go on from {checkpoints}/state.npz: {reason}")
    with pytest.raises(ValueError, match=text):
        run(tmp_path / "run", 4, inner=None if OTHERS[reason] else Wrapper(), resume=True)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == lines


@pytest.mark.parametrize("inner", [leaf, lambda: FedBuff(leaf(), buffer_size=3)])
def test_resume_without_checkpoint_is_refused(tmp_path, inner):
    checkpoints = run(tmp_path / "run", inner=inner())
    lines = (tmp_path / "run" / "history.jsonl").read_bytes()
    for path in checkpoints.glob("*.npz"):
        path.unlink()
    with pytest.raises(ValueError, match="run_dir must hold a checkpoint to resume from"):
        run(tmp_path / "run", 4, inner=inner(), resume=True)
    folder = Folder(tmp_path / "other")
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()])
    strategy = Recorded(inner(), run_dir=folder, resume=True)
    with pytest.raises(ValueError, match=r"no checkpoint in .*other can be read"):
        strategy.start(grid, toy_arrays(), 2)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == lines
    assert folder.records == []


@pytest.mark.parametrize("inner", [leaf, lambda: FedBuff(leaf(), buffer_size=3)])
def test_history_that_lacks_a_round_is_refused(tmp_path, inner):
    run(tmp_path / "run", inner=inner())
    path = tmp_path / "run" / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])
    with pytest.raises(ValueError, match=f"{path} lacks round 1, but the checkpoint is of round 2"):
        run(tmp_path / "run", 4, inner=inner(), resume=True)
    assert path.read_text() == lines[0] + lines[2]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"run_dir": None}, "run_dir must be an absolute path or a RunDirectory, got None"),
        ({"run_dir": "runs/first"}, "run_dir must be an absolute path"),
        ({"resume": True}, "resume must be the same for Recorded and for"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        Recorded(**{"run_dir": settings.get("run_dir") or RunDirectory(tmp_path)} | settings)
