import pytest
from flwr.clientapp import ClientApp
from recording import history

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.tasks import run as inner
from flwr_hetero_studies.tasks.node import train_node
from flwr_hetero_studies.tasks.run import run_app
from flwr_hetero_studies.tasks.settings import Settings


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
        run_app("toy", settings, Wrapper(inner.inner_strategy("fedavg")), grid)
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


def test_time_budget_ends_the_run(run):
    whole = run("whole")
    records = run("short", time_budget_s=whole[2]["virtual_s"])
    assert [record["round"] for record in records] == [0, 1, 2]
    assert "used up time-budget-s" in records[-1]["stopped"]
    assert "stopped" not in records[1]
