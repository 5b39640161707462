from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader
from flwr_hetero.sampler import UniformSampler

DATA = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))


@pytest.fixture
def ask():
    """Give a function that makes an instruction."""
    LocalGrid(ClientApp(), [DeviceProfile()])  # so that messages can be made
    return lambda **config: Message(RecordDict({"config": ConfigRecord(config)}), 1, "train")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 11])
def test_exactly_so_many_batches_whatever_the_epochs(ask, num_steps, workers):
    plain = DataLoader(DATA, batch_size=4, num_workers=workers)
    loader = StepLoader(plain, ask(**{"num-steps": num_steps}))
    seen = [targets.tolist() for epoch in range(3) for _, targets in loader]
    in_turn = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == [in_turn[step % 3] for step in range(num_steps)]
    examples = sum(map(len, seen))
    assert loader.metrics == {"num-steps": num_steps, "examples-processed": examples}
    assert len(loader) == loader.num_steps == num_steps


def test_nothing_asked_is_the_loader_itself(ask):
    plain = DataLoader(DATA, batch_size=4)
    loader = StepLoader(plain, ask(lr=0.1))
    assert [len(targets) for epoch in range(2) for _, targets in loader] == [4, 4, 2, 4, 4, 2]
    assert loader.metrics == {"num-steps": 6, "examples-processed": 20}
    assert (len(loader), loader.num_steps) == (3, None)
    assert loader.batch_sampler is plain.batch_sampler
    with pytest.raises(AttributeError, match="DataLoader"):
        loader.no_such_thing  # noqa: B018


def test_after_a_break_what_was_taken_counts_and_the_rest_comes(ask):
    loader = StepLoader([np.zeros(4)] * 3, ask(**{"num-steps": 5}))
    for _ in loader:
        break
    assert loader.metrics == {"num-steps": 1, "examples-processed": 4}
    assert len(list(loader)) == 4


def test_metrics_go_into_the_reply(ask):
    loader = StepLoader([np.zeros(4)], ask(**{"num-steps": 2}))
    list(loader)
    record = MetricRecord({"num-examples": 4, **loader.metrics})
    assert dict(record) == {"num-examples": 4, "num-steps": 2, "examples-processed": 8}


def test_first_record_with_steps_counts(ask):
    message = ask(lr=0.1)
    message.content["more"] = ConfigRecord({"num-steps": 2})
    assert len(StepLoader([1], message)) == 2


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"scale": torch.tensor(1.0), "images": np.zeros((3, 2))}, 3),
        (UserDict(input_ids=torch.zeros(3, 7)), 3),  # as Hugging Face's BatchEncoding
        ((["a", "b", "c"], {"labels": [torch.zeros(3)]}), 3),
        (torch.zeros(0, 2), 0),
    ],
)
def test_examples_of_any_batch(ask, batch, examples):
    loader = StepLoader([batch], ask())
    list(loader)
    assert loader.metrics == {"num-steps": 1, "examples-processed": examples}


@pytest.mark.parametrize("batch", [SimpleNamespace(), ["a", "b"], torch.tensor(1.0)])
def test_examples_that_nothing_tells_are_not_reported(ask, batch):
    loader = StepLoader([batch, torch.zeros(3)], ask())
    list(loader)
    assert loader.metrics == {"num-steps": 2}


@pytest.mark.parametrize("loader", [[], DataLoader(DATA, batch_size=16, drop_last=True)])
def test_an_empty_loader_is_an_error(ask, loader):
    with pytest.raises(ValueError, match="loader must give a batch in every pass"):
        list(StepLoader(loader, ask(**{"num-steps": 3})))


def test_an_iterator_is_an_error(ask):
    batches = iter(StepLoader(iter([1, 2]), ask(**{"num-steps": 3})))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="not an iterator"):
        next(batches)


def test_a_batch_in_use_is_not_lost_where_passes_meet(ask):
    sampler = UniformSampler(10, 4)
    plain = DataLoader(DATA, batch_sampler=sampler)
    batches = iter(StepLoader(plain, ask(**{"num-steps": 8})))
    ahead, taken = next(batches), 0
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)  # a consumer that looks one batch ahead
        indices, _ = sampler.take()
        assert indices.tolist() == batch[1].tolist()
        taken += 1
    assert taken == 8


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, "many"])
def test_bad_steps_are_refused(ask, num_steps):
    with pytest.raises(ValueError, match="num-steps must be a whole number of at least 1"):
        StepLoader([1], ask(**{"num-steps": num_steps}))


def test_bad_arguments_are_refused(ask):
    with pytest.raises(ValueError, match="msg must be the message passed to the ClientApp"):
        StepLoader([1], Context(1, 1, {}, RecordDict(), {}))
    with pytest.raises(ValueError, match="loader must give batches"):
        StepLoader(3, ask())
