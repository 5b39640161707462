import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord
from recording import history

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.task.run import central_evaluate, initial_arrays

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
    assert strategy.session.info.failures == []
    start = 0.1
    assert accuracy(result) > start + (0.02 if algorithm == "sync-sgd" else 0.3)
    steps = {"sync-sgd": [1] * 5, "balanced": [8] * 5}.get(algorithm, [8, 8, 8, 8, 1])
    assert list(strategy.round_info()["num-steps"].values()) == steps
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
        assert strategy.session.info.failures == []
        assert accuracy(result) > 0.3


def test_private_mode_sends_no_index_and_no_single_loss():
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
        ({"resume": True}, "output-dir must be given to resume"),
        ({"fast-step": 3}, "run-config must hold known keys only, got 'fast-step'"),
    ],
)
def test_settings(config, named):
    with pytest.raises(ValueError, match=named):
        BiasedSettings.from_run_config(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"gamma": 2.0}, "gamma must be a number in"),
        ({"fast-steps": 0}, "fast_steps must be a whole number of at least 1"),
        ({"high-loss-fraction": 1.5}, "high_loss_fraction must be a number in"),
        ({"budget": "deadline", "gamma": 0.5}, "gamma must be left out with"),
    ],
)
def test_settings_of_the_method(config, named):
    with pytest.raises(ValueError, match=named):
        BiasedSettings.from_run_config(config).strategy()


# --- a real `flwr run` ---------------------------------------------------------------------


@pytest.mark.app
@pytest.mark.nightly
def test_ten_nodes_leave_a_run_directory(flower, tmp_path):
    out = tmp_path / "run"
    log = flower("biased-local-sgd", 10, num_server_rounds=5, output_dir=out)
    assert f"{out}/report.html" in log, log[-3000:]
    rounds = history(out)
    assert [record["round"] for record in rounds] == list(range(6))
    steps = rounds[-1]["biased-local-sgd"]["num-steps"]
    assert list(steps.values()) == [32] * 8 + [1] * 2
    assert rounds[-1]["global"]["accuracy"] > 0.8
    assert not any(record["failures"] for record in rounds)
    for name in ("config.json", "model.safetensors", "report.html", "checkpoint/state.npz"):
        assert (out / name).stat().st_size > 0, name


@pytest.mark.app
@pytest.mark.nightly
def test_shared_data_same_seed_same_run(flower, tmp_path):
    def run(name):
        out = tmp_path / name
        flower("biased-local-sgd", 5, num_server_rounds=3, shared_data=True, output_dir=out)
        return [(r["virtual_s"], r["global"]) for r in history(out)]

    first = run("first")
    assert first[-1][1]["accuracy"] > 0.5
    assert run("second") == first


@pytest.mark.app
@pytest.mark.nightly
def test_resume_equals_unbroken(flower, tmp_path):
    flower("biased-local-sgd", 5, num_server_rounds=4, output_dir=tmp_path / "whole")
    for rounds, resume in ((2, False), (4, True)):
        out = tmp_path / "broken"
        flower("biased-local-sgd", 5, num_server_rounds=rounds, output_dir=out, resume=resume)
    whole, broken = history(tmp_path / "whole"), history(tmp_path / "broken")
    assert [r["round"] for r in broken] == [0, 1, 2, 3, 4]
    assert broken[-1]["biased-local-sgd"] == whole[-1]["biased-local-sgd"]
