"""What a test keeps of a run: its rounds, its run directory, and whether a resume changed it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from flwr.app import MetricRecord

from flwr_hetero.strategy import Wrapper


class History(Wrapper):
    """Keep what the loop would write."""

    def __init__(self, strategy=None):
        super().__init__(strategy)
        self.records = []

    def on_round_end(self, run, record):
        self.records.append(record)


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def checkpoint(path: Path) -> tuple[dict, dict]:
    """Read the arrays and the rest of a checkpoint."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays, json.loads(arrays.pop("meta").tobytes())


def write(path: Path, arrays: dict, meta: dict) -> None:
    """Write a checkpoint."""
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


class Folder:
    """The least that Recorded needs of a run directory; without a path it has no checkpoint."""

    checkpoint_dir: Path | None = None

    def __init__(self, path: Path | None = None):
        if path is not None:
            path.mkdir(exist_ok=True)
            self.checkpoint_dir = path
        self.records = []
        self.model = None

    def append_round(self, record):
        self.records.append(json.loads(json.dumps(record)))

    def cut_after(self, last_round):
        self.records = [r for r in self.records if r["round"] <= last_round]

    def save_model(self, arrays):
        self.model = arrays

    def finish(self):
        return self.checkpoint_dir

    def close(self):
        pass


class KilledError(Exception):
    pass


def evaluate(killed_in: int | None = None):
    """Make an ``evaluate_fn``; in round ``killed_in`` the process ends there."""

    def evaluate_fn(server_round, arrays):
        if server_round == killed_in:
            raise KilledError
        return MetricRecord({"w": float(arrays["w"].numpy()[0])})

    return evaluate_fn


def timeless(record: dict) -> dict:
    """Leave out what no two runs have in common."""
    return {key: value for key, value in record.items() if key != "wall_s"}


def killed_and_resumed(go, tmp_path: Path, killed_in: int, same=timeless) -> None:
    """See that a run that is killed and resumed equals one that was not.

    ``go(folder, evaluate_fn, resume)`` starts it; ``same`` takes out of a round's record what
    must be the same.
    """
    whole = Folder(tmp_path / "whole")
    broken = Folder(tmp_path / "broken")
    random.seed(5)
    expected = go(whole, evaluate(), resume=False)
    random.seed(5)
    with pytest.raises(KilledError):
        go(broken, evaluate(killed_in), resume=False)
    random.seed(99)
    resumed = go(broken, evaluate(), resume=True)
    assert resumed.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(resumed.arrays[name].numpy(), array.numpy())
    assert resumed.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp
    assert [same(record) for record in broken.records] == [same(r) for r in whole.records]
    assert len(whole.records) > killed_in
