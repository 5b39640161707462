"""Scores go to the samples that were trained, however far ahead batches are drawn."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.weighted_loss import gradient_norms
from flwr_hetero.sampler import (
    MercurySampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
    WeightedLoss,
    sample_priorities,
)

NUM, BATCH = 50, 4
INPUTS = torch.randn(NUM, 6, generator=torch.manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS[:, 0].gt(0).long(), torch.arange(NUM))
losses_of = nn.CrossEntropyLoss(reduction="none")


def one_ahead(batches: Iterable[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Fetch the next batch before this one is trained, as accelerate's loaders do."""
    source = iter(batches)
    current = next(source)
    for following in source:
        yield current
        current = following
    yield current


LOOK_AHEAD = {"none": (0, iter), "batch": (0, one_ahead), "both": (2, one_ahead)}
every_way = pytest.mark.parametrize("way", LOOK_AHEAD)


def trained(sampler, way):
    """Give the batches of two passes, of which the first is broken off."""
    num_workers, fetch = LOOK_AHEAD[way]
    loader = DataLoader(DATA, batch_sampler=sampler, num_workers=num_workers)
    for stop in (5, 13):
        for count, batch in enumerate(fetch(loader), 1):
            yield batch
            if count == stop:
                break
        assert count == min(stop, len(loader))


def spy(sampler, monkeypatch):
    """Note what a sampler is given to learn."""
    given, update = [], sampler.update
    monkeypatch.setattr(sampler, "update", lambda *new: (given.append(new), update(*new)))
    return given


@every_way
@pytest.mark.parametrize("kind", [MercurySampler, TopLossSampler])
def test_scores_are_of_the_samples_trained(kind, way, monkeypatch):
    torch.manual_seed(0)
    sampler, model = kind(NUM, BATCH), nn.Linear(6, 2)
    given, criterion = spy(sampler, monkeypatch), WeightedLoss(sampler)
    score = gradient_norms if sampler.learns_from == "importance" else losses_of
    for inputs, targets, trained_now in trained(sampler, way):
        outputs = model(inputs)
        criterion(outputs, targets).backward()
        indices, scores = given.pop()
        np.testing.assert_array_equal(indices, trained_now)
        expected = np.asarray(torch.as_tensor(score(outputs, targets)).detach())
        np.testing.assert_allclose(scores, expected, rtol=1e-6)


@every_way
@pytest.mark.parametrize("rule", ["topk", "stochastic"])
@pytest.mark.parametrize("by", ["loss", "on_batch"])
def test_priorities_are_of_the_samples_trained(by, rule, way, monkeypatch):
    torch.manual_seed(0)
    model, sampler = nn.Linear(6, 2), PGDSampler(NUM, BATCH, rule=rule)
    feed = PriorityFeed(sampler, model)
    given, criterion = spy(sampler, monkeypatch), WeightedLoss(feed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    measured = []
    for count, (inputs, targets, trained_now) in enumerate(trained(feed, way), 1):
        expected = sample_priorities(model, losses_of, inputs, targets, feed.gradient.direction)
        optimizer.zero_grad()
        if by == "loss":
            (criterion(model(inputs), targets) / 3).backward()  # as in accumulation
        else:
            indices, weights = feed.take()
            losses = losses_of(model(inputs), targets)
            (losses * torch.from_numpy(weights)).mean().backward()
            feed.on_batch(model, indices, losses)
        optimizer.step()
        if given:
            indices, priorities, *_ = given.pop()
            measured.append(count)
            np.testing.assert_array_equal(indices, trained_now)
            np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-3)
    every = range(1, 19)
    assert measured == [t for t in every if t > 1 and (rule == "topk" or t % 4 == 1)]
