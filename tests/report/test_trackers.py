"""Through the true clients, offline; a tracker is skipped here where it is not installed."""

import re
from unittest.mock import Mock

import pytest
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.report import RunDirectory, read_history, trackers
from flwr_hetero.strategy import Recorded, TiFL

CLOCK = "virtual_s"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Give a function that runs and returns each round's figures; nothing leaves this machine."""
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "run"

    def start(name, num_rounds=2, resume=False):
        pytest.importorskip(name, exc_type=ImportError)
        run_dir = RunDirectory(folder, {"seed": 3, "api-key": "secret"}, resume=resume)
        strategy = TiFL(clients_per_round=1, num_tiers=1)
        recorded = Recorded(strategy, run_dir=run_dir, resume=resume, trackers=[name])
        recorded.start(LocalGrid(toy_app(), [DeviceProfile()] * 2), toy_arrays(), num_rounds)
        return [dict(trackers.figures_of(record)) for record in read_history(folder).rounds]

    return start


def test_tensorboard_has_every_round(run, tmp_path):
    run("tensorboard")
    figures = run("tensorboard", 3, resume=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {
        event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(CLOCK)
    }
    assert logged == pytest.approx({i: record[CLOCK] for i, record in enumerate(figures)})
    assert {CLOCK, "evaluate/eval-acc", "tifl/tier"} <= set(events.Tags()["tensors"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy's, of MLflow's tables
def test_mlflow_has_every_round_and_no_secret(run, tmp_path):
    run("mlflow")
    figures = run("mlflow", 3, resume=True)
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    [logged] = client.search_runs([client.get_experiment_by_name("flwr-hetero").experiment_id])
    assert logged.info.status == "FINISHED"
    history = client.get_metric_history(logged.info.run_id, CLOCK)
    values = [(step, record[CLOCK]) for step, record in enumerate(figures)]
    assert [(point.step, point.value) for point in history] == values
    assert logged.data.params == {"seed": "3", "api-key": "(hidden)"}


@pytest.mark.nightly
def test_wandb_has_every_round(run, tmp_path):
    figures = run("wandb")
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()  # key, two bytes, length of the value, value
    places = [m.end() for m in re.finditer(rb"virtual_s\x82\x01", content)]
    values = {float(content[i + 1 : i + 1 + content[i]]) for i in places}
    assert sorted(values) == pytest.approx([record[CLOCK] for record in figures])


def test_tracker_that_fails_does_not_end_the_run(run, monkeypatch, caplog):
    log = Mock(side_effect=[None, OSError("disk full")])
    close = Mock()
    # The name is that of a module that is installed, as check_trackers() demands.
    monkeypatch.setitem(trackers.TRACKERS, "json", lambda folder: trackers.Tracker(log, close))
    assert len(run("json", 3)) == 4
    assert [call.args[0] for call in log.call_args_list] == [0, 1]
    close.assert_not_called()
    assert "json failed and gets no more rounds of this run: OSError: disk full" in caplog.text


def test_unknown_and_missing_trackers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="trackers must be one of tensorboard, mlflow, wandb, prom"
    ):
        Recorded(run_dir=tmp_path / "run", trackers=["comet"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name, extra in (("mlflow", "trackers"), ("prometheus", "prometheus")):
        with pytest.raises(ModuleNotFoundError, match=rf"{name} is not installed: .*\[{extra}\]"):
            Recorded(run_dir=tmp_path / "run", trackers=[name])
    assert not (tmp_path / "run").exists()
