import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from recording import Folder, KilledError, evaluate, killed_and_resumed
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet
from flwr_hetero.keys import SERVER_ROUND
from flwr_hetero.strategy import Recorded, Wrapper

NO_EVALUATION = {"fraction_evaluate": 0.0}
INNER = {
    "FedAvg": lambda: flower.FedAvg(**NO_EVALUATION),
    "FedAdam": lambda: flower.FedAdam(**NO_EVALUATION),
    "FedYogi": lambda: flower.FedYogi(**NO_EVALUATION),
    "FedAdagrad": lambda: flower.FedAdagrad(**NO_EVALUATION),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9, **NO_EVALUATION),
    "sampling by Flower": lambda: flower.FedAvg(fraction_train=0.3, **NO_EVALUATION),
}


@pytest.mark.parametrize("name", sorted(INNER))
def test_killed_and_resumed_equals_unbroken(tmp_path, name):
    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 15))
        strategy = Recorded(INNER[name](), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(buffer=False), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


def test_resumed_run_knows_the_usual_metrics(tmp_path):
    def odd(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0 and message.content["config"][SERVER_ROUND] > 3:
            reply.content["metrics"]["odd"] = 1.0
        return reply

    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(mods=[odd]), profiles=[DeviceProfile()] * 2)
        strategy = Recorded(flower.FedAvg(**NO_EVALUATION), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


def test_crash_while_writing_leaves_last_checkpoint(tmp_path, monkeypatch):
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
    rounds = []

    class Spy(Recorded):
        def on_round_end(self, run, record):
            path = tmp_path / "state.npz"
            path.unlink(missing_ok=True)
            super().on_round_end(run, record)
            if path.exists():
                rounds.append(run.round)

    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    Spy(run_dir=Folder(tmp_path), checkpoint_every=3).start(grid, toy_arrays(), num_rounds=7)
    assert rounds == [0, 3, 6, 7]


def test_model_is_saved_when_the_run_fails(tmp_path):
    folder = Folder(tmp_path)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    with pytest.raises(KilledError):
        Recorded(run_dir=folder).start(grid, toy_arrays(), 3, evaluate_fn=evaluate(killed_in=2))
    assert set(folder.model) == {"w", "n"}


def test_checkpoint_every_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number"):
        Recorded(run_dir=Folder(tmp_path), checkpoint_every=0)
