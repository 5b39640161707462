import json
import random
from pathlib import Path

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp import strategy as flower
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.strategy import Recorded, TiFL, Wrapper

QUIET = {"fraction_evaluate": 0.0}


class Folder:
    """The least that Recorded needs of a run directory."""

    def __init__(self, path: Path):
        self.checkpoint_dir = path
        self.records, self.model = [], None

    def append_round(self, record):
        self.records.append(json.loads(json.dumps(record)))

    def cut_after(self, last_round):
        self.records = [r for r in self.records if r["round"] <= last_round]

    def save_model(self, arrays):
        self.model = arrays

    def finish(self):
        return self.checkpoint_dir


class KilledError(Exception):
    pass


def evaluate(killed_in=None):
    def evaluate_fn(server_round, arrays):
        if server_round == killed_in:
            raise KilledError
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    return evaluate_fn


INNER = {
    "FedAvg": lambda: flower.FedAvg(**QUIET),
    "FedAdam": lambda: flower.FedAdam(**QUIET),
    "FedYogi": lambda: flower.FedYogi(**QUIET),
    "FedAdagrad": lambda: flower.FedAdagrad(**QUIET),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9, **QUIET),
    "TiFL": lambda: TiFL(flower.FedAdam(**QUIET), 3, interval=2, credits=4),
    "sampling by Flower": lambda: flower.FedAvg(fraction_train=0.3, **QUIET),
}


@pytest.mark.parametrize("name", sorted(INNER))
@pytest.mark.parametrize("killed_in", [1, 4, 7])
def test_killed_and_resumed_equals_unbroken(tmp_path, name, killed_in):
    def go(folder, *, killed_in=None, resume=False):
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 15))
        strategy = Recorded(INNER[name](), run_dir=folder, resume=resume)
        arrays = toy_arrays(buffer=False)
        return strategy.start(grid, arrays, num_rounds=8, evaluate_fn=evaluate(killed_in))

    random.seed(5)
    whole = Folder(tmp_path / "whole")
    whole.checkpoint_dir.mkdir()
    expected = go(whole)
    random.seed(5)
    broken = Folder(tmp_path / "broken")
    broken.checkpoint_dir.mkdir()
    with pytest.raises(KilledError):
        go(broken, killed_in=killed_in)
    random.seed(99)
    result = go(broken, resume=True)
    assert np.array_equal(result.arrays["w"].numpy(), expected.arrays["w"].numpy())
    assert result.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp
    timeless = [{k: v for k, v in r.items() if k != "wall_s"} for r in broken.records]
    for mine, theirs in zip(timeless, whole.records, strict=True):
        assert mine == {k: v for k, v in theirs.items() if k != "wall_s"}


def test_crash_while_writing_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Recorded(run_dir=folder).start(grid, toy_arrays(), num_rounds=2)
    before = (tmp_path / "state.npz").read_bytes()

    def torn(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", torn)
    with pytest.raises(OSError, match="disk full"):
        Recorded(run_dir=folder).start(grid, toy_arrays(), num_rounds=1)
    assert (tmp_path / "state.npz").read_bytes() == before


def test_other_strategies_cannot_resume(tmp_path):
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Recorded(run_dir=Folder(tmp_path)).start(grid, toy_arrays(), num_rounds=1)
    other = Recorded(Wrapper(), run_dir=Folder(tmp_path), resume=True)
    with pytest.raises(ValueError, match="Recorded > FedAvg, this run is Recorded > Wrapper"):
        other.start(grid, toy_arrays(), num_rounds=2)


def test_checkpoint_every_n_rounds_and_at_the_end(tmp_path):
    folder = Folder(tmp_path)
    rounds = []

    class Spy(Recorded):
        def on_round_end(self, run, record):
            path = tmp_path / "state.npz"
            path.unlink(missing_ok=True)
            super().on_round_end(run, record)
            if path.exists():
                rounds.append(run.round)

    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Spy(run_dir=folder, checkpoint_every=3).start(grid, toy_arrays(), num_rounds=7)
    assert rounds == [0, 3, 6, 7]


def test_the_model_is_saved_even_when_the_run_fails(tmp_path):
    folder = Folder(tmp_path)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    with pytest.raises(KilledError):
        Recorded(run_dir=folder).start(
            grid, toy_arrays(), num_rounds=3, evaluate_fn=evaluate(killed_in=2)
        )
    assert set(folder.model) == {"w", "n"}


def test_checkpoint_every_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        Recorded(run_dir=Folder(tmp_path), checkpoint_every=0)
