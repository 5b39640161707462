"""What every sampler owes a training loop: one table, one test per duty."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.cd_grab.sampler import METHODS
from flwr_hetero.mercury.sampler import ESTIMATORS
from flwr_hetero.pgd.sampler import RULES
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
    UniformSampler,
)

NUM = 23
BATCH = 5
SIGNED = {
    "nan": ([0, 1], [1.0, np.nan], "scores must be finite, got .nan.: the model has diverged"),
    "infinite": ([0, 1], [1.0, np.inf], "scores must be finite"),
    "too large": ([0, NUM], [1.0, 1.0], "indices must lie in range"),
    "below 0": ([0, -1], [1.0, 1.0], "indices must lie in range"),
    "one too few": ([0, 1], [1.0], "scores must have the shape of indices"),
}
POSITIVE = SIGNED | {"negative": ([0, 1], [1.0, -0.5], "importance must be finite and not neg")}
IGNORED = {}
"""Scores that ``update`` refuses; a sampler that learns in other ways ignores them all."""


class Case(NamedTuple):
    """A sampler: how to make one, what it refuses, and whether it draws every sample."""

    make: Callable
    refuses: dict
    covers: bool = True


def mercury(estimator):
    return lambda num, seed: MercurySampler(num, BATCH, seed=seed, estimator=estimator)


def pgd(rule):
    return lambda num, seed: PGDSampler(num, BATCH, seed=seed, rule=rule)


def ordered(method, unit="batch"):
    return lambda num, seed: OrderedSampler(num, BATCH, seed=seed, method=method, unit=unit)


def feed(rule, layers="last"):
    def make(num, seed):
        torch.manual_seed(0)
        return PriorityFeed(pgd(rule)(num, seed), nn.Linear(2, 2), layers=layers)

    return make


CASES = {
    "uniform": Case(lambda num, seed: UniformSampler(num, BATCH, seed=seed), IGNORED),
    **{f"mercury {name}": Case(mercury(name), POSITIVE, name != "paper") for name in ESTIMATORS},
    **{f"pgd {name}": Case(pgd(name), SIGNED) for name in RULES},
    "top loss": Case(lambda num, seed: TopLossSampler(num, BATCH, seed=seed), SIGNED),
    "top loss, slow node": Case(
        lambda num, seed: TopLossSampler(num, BATCH, seed=seed, fast=False), SIGNED
    ),
    **{f"ordered {name}": Case(ordered(name), IGNORED) for name in METHODS},
    "ordered examples": Case(ordered("id-grab", "example"), IGNORED),
    "priority feed": Case(feed("stochastic"), IGNORED),
    "priority feed topk": Case(feed("topk", layers="all"), IGNORED),
}
LEARNERS = {name: case for name, case in CASES.items() if case.refuses}

every = pytest.mark.parametrize("name", CASES)


def learn(sampler, indices):
    """Do what a training loop does after a batch: the same for the same batch."""
    sampler.update(indices, 0.1 + np.cos(indices) ** 2)
    vectors = torch.stack([torch.arange(1.0, 4.0).mul(int(i)).sin() for i in indices])
    if isinstance(sampler, OrderedSampler) and sampler.watching:
        sampler.observe(vectors if sampler.unit == "example" else vectors.mean(0, keepdim=True))
    if isinstance(sampler, PriorityFeed):
        model = next(layer for layer in sampler.listener._names)
        model.zero_grad()
        losses = nn.CrossEntropyLoss(reduction="none")(
            model(vectors[:, :2]), torch.from_numpy(indices % 2)
        )
        (losses * torch.from_numpy(sampler._ahead[0][1])).mean().backward()
        sampler.on_batch(model, indices, losses)


def play(sampler, count):
    batches = []
    for _ in range(count):
        indices, weights = sampler.next_batch()
        batches.append((indices.tolist(), weights.tolist()))
        learn(sampler, indices)
    return batches


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[k], other[k], equal_nan=np.asarray(one[k]).dtype.kind == "f")
        for k in one
    )


def copied(state):
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}


@every
def test_batch_has_indices_and_weights(name):
    with pytest.raises(ValueError, match="num_samples must be a whole number of at least"):
        CASES[name].make(0, 0)
    sampler = CASES[name].make(NUM, 0)
    assert (sampler.num_samples, sampler.batch_size) == (NUM, BATCH)
    for _ in range(40):
        indices, weights = sampler.next_batch()
        assert (indices.dtype, weights.dtype) == (np.int64, np.float64)
        assert indices.shape == weights.shape
        assert 1 <= len(indices) <= BATCH + 1  # units may differ by one
        assert set(indices) <= set(range(NUM))
        assert (np.isfinite(weights) & (weights >= 0)).all()
        learn(sampler, indices)


@every
def test_data_loader_takes_it_as_batch_sampler(name):
    sampler = CASES[name].make(NUM, 0)
    twin = CASES[name].make(NUM, 0)
    data = TensorDataset(torch.arange(NUM))
    loader = DataLoader(data, batch_sampler=sampler)
    assert len(loader) == len(sampler) >= 1
    for _ in range(2):
        drawn = 0
        for (batch,) in loader:
            indices, weights = sampler.take()
            expected, expected_weights = twin.next_batch()
            assert batch.tolist() == indices.tolist() == expected.tolist()
            assert weights.tolist() == expected_weights.tolist()
            drawn += 1
        assert drawn == len(sampler)
    with pytest.raises(IndexError, match="no batch to take"):
        sampler.take()


@every
def test_seed_determines_all_draws(name):
    one, again, other = (play(CASES[name].make(NUM, seed), 12) for seed in (3, 3, 4))
    assert one == again != other


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, case in LEARNERS.items() for bad in case.refuses]
)
def test_bad_scores_are_refused(name, bad):
    sampler = CASES[name].make(NUM, 0)
    twin = CASES[name].make(NUM, 0)
    play(sampler, 7), play(twin, 7)
    indices, scores, match = CASES[name].refuses[bad]
    with pytest.raises(ValueError, match=match):
        sampler.update(np.array(indices), np.array(scores))
    assert same(sampler.state_dict(), twin.state_dict())
    assert play(sampler, 9) == play(twin, 9)


@every
@pytest.mark.parametrize("stop", [0, 1, 4, 11])
def test_stop_save_load_continue(name, stop):
    make = CASES[name].make
    whole = make(NUM, 0)
    first = make(NUM, 0)
    second = make(NUM, 99)
    if isinstance(first, OrderedSampler):
        second = make(NUM, 0)  # its seed is a setting: the units are drawn from it
    expected = play(whole, 20)
    begun = play(first, stop)
    state = first.state_dict()
    assert all(isinstance(v, (np.ndarray, int, float, str, bool)) for v in state.values())
    kept = copied(state)
    second.load_state_dict(state)
    assert begun + play(second, 20 - stop) == expected
    assert begun + play(first, 20 - stop) == expected
    assert same(state, kept), "what was saved is not written over"


@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_state_between_batch_and_scores_continues(name):
    whole, first, second = (CASES[name].make(NUM, 0) for _ in range(3))
    play(whole, 3), play(first, 3)
    expected = play(whole, 9)
    indices, weights = first.next_batch()
    second.load_state_dict(first.state_dict())
    learn(second, indices)
    assert [(indices.tolist(), weights.tolist()), *play(second, 8)] == expected


@every
def test_state_of_other_data_is_refused(name):
    make = CASES[name].make
    other = make(NUM + 1, 0)
    sampler = make(NUM, 0)
    twin = make(NUM, 0)
    for one in (other, sampler, twin):
        play(one, 7)
    for state in (other.state_dict(), {}):
        with pytest.raises(ValueError, match="state"):
            sampler.load_state_dict(state)
    assert play(sampler, 9) == play(twin, 9)


@every
def test_damaged_state_is_refused(name):
    make = CASES[name].make
    sampler = make(NUM, 0)
    twin = make(NUM, 0)
    play(sampler, 7), play(twin, 7)
    state = copied(sampler.state_dict())
    play(sampler, 2), play(twin, 2)
    for key in state:
        if key.startswith("terms."):
            continue  # the order server sends them again
        others = {k: v for k, v in state.items() if k != key}
        for damaged in (others, others | {key: None}, others | {key: "damaged"}):
            with pytest.raises(ValueError, match=r"state|the saved"):
                sampler.load_state_dict(damaged)
        assert same(sampler.state_dict(), twin.state_dict()), key
    assert play(sampler, 9) == play(twin, 9)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.covers])
def test_every_sample_is_drawn(name):
    batches = play(CASES[name].make(NUM, 0), 200)
    assert {index for indices, _ in batches for index in indices} == set(range(NUM))
