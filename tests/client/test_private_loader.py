"""A library that makes a loader of its own, such as Opacus, before or after hetero.batches."""

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset
from toy import reply_with

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.strategy import FedSlice

NUM, BATCH = 64, 8


class PrivateLoader(DataLoader):
    """As Opacus's: it takes data and average length of a loader, and draws batches by itself."""

    @classmethod
    def from_data_loader(cls, loader):
        return cls(loader.dataset, len(loader.dataset) // len(loader), shuffle=True)


def sizes_of_a_run(*, after):
    """Train two rounds; return all batches' lengths. ``after``: make the loader of the batches."""
    app = ClientApp(mods=[hetero])
    sizes = []

    @app.train()
    def train(msg, context):
        model = torch.nn.Linear(4, 2)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(NUM, 4), torch.ones(NUM).long()), BATCH)
        if after:
            loader = PrivateLoader.from_data_loader(hetero.batches(loader, msg))
        else:
            loader = hetero.batches(PrivateLoader.from_data_loader(loader), msg)
        for x, y in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return reply_with(msg, {"num-examples": NUM}, dict(ArrayRecord(model.state_dict())))

    grid = LocalGrid(app, [DeviceProfile(2.0), DeviceProfile(1.0), DeviceProfile(0.5)])
    initial = ArrayRecord(torch.nn.Linear(4, 2).state_dict())
    FedSlice(FedAvg(fraction_evaluate=0.0)).start(grid, initial, num_rounds=2)
    return sizes


def test_a_loader_of_another_kind_before_batches():
    sizes = sizes_of_a_run(after=False)
    assert set(sizes) == {BATCH}
    assert sum(sizes) >= 2 * 3 * NUM


def test_a_loader_made_of_batches_is_named():
    with pytest.raises(RuntimeError, match=r"hetero\.batches.*after.*make_private"):
        sizes_of_a_run(after=True)
