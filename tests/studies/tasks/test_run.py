import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import history
from toy import toy_app

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.tasks import run as inner
from flwr_hetero_studies.tasks.node import train_node
from flwr_hetero_studies.tasks.run import StopEarly, run_app
from flwr_hetero_studies.tasks.settings import Settings


@pytest.mark.parametrize("name", ["mistyped", "empty"])
def test_resume_without_a_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / name)
    settings = Settings(output_dir=out, resume=True, num_server_rounds=1, model="softmax")
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()])
    with pytest.raises(ValueError, match="output-dir must hold a checkpoint to resume") as caught:
        run_app("toy", settings, Wrapper(), grid)
    assert "correct the path" in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Give a function that runs softmax regression on two nodes and returns its history."""
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)

    def go(name="run", **given):
        out = tmp_path / name
        given = {"model": "softmax", "output_dir": str(out), "fleet": "uniform"} | given
        settings = Settings(**{"num_server_rounds": 4} | given)
        app = ClientApp(mods=[emulated_device])
        app.train()(train_node)
        config = {key.replace("_", "-"): value for key, value in vars(settings).items()}
        grid = LocalGrid(app, [DeviceProfile()] * 2, run_config=config)
        run_app("toy", settings, Wrapper(inner.inner_strategy("fedavg", settings)), grid)
        return history(out)

    return go


def test_target_accuracy_at_two_evaluations_in_a_row_ends_the_run(run, caplog):
    accuracy = [record["global"]["accuracy"] for record in run("whole")]
    target = min(accuracy[1], accuracy[2]) - 0.001
    there = [value >= target for value in accuracy]
    second = next(i for i in range(1, len(there)) if there[i - 1] and there[i])
    records = run("short", target_accuracy=target)
    assert len(records) == second + 1 < len(accuracy)
    assert f"has reached target-accuracy {target:g}" in records[-1]["stopped"]
    assert f"Stopped after round {second}: accuracy" in caplog.text


def test_one_evaluation_at_the_target_may_be_luck():
    settings = Settings(target_accuracy=0.8)
    stop = StopEarly(Wrapper(FedAvg()), settings)
    ended = []
    for accuracy in (0.9, 0.7, 0.85, None, 0.8):
        record = {"global": {} if accuracy is None else {"accuracy": accuracy}, "virtual_s": 1.0}
        stop.on_round_end(None, record)
        ended.append("stopped" in record)
    assert ended == [False, False, False, False, True]


def test_time_budget_ends_the_run(run):
    whole = run("whole")
    records = run("short", time_budget_s=whole[2]["virtual_s"])
    assert [record["round"] for record in records] == [0, 1, 2]
    assert "used up time-budget-s" in records[-1]["stopped"]
    assert "stopped" not in records[1]
