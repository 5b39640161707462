"""A part learns what the whole model would with the same frozen blocks; means by array."""

import copy

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from flwr_hetero._flwr import be_server_task
from flwr_hetero_studies.partial import cases, part


def test_a_part_learns_as_the_whole_model_with_the_same_frozen_blocks():
    shape = (3, 32, 32)
    inputs = torch.randn(20, *shape)
    whole = part.whole(shape, 10)
    model = part.Part(copy.deepcopy(whole), {2, 3, 4}).train()
    whole[:2].eval()
    for trained in (model, whole):
        cross_entropy(trained(inputs), torch.arange(20) % 10).backward()
    assert all(p.grad is None for p in model.blocks[:2].parameters())
    for mine, full in zip(model.blocks[2:].parameters(), whole[2:].parameters(), strict=True):
        assert_close(mine.grad, full.grad)
    assert_close(model.blocks.state_dict(), whole.state_dict())
    assert 2 * part.need_bytes(model, shape) < part.need_bytes(part.Part(whole), shape)


def test_an_array_is_averaged_over_the_nodes_that_sent_it():
    be_server_task(1, 1, 1)
    strategy = cases.PartAverage()
    strategy.arrays = ArrayRecord({name: Array(np.zeros(1)) for name in "abc"})
    replies = []
    for count, sent in ((1, {"a": 8.0, "b": 8.0}), (3, {"b": 4.0})):
        arrays = ArrayRecord({name: Array(np.array([value])) for name, value in sent.items()})
        metrics = MetricRecord({"num-examples": count})
        message = Message(RecordDict(), 1000, "train")
        replies.append(Message(RecordDict({"a": arrays, "m": metrics}), reply_to=message))
    mean, _ = strategy.aggregate_train(1, replies)
    assert {name: array.numpy().item() for name, array in mean.items()} == {"a": 8, "b": 5, "c": 0}
