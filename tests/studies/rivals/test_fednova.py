import numpy as np
import pytest
from steps_toy import local_model, steps_app, steps_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies.rivals import FedNova

FLEET = [DeviceProfile(compute_factor=factor) for factor in (8.0, 8.0, 1.0)]


def fednova(before, models, steps, weights):
    """Average the updates per step and take as many steps as the nodes on average."""
    shares = np.array(weights) / sum(weights)
    after = np.array(before, dtype=np.float64)
    for share, count, model in zip(shares, steps, models, strict=True):
        after += shares @ steps * share * (np.asarray(model, np.float64) - before) / count
    return after


@pytest.mark.parametrize(
    ("steps", "weights"),
    [([7], [3]), ([7, 7, 7], [1, 5, 2]), ([1, 40, 3], [1, 1, 1]), ([2, 9, 9, 1], [90, 1, 0, 7])],
)
def test_scaled_mean_equals_the_papers_formula(steps, weights):
    models = np.random.default_rng(0).standard_normal((len(steps), 3))
    shares = np.array(weights) / sum(weights)
    found = (shares * FedNova().scales([], np.array(steps), weights)) @ models
    expected = fednova(np.zeros(3), models, steps, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "app", "taken"),
    [
        ({}, {}, [[1, 1, 1], [16, 16, 2]]),
        # Steps that a node did not take do not count.
        ({"gamma": 1.0}, {"claims": {0: 4}}, [[4, 16, 16]]),
    ],
)
def test_run_equals_the_papers_formula(settings, app, taken):
    examples = {0: 300, 1: 100, 2: 200}
    grid = LocalGrid(steps_app(num_examples=examples, **app), profiles=FLEET)
    strategy = FedNova(fast_steps=16, **settings)
    arrays = strategy.start(grid, steps_arrays(), num_rounds=len(taken)).arrays
    w = np.zeros(3, np.float32)
    for steps in taken:
        asked = [16] * 3 if settings else steps
        models = [local_model(w, partition, count) for partition, count in enumerate(asked)]
        w = fednova(w, models, steps, list(examples.values())).astype(np.float32)
    np.testing.assert_allclose(arrays["w"].numpy(), w, rtol=1e-5)
