"""Scores go to the samples that were trained, however far ahead batches are drawn."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.sampled_loss import gradient_norms
from flwr_hetero.sampler import (
    BatchSampler,
    InTurn,
    MercurySampler,
    PGDSampler,
    PriorityFeed,
    SampledLoss,
    TopLossSampler,
    UniformSampler,
    sample_priorities,
)

NUM, BATCH = 50, 4
INPUTS = torch.randn(NUM, 6, generator=torch.manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS[:, 0].gt(0).long(), torch.arange(NUM))


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


def spy(sampler: BatchSampler, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, ...]]:
    """Note what a sampler is given to learn."""
    given: list[tuple[np.ndarray, ...]] = []
    update = sampler.update
    monkeypatch.setattr(sampler, "update", lambda *new: (given.append(new), update(*new)))
    return given


def score(sampler: BatchSampler, outputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    if sampler.learns_from == "importance":
        return gradient_norms(outputs, targets)
    return cross_entropy(outputs, targets, reduction="none").detach().double().numpy()


@every_way
@pytest.mark.parametrize(
    "make",
    [
        lambda: [MercurySampler(NUM, BATCH)],
        lambda: [TopLossSampler(NUM, BATCH)],
        lambda: [
            MercurySampler(NUM, BATCH),
            TopLossSampler(NUM, BATCH),
            UniformSampler(NUM, BATCH),
        ],
    ],
)
def test_scores_are_of_the_samples_trained(make, way, monkeypatch):
    torch.manual_seed(0)
    samplers, model = make(), nn.Linear(6, 2)
    sampler = samplers[0] if len(samplers) == 1 else InTurn(samplers)
    given = [spy(each, monkeypatch) for each in samplers]
    num_workers, fetch = LOOK_AHEAD[way]
    loader = DataLoader(DATA, batch_sampler=sampler, num_workers=num_workers)
    criterion, order = SampledLoss(sampler), []
    for stop in (5, 13):  # the first pass is broken off
        for count, (inputs, targets, trained) in enumerate(fetch(loader), 1):
            outputs = model(inputs)
            criterion(outputs, targets).backward()
            (drew,) = [k for k, seen in enumerate(given) if seen]
            ((indices, scores),) = given[drew]
            given[drew].clear()
            order.append(drew)
            np.testing.assert_array_equal(indices, trained)
            np.testing.assert_allclose(scores, score(samplers[drew], outputs, targets))
            if count == stop:
                break
        assert count == min(stop, len(loader))
    assert order[:5] == [turn % len(samplers) for turn in range(5)]


@every_way
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("rule", ["topk", "stochastic"])
@pytest.mark.parametrize("by", ["loss", "on_batch"])
def test_priorities_are_of_the_samples_trained(by, rule, in_turn, way, monkeypatch):
    torch.manual_seed(0)
    model, sampler = nn.Linear(6, 2), PGDSampler(NUM, BATCH, rule=rule)
    feed = PriorityFeed(sampler, model)
    drawing = InTurn([feed, UniformSampler(NUM, BATCH)]) if in_turn else feed
    given = spy(sampler, monkeypatch)
    num_workers, fetch = LOOK_AHEAD[way]
    loader = DataLoader(DATA, batch_sampler=drawing, num_workers=num_workers)
    criterion = SampledLoss(drawing)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses_of = nn.CrossEntropyLoss(reduction="none")
    trained_by_feed, measured = 0, []
    for stop in (5, 13):
        for count, (inputs, targets, trained) in enumerate(fetch(loader), 1):
            before = feed.gradient.direction
            expected = sample_priorities(model, losses_of, inputs, targets, before)
            optimizer.zero_grad()
            if by == "loss":
                (criterion(model(inputs), targets) / 3).backward()  # as in accumulation
                mine = not in_turn or drawing.current is feed
            else:
                indices, weights = drawing.take()
                losses = losses_of(model(inputs), targets)
                (losses * torch.from_numpy(weights)).mean().backward()
                mine = not in_turn or drawing.current is feed
                if mine:
                    feed.on_batch(model, indices, losses)
            optimizer.step()
            trained_by_feed += mine
            if given:
                assert mine
                ((indices, priorities),) = given
                given.clear()
                measured.append(trained_by_feed)
                np.testing.assert_array_equal(indices, trained)
                np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-3)
            if count == stop:
                break
    turns = range(1, trained_by_feed + 1)
    assert trained_by_feed in ((8, 9, 10) if in_turn else (18,))
    assert measured == [t for t in turns if t > 1 and (rule == "topk" or t % 4 == 1)]
