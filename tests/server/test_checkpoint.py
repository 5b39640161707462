import json
import pickle
import random

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from recording import Folder, history, killed_and_resumed, timeless
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.keys import SERVER_ROUND
from flwr_hetero.report import RunDirectory
from flwr_hetero.strategy import FedBuff, Recorded, Wrapper

NO_EVALUATION = {"fraction_evaluate": 0.0}
INNER = {
    "FedAvg": lambda: flower.FedAvg(**NO_EVALUATION),
    "FedAdam": lambda: flower.FedAdam(**NO_EVALUATION),
    "FedYogi": lambda: flower.FedYogi(**NO_EVALUATION),
    "FedAdagrad": lambda: flower.FedAdagrad(**NO_EVALUATION),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9, **NO_EVALUATION),
    "sampling by Flower": lambda: flower.FedAvg(fraction_train=0.3, **NO_EVALUATION),
}


@pytest.mark.parametrize("name", sorted(INNER))
def test_killed_and_resumed_equals_unbroken(tmp_path, name):
    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 15))
        strategy = Recorded(INNER[name](), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(buffer=False), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


def test_resumed_run_knows_the_usual_metrics(tmp_path):
    def odd(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0 and message.content["config"][SERVER_ROUND] > 3:
            reply.content["metrics"]["odd"] = 1.0
        return reply

    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(mods=[odd]), profiles=[DeviceProfile()] * 2)
        strategy = Recorded(flower.FedAvg(**NO_EVALUATION), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


def test_resumed_run_knows_what_nodes_said_first(tmp_path):
    """Of their examples: a claim that has grown counts twice the first, also after a resume."""

    def more(message, context, call_next):
        reply = call_next(message, context)
        late = message.content["config"][SERVER_ROUND] > 3
        grown = late and context.node_config["partition-id"] == 0
        reply.content["metrics"]["num-examples"] = 400 if grown else 40
        return reply

    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(mods=[more]), profiles=[DeviceProfile()] * 4)
        strategy = Recorded(flower.FedAvg(**NO_EVALUATION), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(), 5, evaluate_fn=evaluate_fn)

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
    reason = r"no checkpoint of round 0 \(disk full\): make room, then resume .*state\.npz"
    with pytest.raises(OSError, match=reason):
        Recorded(run_dir=folder).start(grid, toy_arrays(), num_rounds=1)
    assert (tmp_path / "state.npz").read_bytes() == before
    assert not (tmp_path / "state.draft").exists()


def run(path, num_rounds=2, arrays=None, inner=None, **options):
    """Run, or resume, in a run directory; return the folder of its checkpoints."""
    strategy = Recorded(inner, run_dir=str(path), **options)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    strategy.start(grid, arrays or toy_arrays(), num_rounds)
    return path / "checkpoint"


def spoil_model(path, **changes):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **arrays | {f"model/{name}": value for name, value in changes.items()})


def spoil_meta(path, key):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays["meta"]))
    del meta[key]
    np.savez(path, **arrays | {"meta": np.array(json.dumps(meta))})


@pytest.fixture
def _no_report(monkeypatch):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)


BUFFERED = {"inner": lambda: FedBuff(flower.FedAvg(**NO_EVALUATION), buffer_size=3)}


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "a flipped bit": lambda path: path.write_bytes(flipped(path.read_bytes(), 200)),
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps([1])),
    "another file": lambda path: np.savez(path, meta=np.array("[3]")),
}


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back(tmp_path, damage, caplog):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
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


OTHERS = {
    "strategies": (
        lambda path: None,
        {"inner": Wrapper},
        "it is of Recorded > FedAvg, this run is Recorded > Wrapper > FedAvg",
    ),
    "a shape": (
        lambda path: spoil_model(path, w=np.zeros((3, 2), np.float32)),
        {},
        r"its model has w \(3, 2\) float32, this run's \(4,\) float32",
    ),
    "a dtype": (
        lambda path: spoil_model(path, w=np.zeros(4)),
        {},
        r"its model has w \(4,\) float64, this run's \(4,\) float32",
    ),
    "a layer more": (
        lambda path: spoil_model(path, v=np.zeros(1)),
        {},
        r"its model has v \(1,\) float64, this run's missing",
    ),
    "NaN": (
        lambda path: spoil_model(path, w=np.full(4, np.nan, np.float32)),
        {},
        "its model holds NaN or infinity in w, training has diverged",
    ),
    "a state": (
        lambda path: spoil_meta(path, "virtual_s"),
        {},
        "'virtual_s'",
    ),
}


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("other", OTHERS)
def test_checkpoint_of_another_run_is_refused(tmp_path, other):
    checkpoints = run(tmp_path / "run")
    spoil, options, reason = OTHERS[other]
    spoil(checkpoints / "state.npz")
    lines = (tmp_path / "run" / "history.jsonl").read_bytes()
    inner = options["inner"]() if options else None
    with pytest.raises(ValueError, match=f"cannot go on from {checkpoints}/state.npz: .*{reason}"):
        run(tmp_path / "run", 4, inner=inner, resume=True)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == lines


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("inner", [lambda: None, BUFFERED["inner"]], ids=["rounds", "merges"])
def test_resume_without_checkpoint_is_refused(tmp_path, inner):
    checkpoints = run(tmp_path / "run", inner=inner())
    lines = (tmp_path / "run" / "history.jsonl").read_bytes()
    for path in checkpoints.glob("*.npz"):
        path.unlink()
    with pytest.raises(ValueError, match="run_dir must hold a checkpoint to resume from"):
        run(tmp_path / "run", 4, inner=inner(), resume=True)
    folder, grid = Folder(tmp_path / "other"), LocalGrid(toy_app(), profiles=[DeviceProfile()])
    strategy = Recorded(inner(), run_dir=folder, resume=True)
    with pytest.raises(ValueError, match=r"no checkpoint in .*other can be read"):
        strategy.start(grid, toy_arrays(), 2)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == lines
    assert folder.records == []


@pytest.mark.usefixtures("_no_report")
@pytest.mark.parametrize("inner", [lambda: None, BUFFERED["inner"]], ids=["rounds", "merges"])
def test_history_that_lacks_a_round_is_refused(tmp_path, inner):
    run(tmp_path / "run", inner=inner())
    path = tmp_path / "run" / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])
    with pytest.raises(ValueError, match=f"{path} lacks round 1, the checkpoint is of round 2"):
        run(tmp_path / "run", 4, inner=inner(), resume=True)
    assert path.read_text() == lines[0] + lines[2]


@pytest.mark.parametrize(
    ("run_dir", "resume", "reason"),
    [
        (None, False, "run_dir must be an absolute path or a RunDirectory, got None"),
        ("runs/first", False, "run_dir must be an absolute path"),
        (lambda path: RunDirectory(path), True, "resume must be the same for Recorded and for"),
    ],
)
def test_bad_run_dir_is_refused(tmp_path, run_dir, resume, reason):
    run_dir = run_dir(tmp_path) if callable(run_dir) else run_dir
    with pytest.raises(ValueError, match=reason):
        Recorded(run_dir=run_dir, resume=resume)


def test_checkpoint_every_n_rounds_and_at_the_end(tmp_path):
    rounds = []

    class Spy(Recorded):
        def on_round_end(self, run, record):
            path = tmp_path / "state.npz"
            path.unlink(missing_ok=True)
            super().on_round_end(run, record)
            if path.exists():
                rounds.append(run.round)

    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Spy(run_dir=Folder(tmp_path), checkpoint_every=3).start(grid, toy_arrays(), num_rounds=7)
    assert rounds == [0, 3, 6, 7]
