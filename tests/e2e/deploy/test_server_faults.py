"""ServerApp and SuperLink end: the run goes on with the same nodes in the same rounds."""

import pytest
from flwr.app import Array, ArrayRecord

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.faults import scenarios
from flwr_hetero_studies.faults.fleet_run import TOY_APP

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]


def expected_selection(num_rounds, monkeypatch):
    """Run the same strategy on a LocalGrid, whose nodes have the same names.

    Flower's strategies shuffle the nodes that they are shown, so only who is chosen counts.
    """
    monkeypatch.syspath_prepend(str(TOY_APP))
    from toy_app import client_app, server_app

    settings = {"clients-per-round": 2, "num-tiers": 1, "seed": 0, "faults": ""}
    config = settings | {"work": 0.0}
    grid = LocalGrid(client_app.app, [DeviceProfile()] * 4, run_config=config)
    strategy = server_app.strategy_for(settings)
    selected = []
    strategy.on_round_end = lambda run, record: selected.append(sorted(record["selected"]))
    arrays = ArrayRecord({"w": Array(server_app.np.zeros(server_app.SIZE, "float32"))})
    strategy.start(grid, arrays, num_rounds)
    return selected


def test_killed_server_app_resumes_the_same_selection(fleet, tmp_path, monkeypatch):
    result = scenarios.server_app_killed(fleet, tmp_path / "run")
    assert result["survived"]
    assert 2 <= result["killed_after"] < 6
    selected = [sorted(record["selected"]) for record in result["history"]]
    assert selected == expected_selection(6, monkeypatch)


def test_restarted_superlink_resumes_the_run(fleet, tmp_path, monkeypatch):
    result = scenarios.superlink_restarted(fleet, tmp_path / "run")
    assert result["survived"]
    selected = [sorted(record["selected"]) for record in result["history"]]
    assert selected == expected_selection(6, monkeypatch)


def test_run_goes_on_after_an_expired_certificate(tmp_path):
    result = scenarios.certificate_expires(tmp_path, warm=True)
    assert result["survived"]
    assert result["said"]
