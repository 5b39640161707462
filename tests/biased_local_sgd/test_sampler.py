import numpy as np
import pytest
from oracles.local_steps import high_loss_samples

from flwr_hetero import keys
from flwr_hetero.sampler import TopLossSampler


def tell(sampler, fast, share):
    """Give the node's class, as the server does."""
    sampler.read_instruction({"config": {keys.FAST: fast, keys.FAST_SHARE: share}})


def draw(sampler, count):
    """Draw single indices from batches until there are ``count``."""
    drawn = []
    while len(drawn) < count:
        drawn += sampler.next_batch()[0].tolist()
    return drawn


@pytest.mark.parametrize(
    ("size", "batch_size", "share", "fraction"),
    [(30, 9, 0.7, 0.5), (30, 4, 0.2, 1.0), (17, 5, 1.0, 0.3), (5, 9, 0.05, 0.05), (1, 1, 0.5, 0.5)],
)
def test_allocation_has_the_top_samples_once(size, batch_size, share, fraction):
    sampler = TopLossSampler(size, batch_size, seed=2, high_loss_fraction=fraction, share=share)
    sampler.update(np.arange(size), np.random.default_rng(3).random(size))
    allocated = max(1, round(share * size))
    assert len(sampler) == -(-allocated // batch_size)
    for _ in range(2):
        epoch = [index for batch in sampler for index in batch]
        assert len(set(epoch)) == len(epoch) == allocated
        assert set(high_loss_samples(sampler.losses, round(fraction * allocated))) <= set(epoch)


def test_change_of_class_starts_a_new_allocation():
    sampler = TopLossSampler(100, 10, seed=0, fast=False)
    sampler.next_batch()
    sampler.update(np.arange(100), np.arange(100.0))
    tell(sampler, fast=True, share=0.1)
    assert {95, 96, 97, 98, 99} <= set(sampler.next_batch()[0].tolist())
    tell(sampler, fast=False, share=0.1)
    first = draw(sampler, 40)
    tell(sampler, fast=False, share=0.2)  # the same class keeps the allocation
    assert sorted(first + draw(sampler, 60)) == list(range(100))


def test_assigned_samples_come_in_order_then_shuffled():
    sampler = TopLossSampler(100, 3, seed=0)
    sampler.assign([7, 99, 3, 42])
    assert [sampler.next_batch()[0].tolist() for _ in range(2)] == [[7, 99, 3], [42]]
    assert sorted(draw(sampler, 4)) == [3, 7, 42, 99]
    sampler.assign(np.arange(60))
    first = draw(sampler, 60)
    second = draw(sampler, 60)
    assert first == list(range(60)) == sorted(second) != second


def test_take_losses_gives_each_once_with_its_latest():
    sampler = TopLossSampler(10, 2)
    sampler.update(np.array([4, 1]), np.array([0.5, 0.25]))
    sampler.update(np.array([4]), np.array([0.125]))
    indices, losses = sampler.take_losses()
    assert (indices.tolist(), losses.tolist()) == ([1, 4], [0.25, 0.125])
    assert sampler.take_losses()[0].size == 0


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: TopLossSampler(5, 2, high_loss_fraction=0.0), "high_loss_fraction"),
        (lambda: TopLossSampler(5, 2, share=1.01), "share"),
    ],
)
def test_top_loss_sampler_refuses(call, argument):
    with pytest.raises(ValueError, match=f"^{argument} must"):
        call()
