import json
import logging
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from flwr_hetero.report import RunDirectory, read_history, run_dir
from flwr_hetero.report import page as page_module


def rounds_in(path):
    return [json.loads(line)["round"] for line in (path / "history.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run", {"seed": 3})


def test_config_is_written_without_secrets(tmp_path):
    settings = {"seed": np.int64(3), "learning-rate": np.float32(0.5), "num_tiers": 5}
    hidden = dict.fromkeys(("hub-token", "HF-TOKEN", "db.password"), "(hidden)")
    run = RunDirectory(tmp_path / "a" / "run", settings | dict.fromkeys(hidden, "s3cret"))
    run.close()
    again = RunDirectory(run.path, settings | dict.fromkeys(hidden, "s3cret"))  # no round blocks it
    config = json.loads((again.path / "config.json").read_text())
    assert config["settings"] == {"seed": 3, "learning-rate": 0.5, "num-tiers": 5, **hidden}
    assert {"flwr", "torch", "flwr-hetero"} <= set(config["versions"])
    assert (config["python"][:2], config["started"][-6:]) == ("3.", "+00:00")
    assert config["resumed"] == []


# Values as given, and as they are read from JSON.
VALUES = [
    (np.float64("inf"), None),
    (np.bool_(True), True),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.array(3.5), 3.5),
    ((1, float("nan")), [1, None]),
    (Path("/data"), "/data"),
    ([None, b"x", np.float32(0.5), [np.inf]], [None, "b'x'", 0.5, [None]]),
    ({1: np.int64(2)}, {"1": 2}),
]


def test_round_is_plain_json_and_synced(run, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda _: synced.append(rounds_in(run.path)))
    run.append_round({"round": np.int64(0), "values": [value for value, _ in VALUES]})
    failure = {"node": "a\u2028b\x85c\nd", "reason": "x"}  # other separators of lines
    run.append_round({"round": 1, "failures": [failure]})
    assert synced == [[0], [0, 1]]
    line = (run.path / "history.jsonl").read_text().split("\n", 1)[0]
    record = json.loads(line, parse_constant=pytest.fail)
    assert record == {"round": 0, "values": [plain for _, plain in VALUES]}
    history = read_history(run.path)
    assert len(history.rounds) == 2
    assert history.notes == ()
    assert history.rounds[1]["failures"] == [{"node": "a?b?c?d", "reason": "x"}]
    for number in (None, -1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="round must be a whole number of at least 0"):
            run.append_round({"round": number})


def test_bad_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    RunDirectory(tmp_path / "old").append_round({"round": 0})
    for path, words in (
        ("runs/first", "be an absolute path, got 'runs/first'"),
        ("", "be an absolute path"),
        (tmp_path / "old", f"not hold another run, got '{tmp_path}/old'"),
        (tmp_path / "file", "be a folder to write to"),
    ):
        with pytest.raises(ValueError, match=f"path must {words}"):
            RunDirectory(path)
    assert rounds_in(tmp_path / "old") == [0]
    gone = ("plotly", "jinja2")
    monkeypatch.setattr(run_dir.util, "find_spec", lambda name: None if name in gone else name)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs jinja2: .* jinja2 plotly, or.*\[report\]"
    ):
        RunDirectory(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_round_occurs_twice_after_a_resume(run):
    for number in range(6):
        run.append_round({"round": number, "try": 1})
    (run.checkpoint_dir / "state.npz").write_bytes(b"after round 3")
    with (run.path / "history.jsonl").open("a") as file:
        file.write('{"round": 6, "vir')
    run.close()
    files = [run.path / name for name in ("config.json", "history.jsonl")]
    before = [file.read_bytes() for file in files]
    again = RunDirectory(run.path, {"seed": 4}, resume=True)
    with pytest.raises(ValueError, match="lacks round 6, but the checkpoint is of round 7"):
        again.cut_after(7)
    assert [file.read_bytes() for file in files] == before  # the checkpoint may be refused
    again.cut_after(3)
    again.append_round({"round": 4, "try": 2})
    assert [r["try"] for r in read_history(run.path).rounds] == [1, 1, 1, 1, 2]
    config = json.loads((run.path / "config.json").read_text())
    assert (len(config["resumed"]), config["settings"]) == (1, {"seed": 4})


@pytest.mark.parametrize("name", ["mistyped", "empty", "begun"])
def test_resume_without_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "begun").append_round({"round": 0})  # killed before its checkpoint
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="must hold a checkpoint to resume from") as caught:
        RunDirectory(tmp_path / name, resume=True)
    assert "correct the path, or start a new run in another folder" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("resume", [False, True])
def test_one_run_at_a_time(run, resume, monkeypatch):
    if resume:
        (run.checkpoint_dir / "state.npz").write_bytes(b"after round 0")
    config = (run.path / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "ENDING_S", 0.0)
        with pytest.raises(ValueError, match="path must be in use by one run only"):
            RunDirectory(run.path, {"seed": 4}, resume=resume)
    assert (run.path / "config.json").read_bytes() == config
    ending = threading.Timer(0.2 * resume, run.close)  # as after SIGTERM, while it draws its report
    ending.start()
    if not resume:
        ending.join()
    RunDirectory(run.path, {"seed": 4}, resume=resume)
    ending.join()


def test_model_comes_back_and_survives_a_crash(run, monkeypatch):
    arrays = {
        "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "strided": np.arange(10)[::2],
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
    }
    run.save_model(arrays)

    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        run.save_model({"w": np.ones(2)})
    loaded = load_file(run.path / "model.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


def test_report_is_built_or_costs_nothing(run, monkeypatch, caplog):
    assert run.finish() == run.path
    assert "No round was completed" in (run.path / "report.html").read_text()

    monkeypatch.setattr(page_module, "write_report", Mock(side_effect=RuntimeError("no ink")))
    with caplog.at_level(logging.ERROR):
        assert run.finish() == run.path
    assert f"flwr-hetero report {run.path}" in caplog.text
    assert "no ink" in caplog.text
