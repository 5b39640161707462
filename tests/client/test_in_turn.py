import numpy as np
import pytest

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.sampler import InTurn, MercurySampler, OrderedSampler, TopLossSampler


def make(seed=0):
    ordered = OrderedSampler(12, 4, seed=seed, method="d-rr")
    mercury = MercurySampler(12, 3, seed=seed, gate=0)
    return InTurn([ordered, mercury, TopLossSampler(12, 4, seed=seed)])


def play(sampler, count):
    batches = []
    for _ in range(count):
        indices, weights = sampler.next_batch()
        sampler.update(indices, 1.0 + indices)
        batches.append((indices.tolist(), weights.tolist()))
    return batches


def test_each_draws_as_it_would_alone():
    together = play(make(), 9)
    for number, alone in enumerate(make().samplers):
        assert together[number::3] == play(alone, 3)


def test_an_epoch_is_as_long_as_the_firsts():
    ordered = OrderedSampler(12, 4, num_units=2)
    assert [len(InTurn([ordered, UniformSampler(12, 1)])), len(make())] == [2, 3]


def test_scores_reach_the_one_that_drew():
    both = InTurn([UniformSampler(6, 2), MercurySampler(6, 2, gate=0)])
    heard = {number: [] for number in range(2)}
    for number, sampler in enumerate(both.samplers):
        sampler.update = lambda indices, scores, to=heard[number]: to.append(indices.tolist())
    drawn = [both.next_batch()[0]]
    both.update(drawn[0], np.ones(2))
    drawn.append(both.next_batch()[0])
    both.update(drawn[1], np.ones(2))
    assert heard == {0: [drawn[0].tolist()], 1: [drawn[1].tolist()]}


def test_scores_reach_the_one_that_drew_also_when_batches_are_drawn_ahead():
    both = InTurn([UniformSampler(6, 2), MercurySampler(6, 2, gate=0)])
    heard = {number: [] for number in range(2)}
    for number, sampler in enumerate(both.samplers):
        sampler.update = lambda indices, scores, to=heard[number]: to.append(indices.tolist())
    both.next_batch()  # somebody looked: the first of the pass is Mercury's
    drawn = list(both)
    for _ in drawn:
        indices, _ = both.take()
        both.update(indices, np.ones(2))
    assert heard == {0: drawn[1::2], 1: drawn[0::2]}


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_stop_and_continue_equals_uninterrupted(stop):
    whole, first, second = make(), make(), make(seed=0)
    expected = play(whole, 12)
    begun = play(first, stop)
    second.load_state_dict(first.state_dict())
    assert begun + play(second, 12 - stop) == expected


@pytest.mark.parametrize(
    "damage",
    [
        {"turn": 3},
        {"turn": "0"},
        {"num_samplers": 2},
        {"0.num_samples": 11},
        {"2.rng": "not a generator"},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage):
    sampler, twin = make(), make()
    play(sampler, 4), play(twin, 4)
    with pytest.raises(ValueError, match=r"afresh|generator"):
        sampler.load_state_dict(make(seed=1).state_dict() | damage)
    assert play(sampler, 6) == play(twin, 6)


@pytest.mark.parametrize("samplers", [[], [UniformSampler(6, 2), UniformSampler(7, 2)]])
def test_samplers_must_be_of_the_same_data(samplers):
    with pytest.raises(ValueError, match="samplers must be at least one, of equally large"):
        InTurn(samplers)
