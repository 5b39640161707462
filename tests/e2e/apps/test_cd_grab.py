import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays

APP = Path(__file__).parents[3] / "apps" / "cd-grab"
sys.path.insert(0, str(APP))
from cd_grab_app.client_app import app  # noqa: E402
from cd_grab_app.task import METHODS, OrderSettings  # noqa: E402

DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def local_run(num_rounds=3, *, nodes=4, grid=None, **config):
    """Run the app on an emulated fleet in this process."""
    run_config = DEFAULTS | {"num-server-rounds": num_rounds, "batch-size": 16}
    run_config |= {key.replace("_", "-"): value for key, value in config.items()}
    settings = OrderSettings.from_run_config(run_config)
    grid = grid or LocalGrid(app, named_fleet("uniform", nodes), run_config=run_config)
    strategy, rounds = Wrapper(settings.strategy()), []
    strategy.on_round_end = lambda run, record: rounds.append(record)
    strategy.start(
        grid, initial_arrays(settings), num_rounds, evaluate_fn=central_evaluate(settings)
    )
    assert not any(record["failures"] for record in rounds)
    return rounds


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(method):
    rounds = local_run(4, method=method)
    assert rounds[-1]["global"]["accuracy"] > 0.8
    assert all(record["herding"]["herding_bound"] > 0 for record in rounds[1:])
    steps = round(0.9 * 1438 / 4 / 16)
    assert rounds[-1]["train"]["num-steps"] == steps
    if method == "cd-grab":
        assert rounds[-1]["cd_grab"]["pairs_together"] == 4 * (steps // 2)
    else:
        assert "cd_grab" not in rounds[-1]


@pytest.mark.parametrize(
    ("config", "pairs"),
    [
        ({"unit": "example", "sketch_size": 64, "local_epochs": 2}, 2 * 162 + 2 * 161),
        ({"mode": "exact"}, 4),
        ({"num_units": 6, "partition": "quantity"}, 4 * 3),
        ({"fraction_train": 0.5, "measure": False}, 2 * 10),
        ({"inner": "fedadam", "model": "cnn", "sketch_size": 256}, 4 * 10),
    ],
)
def test_every_setting_runs(config, pairs):
    rounds = local_run(2, **config)
    assert rounds[-1]["cd_grab"]["pairs"] == pairs
    assert np.isfinite(rounds[-1]["global"]["loss"])


@pytest.mark.parametrize(("unit", "times"), [("batch", 1 + 5 / 48), ("example", 2.0)])
def test_reading_gradients_is_on_the_clock(unit, times):
    plain_s, read_s = (
        local_run(2, method=method, unit=unit)[-1]["virtual_s"] for method in ("d-rr", "cd-grab")
    )
    assert read_s / plain_s == pytest.approx(times, rel=0.01)


def test_orders_persist_and_their_loss_is_survived():
    run_config = DEFAULTS | {"batch-size": 16}
    grid = LocalGrid(app, named_fleet("uniform", 3), run_config=run_config)
    local_run(3, grid=grid)
    node_id = next(iter(grid.get_node_ids()))
    records = grid.context(node_id).state
    (arrays,) = [name for name in records if name.endswith("order.arrays")]
    assert sorted(records[arrays]["order.order"].numpy()) == list(range(27))
    for spoil in (lambda: records[arrays].pop("order.order"), lambda: records.clear()):
        spoil()
        assert local_run(2, grid=grid)[-1]["global"]["accuracy"] > 0.7


def test_defaults_are_those_of_the_pyproject():
    assert OrderSettings.from_run_config(DEFAULTS) == OrderSettings()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"method": "best"}, "method must be one of cd-grab"),
        ({"unit": "pixel"}, "unit must be one of batch, example"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"mode": "exact", "method": "d-rr"}, "mode must be sketched without cd-grab"),
        ({"fraction-train": 0.0}, r"fraction-train must lie in \(0, 1\]"),
        ({"mode": "fast"}, "mode must be one of sketched, exact"),
        ({"sketch-size": 0}, "sketch-size must be a whole number of at least 1"),
        ({"num-units": 1}, "num-units must be a whole number of at least 2"),
    ],
)
def test_settings_refusals(config, named):
    with pytest.raises(ValueError, match=named):
        OrderSettings.from_run_config(config)
