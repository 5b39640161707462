"""The race: what its nodes train, what its fleet counts, how it is tuned and read."""

from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero.cli import main
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.fleet import DeviceProfile
from flwr_hetero.mod import emulated_device
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.core.bench import CLAIMS, missing
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import read
from flwr_hetero_studies.race import cases, methods, network, tuning, watch
from flwr_hetero_studies.race.cells import CELLS
from flwr_hetero_studies.tasks.data import Examples
from flwr_hetero_studies.tasks.training import train

# --- the nodes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mu", "lr"), [("sgd", 0.0, 0.2), ("sgd", 0.5, 0.2), ("momentum", 0.0, 0.1),
                           ("adam", 0.0, 0.01)]
)  # fmt: skip
def test_numpy_network_trains_as_torch_does(name, mu, lr):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    inputs = np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32)
    examples = network.Labelled(inputs, np.arange(40) % 3)
    net = [p.detach().numpy().copy() for p in model.parameters()]
    optimizer = network.Optimizer(name)
    sampler = UniformSampler(40, 8, seed=1)
    done = network.train_numpy(net, examples, sampler, 7, lr, mu, optimizer)
    tensors = Examples(*map(torch.from_numpy, examples))
    sampler = UniformSampler(40, 8, seed=1)
    how = {"optimizer": "adam"} if name == "adam" else {"momentum": 0.9 * (name == "momentum")}
    theirs = train(model, tensors, sampler, num_steps=7, lr=lr, proximal=mu, **how)
    assert done[:5] == pytest.approx(theirs[:5], rel=1e-5)
    for array, parameter in zip(net, model.parameters(), strict=True):
        np.testing.assert_allclose(array, parameter.detach().numpy(), atol=1e-6)


# --- the fleet ------------------------------------------------------------------------------


def fleet(*speeds):
    app = ClientApp(mods=[emulated_device])

    @app.train()
    def answer(message, context):
        metrics = MetricRecord({"num-examples": 100, "examples-processed": 100})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return watch.MeteredGrid(app, [DeviceProfile(speed) for speed in speeds], seed=0)


def test_fleet_counts_work_that_nobody_waits_for():
    grid = fleet(2.0, 1.0, 0.1)
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    ask = [Message(content, node_id, "train") for node_id in grid.get_node_ids()]
    assert len(grid.send_and_receive(ask, timeout=1.0)) == 2
    assert grid.virtual_time_s == 1.0
    assert grid.device_s == pytest.approx(0.5 + 1.0 + 10.0)
    assert grid.examples == 300
    assert grid.bytes == 3 * 8 + 3 * 16, "a number each way, and another one back"


# --- tuning ---------------------------------------------------------------------------------


def test_settings_are_tuned_one_after_the_other():
    method = methods.Entrant(None, (1, 2, 3), ("x", "y"), (0.1, 0.2))
    cost = lambda trial: abs(trial[0] - 0.2) + abs(trial[1] - 3) + (trial[2] != "y")  # noqa: E731
    found = {}
    batches = []
    while todo := tuning.trials_of(method, found):
        batches.append(todo)
        found |= {trial: cost(trial) for trial in todo}
    assert batches == [
        [(0.1, 1, "x"), (0.2, 1, "x")], [(0.2, 2, "x"), (0.2, 3, "x")], [(0.2, 3, "y")]
    ]  # fmt: skip
    beyond = methods.Entrant(None, rates=(0.1, 0.2), one_more=True)
    found_rates = {(0.1, None, None): 1.0, (0.2, None, None): 2.0}
    assert tuning.trials_of(beyond, found_rates) == [(0.05, None, None)]
    assert tuning.trials_of(beyond, found_rates | {(0.05, None, None): 0.0}) == []
    assert tuning.best_of(method, found) == (0.2, 3, "y")
    assert tuning.best_of(method, dict(list(found.items())[:4])) is None


def test_every_method_has_the_same_number_of_trials():
    for name, method in methods.METHODS.items():
        tried = len(method.rates) + len(method.first) + len(method.second) - 2
        # ours has FedAvg's rate
        assert tried == 7 or name == methods.OURS, name


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_can_be_made(name):
    method = methods.METHODS[name]
    for count, first, second in product((3, 5, 20), method.first, method.second):
        if method.runs_with(count, 20):
            assert method.make(methods.fedavg, count, 0, first, second) is not None


# --- the record -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_can_be_made(name):
    cell = CELLS[name]
    assert len(cell.fleet(0)) == cell.nodes
    for method in cell.methods:
        entrant = methods.METHODS[method]
        made = entrant.make(cell.base, 5, 0, entrant.first[0], entrant.second[0])
        assert isinstance(made, Wrapper)


def test_record_has_what_is_planned_with_it():
    lines = read(CLAIMS["race"])
    for data in ("fashion_mnist", "stdlib", "cifar10"):
        left = missing(cases.plan(Options(cases.SETTINGS, data), lines), lines, ["*"])
        # FedAvg in bits, where all nodes are at work, has one seed.
        assert {trial.label for trial in left} <= {"4 bits: 10 Mbit/s, 20 at work/FedAvg"}


def test_a_row_can_be_run_and_printed_by_itself(tmp_path, capsys):
    patterns = ["tuning: dirichlet*/yardstick", "tuning: dirichlet, 5*/FedAvg"]
    patterns += ["dirichlet, 3*/yardstick", "dirichlet, 5*/FedAvg", "dirichlet, 5*/FedSlice"]
    out = ["--out", str(tmp_path)]
    assert main(["study", "race", "--fast", "--set", "rounds=1", *out, "--cases", *patterns]) == 0
    assert main(["study", "race", "--details", *out]) == 0
    printed = capsys.readouterr().out
    assert "### dirichlet, 5 at work" in printed
    assert "| FedSlice | " in printed
