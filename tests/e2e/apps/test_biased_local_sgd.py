import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "biased-local-sgd"))
from biased_app.client_app import STATE, app
from biased_app.task import BIASES, FEDNOVA, BiasedSettings


def local_run(num_rounds=3, *, nodes=5, grid=None, **config):
    """Run the app on an emulated fleet in this process."""
    run_config = {"num-server-rounds": num_rounds, "partition": "iid", "model": "softmax"}
    run_config |= {key.replace("_", "-"): value for key, value in config.items()}
    settings = BiasedSettings.from_run_config(run_config)
    grid = grid or LocalGrid(app, named_fleet("gpu-cpu", nodes), run_config=run_config)
    strategy = settings.strategy()
    result = strategy.start(
        grid,
        initial_arrays(settings),
        num_rounds,
        train_config=ConfigRecord(),
        evaluate_fn=central_evaluate(settings),
    )
    return result, strategy, grid


def accuracy(result):
    rounds = result.evaluate_metrics_serverapp
    return rounds[max(rounds)]["accuracy"]


@pytest.mark.parametrize(
    ("algorithm", "shared_data"),
    [*((name, False) for name in (*BIASES, FEDNOVA)), *((name, True) for name in BIASES)],
)
def test_every_algorithm_runs(algorithm, shared_data):
    result, strategy, grid = local_run(algorithm=algorithm, shared_data=shared_data, fast_steps=8)
    assert strategy.fleet.failures == []
    start = 0.1
    assert accuracy(result) > start + (0.02 if algorithm == "sync-sgd" else 0.3)
    steps = {"sync-sgd": [1] * 5, "balanced": [8] * 5}.get(algorithm, [8, 8, 8, 8, 1])
    assert list(strategy.round_info()["num_steps"].values()) == steps
    slowest = 8 if algorithm == "balanced" else 1
    most_s = 3 * slowest * 16 * 0.01  # an epoch's last batch is smaller
    assert 0.95 * most_s < grid.virtual_time_s < 1.0001 * most_s


def test_losses_persist_and_their_loss_is_survived():
    _, _, grid = local_run(2, fast_steps=8)
    node_id = next(iter(grid.get_node_ids()))
    records = grid.context(node_id).state
    (arrays,) = [name for name in records if name.endswith(f"{STATE}.arrays")]
    losses = records[arrays]["losses"].numpy()
    assert np.isfinite(losses).sum() >= 8 * 16
    for spoil in (lambda: records.clear(), lambda: records[arrays].pop("losses")):
        spoil()
        result, strategy, _ = local_run(2, fast_steps=8, grid=grid)
        assert strategy.fleet.failures == []
        assert accuracy(result) > 0.3


def test_private_mode_sends_no_single_loss():
    sent = []

    class Listening(LocalGrid):
        def wait_for(self, message_ids, timeout=None, enough=None):
            replies = super().wait_for(message_ids, timeout, enough)
            sent.extend(replies)
            return replies

    run_config = {"num-server-rounds": 3, "partition": "iid", "model": "softmax"}
    grid = Listening(app, named_fleet("gpu-cpu", 5), run_config=run_config)
    local_run(3, grid=grid)
    assert sent
    for reply in sent:
        assert set(reply.content) == {"arrays", "metrics", "flwr-hetero.timing"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"algorithm": "best"}, "algorithm must be one of biased"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"algorithm": "fednova", "shared-data": True}, "shared-data must be false with fednova"),
        ({"gamma": 2.0}, "gamma must be a number in"),
        ({"fast-steps": 0}, "fast-steps must be a whole number of at least 1"),
        ({"high-loss-fraction": 1.5}, "high-loss-fraction must be a number in"),
        ({"budget": "deadline", "gamma": 0.5}, "gamma must be left out with"),
    ],
)
def test_settings_refusals(config, named):
    with pytest.raises(ValueError, match=named):
        BiasedSettings.from_run_config(config)
