"""The loader without a mod: so many batches, and what they count."""

from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader
from flwr_hetero.sampler import UniformSampler

DATA = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))


def load(loader, steps=None):
    return StepLoader(loader, {} if steps is None else {"num-steps": steps})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 11])
def test_exactly_so_many_batches_whatever_the_epochs(num_steps, workers):
    loader = load(DataLoader(DATA, batch_size=4, num_workers=workers), num_steps)
    seen = [targets.tolist() for epoch in range(3) for _, targets in loader]
    in_turn = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == [in_turn[step % 3] for step in range(num_steps)]
    examples = sum(map(len, seen))
    assert loader.metrics == {"num-steps": num_steps, "examples-processed": examples}
    assert len(loader) == loader.num_steps == num_steps


def test_nothing_asked_is_the_loader_itself():
    plain = DataLoader(DATA, batch_size=4)
    loader = load(plain)
    assert [len(targets) for epoch in range(2) for _, targets in loader] == [4, 4, 2, 4, 4, 2]
    assert loader.metrics == {"num-steps": 6, "examples-processed": 20}
    assert (len(loader), loader.num_steps) == (3, None)
    assert loader.batch_sampler is plain.batch_sampler
    with pytest.raises(AttributeError, match="DataLoader"):
        loader.no_such_thing  # noqa: B018


def test_after_a_break_what_was_taken_counts_and_the_rest_comes():
    loader = load([np.zeros(4)] * 3, 5)
    next(iter(loader))
    assert loader.metrics == {"num-steps": 1, "examples-processed": 4}
    assert len(list(loader)) == 4


def test_first_record_with_steps_counts():
    LocalGrid(ClientApp(), [DeviceProfile()])  # so that a message can be made
    records = {"config": ConfigRecord({"lr": 0.1}), "more": ConfigRecord({"num-steps": 2})}
    assert len(StepLoader([1], Message(RecordDict(records), 1, "train"))) == 2


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"scale": torch.tensor(1.0), "images": np.zeros((3, 2))}, 3),
        (UserDict(input_ids=torch.zeros(3, 7)), 3),  # as Hugging Face's BatchEncoding
        ((["a", "b", "c"], {"labels": [torch.zeros(3)]}), 3),
        (torch.zeros(0, 2), 0),
        *[(untold, None) for untold in (SimpleNamespace(), ["a", "b"], torch.tensor(1.0))],
    ],
)
def test_examples_of_any_batch_that_tells_them(batch, examples):
    loader = load([batch, torch.zeros(5)])
    list(loader)
    counted = {} if examples is None else {"examples-processed": examples + 5}
    assert loader.metrics == {"num-steps": 2, **counted}


@pytest.mark.parametrize(
    ("loader", "good"),
    [([], 0), (DataLoader(DATA, batch_size=16, drop_last=True), 0), (iter([1, 2]), 2)],
)
def test_a_pass_without_a_batch_is_an_error(loader, good):
    batches = iter(load(loader, 3))
    assert [next(batches) for _ in range(good)] == [1, 2][:good]
    with pytest.raises(ValueError, match=r"loader must give a batch .* not an iterator"):
        next(batches)


def test_a_batch_in_use_is_not_lost_where_passes_meet():
    sampler = UniformSampler(10, 4)
    batches = iter(load(DataLoader(DATA, batch_sampler=sampler), 8))
    ahead, taken = next(batches), 0
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)  # a consumer that looks one batch ahead
        assert sampler.take()[0].tolist() == batch[1].tolist()
        taken += 1
    assert taken == 8


@pytest.mark.parametrize(
    ("loader", "msg", "match"),
    [
        *[([1], {"num-steps": n}, "num-steps must be a whole") for n in (0, -1, 2.5, "many")],
        ([1], Context(1, 1, {}, RecordDict(), {}), "msg must be the message passed to the Client"),
        (3, {}, "loader must give batches"),
    ],
)
def test_bad_arguments_are_refused(loader, msg, match):
    with pytest.raises(ValueError, match=match):
        StepLoader(loader, msg)
