import subprocess
import sys

import numpy as np
import pytest
import torch

from flwr_hetero.sampler import (
    InTurn,
    MercurySampler,
    OrderedSampler,
    TopLossSampler,
    UniformSampler,
)


def make(seed=0):
    ordered = OrderedSampler(12, 4, seed=seed, method="d-rr")
    mercury = MercurySampler(12, 3, seed=seed)
    return InTurn([ordered, mercury, TopLossSampler(12, 4, seed=seed)])


def play(sampler, count):
    batches = []
    for _ in range(count):
        indices, weights = sampler.next_batch()
        sampler.update(indices, 1.0 + indices)
        batches.append((indices.tolist(), weights.tolist()))
    return batches


def test_uniform_epochs_are_permutations():
    sampler = UniformSampler(10, 4, seed=0)
    epochs = [[sampler.next_batch()[0] for _ in range(3)] for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    orders = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_samplers_are_those_of_torch():
    assert isinstance(UniformSampler(10, 4), torch.utils.data.Sampler)
    assert not UniformSampler.__abstractmethods__


def test_samplers_work_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.mod import StepLoader, follow, keep, timing
print(sorted(sum(UniformSampler(5, 2), [])))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[0, 1, 2, 3, 4]\n"


def test_pass_end_is_reported():
    sampler, passes = UniformSampler(10, 4), []
    sampler.on_pass_end = lambda: passes.append(sampler.position)
    list(sampler)
    assert passes == [10]
    for _ in sampler:
        break  # the iterator is closed, and with it the pass
    assert passes == [10, 4]


def test_in_turn_each_draws_as_alone():
    together = play(make(), 9)
    for number, alone in enumerate(make().samplers):
        assert together[number::3] == play(alone, 3)


def test_in_turn_epoch_is_the_first_samplers():
    ordered = OrderedSampler(12, 4, num_units=2)
    assert [len(InTurn([ordered, UniformSampler(12, 1)])), len(make())] == [2, 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_in_turn_scores_reach_the_one_that_drew(ahead):
    both = InTurn([UniformSampler(6, 2), MercurySampler(6, 2)])
    updated = {number: [] for number in range(2)}
    for number, sampler in enumerate(both.samplers):
        sampler.update = lambda indices, scores, to=updated[number]: to.append(indices.tolist())
    drawn = [both.next_batch()[0].tolist()]
    both.update(np.array(drawn[0]), np.ones(2))
    batches = list(both) if ahead else both  # all batches drawn ahead, as by workers
    for batch in batches:
        indices, _ = both.take()
        assert indices.tolist() == batch
        both.update(indices, np.ones(2))
        drawn.append(batch)
    assert updated == {0: drawn[0::2], 1: drawn[1::2]}


@pytest.mark.parametrize(
    "damage",
    [
        {"turn": 3},
        {"turn": -1},
        {"num_samplers": 2},
        {"2.rng": "not a generator"},
    ],
)
def test_in_turn_refuses_damaged_state(damage):
    sampler, twin = make(), make()
    play(sampler, 4), play(twin, 4)
    with pytest.raises(ValueError, match=r"state"):
        sampler.load_state_dict(make(seed=1).state_dict() | damage)
    assert play(sampler, 6) == play(twin, 6)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ({"position": 13}, "must hold a position"),
        ({"position": -1}, "must hold a position"),
        ({"order": np.zeros(12, np.int64)}, "must hold order as a permutation"),
        ({"rng": "{}"}, "not the state of a PCG64 generator"),
        ({"batch_size": 5}, "must hold batch_size=4, got 5"),
    ],
)
def test_uniform_refuses_damaged_state(damage, match):
    sampler = UniformSampler(12, 4)
    with pytest.raises(ValueError, match=match):
        sampler.load_state_dict(UniformSampler(12, 4, seed=1).state_dict() | damage)
    assert play(sampler, 6) == play(UniformSampler(12, 4), 6)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: InTurn([]), "samplers must be at least one"),
        (lambda: InTurn([UniformSampler(6, 2), UniformSampler(7, 2)]), r"samplers must .*\[6, 7\]"),
        (lambda: UniformSampler(0, 2), "num_samples must be a whole number of at least 1"),
        (lambda: UniformSampler(4, 2.5), "batch_size must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()
