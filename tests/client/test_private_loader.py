"""A library that makes a loader of its own, such as Opacus, before or after hetero.batches."""

from importlib.util import find_spec

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.strategy import FedSlice

NUM, BATCH = 64, 8
LATE = r"hetero\.batches.*after.*make_private|make_private.*before.*hetero\.batches"
"""What an error has to say of the other order."""
needs_opacus = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")


class OwnLoader(DataLoader):
    """As Opacus's: it takes data and average length of a loader, and draws batches by itself."""

    @classmethod
    def from_data_loader(cls, loader):
        return cls(loader.dataset, len(loader.dataset) // len(loader), shuffle=True)


def imitated(module, optimizer, loader, *, poisson=True):
    return module, optimizer, OwnLoader.from_data_loader(loader)


def by_opacus(module, optimizer, loader, *, poisson):
    from opacus import PrivacyEngine

    how = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": poisson}
    return PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=loader, **how
    )


def batches_of_a_run(make_private, *, after, **how):
    """Train two rounds; return all batches' lengths and the optimizers' ``expected_batch_size``."""
    app, sizes, expected = ClientApp(mods=[hetero]), [], set()

    @app.train()
    def train(msg, context):
        model = torch.nn.Linear(4, 2)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(NUM, 4), torch.ones(NUM).long()), BATCH)
        if after:
            loader = hetero.batches(loader, msg)
        private, optimizer, loader = make_private(model, optimizer, loader, **how)
        if not after:
            loader = hetero.batches(loader, msg)
        for x, y in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
        expected.add(getattr(optimizer, "expected_batch_size", BATCH))
        metrics = MetricRecord({"num-examples": NUM})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=msg)

    grid = LocalGrid(app, [DeviceProfile(2.0), DeviceProfile(1.0), DeviceProfile(0.5)])
    initial = ArrayRecord(torch.nn.Linear(4, 2).state_dict())
    FedSlice(FedAvg(fraction_evaluate=0.0)).start(grid, initial, num_rounds=2)
    return sizes, expected


def test_a_loader_of_another_kind_before_batches():
    sizes, expected = batches_of_a_run(imitated, after=False)
    assert expected == set(sizes) == {BATCH}
    assert sum(sizes) >= 2 * 3 * NUM


def test_a_loader_made_of_batches_is_named():
    with pytest.raises(RuntimeError, match=LATE):
        batches_of_a_run(imitated, after=True)


@needs_opacus
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("poisson", [True, False])
def test_private_before_batches(poisson):
    sizes, expected = batches_of_a_run(by_opacus, after=False, poisson=poisson)
    assert expected == {BATCH}
    assert BATCH / 2 < sum(sizes) / len(sizes) < BATCH * 2


@needs_opacus
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_private_after_batches_works_or_is_named():
    sizes, expected = batches_of_a_run(by_opacus, after=True, poisson=False)
    assert expected == set(sizes) == {BATCH}
    with pytest.raises(RuntimeError, match=LATE):
        batches_of_a_run(by_opacus, after=True, poisson=True)
