import numpy as np
import pytest
import torch

from flwr_hetero.sampler import UniformSampler


def test_uniform_epochs_are_permutations():
    sampler = UniformSampler(10, 4, seed=0)
    assert isinstance(sampler, torch.utils.data.Sampler)
    epochs = [[sampler.next_batch()[0] for _ in range(3)] for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    orders = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ({"position": "soon"}, "must hold position"),
        ({"order": np.arange(13)}, "must hold order"),
        ({"rng": "{}"}, "not the state of a PCG64 generator"),
        ({"batch_size": 5}, "must hold batch_size=4, got 5"),
    ],
)
def test_uniform_refuses_damaged_state(damage, match):
    sampler, twin = UniformSampler(12, 4), UniformSampler(12, 4)
    with pytest.raises(ValueError, match=match):
        sampler.load_state_dict(UniformSampler(12, 4, seed=1).state_dict() | damage)
    assert [list(sampler) for _ in range(2)] == [list(twin) for _ in range(2)]


@pytest.mark.parametrize(
    ("sizes", "match"), [((0, 2), "num_samples must be"), ((4, 2.5), "batch_size must be")]
)
def test_bad_arguments_are_refused(sizes, match):
    with pytest.raises(ValueError, match=f"{match} a whole number of at least 1"):
        UniformSampler(*sizes)


def test_the_loss_has_its_old_name_for_a_release():
    from flwr_hetero import sampler

    with pytest.warns(DeprecationWarning, match="SampledLoss is now WeightedLoss"):
        assert sampler.SampledLoss is sampler.WeightedLoss
    with pytest.raises(AttributeError, match="InTurn"):
        sampler.InTurn  # noqa: B018
