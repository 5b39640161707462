"""Training without Flower: what a step is, and where a curve ends."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero_studies.core import alone, curves
from flwr_hetero_studies.tasks import Examples, evaluate


@pytest.fixture
def examples():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator)
    return Examples(inputs, (inputs[:, 0] > 0).long())


def run(examples, num_workers, *, num_steps=4, every=2, lr=0.5, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    shares = alone.split(examples, num_workers, seed=0)
    samplers = [UniformSampler(len(share), len(share), seed=0) for share in shares]
    optimizer = torch.optim.SGD(model.parameters(), lr)
    given = {"num_steps": num_steps, "every": every, **more}
    look = lambda m: {"loss": evaluate(m, examples)[0]}  # noqa: E731
    return alone.train(model, shares, samplers, optimizer, look=look, **given)


def test_shares_are_equal_and_hold_no_example_twice(examples):
    shares = alone.split(examples, 5, seed=0)
    assert [len(share) for share in shares] == [2] * 5
    assert len(np.unique(torch.cat([share.inputs[:, 0] for share in shares]))) == 10
    with pytest.raises(ValueError, match="num_workers must be at most 12"):
        alone.split(examples, 13, seed=0)


def test_whole_shares_of_workers_are_one_step_on_all(examples):
    assert run(examples, 3)["loss"] == pytest.approx(run(examples, 1)["loss"], rel=1e-5)


def test_curve_has_the_start_and_every_second_step(examples):
    curve = run(examples, 2)
    assert curve["step"] == [0, 2, 4]
    assert curve["loss"][-1] < curve["loss"][0]


def test_each_worker_is_observed_with_its_own_gradient(examples):
    seen = []
    run(
        examples, 2, num_steps=1, observe=lambda worker, _, found: seen.append((worker, len(found)))
    )
    assert seen == [(0, 6), (1, 6)]


def test_a_run_that_diverges_ends_with_an_infinite_loss(examples):
    curve = run(replace(examples, inputs=examples.inputs * 1e8), 2)
    assert curve["loss"][-1] == inf
    assert len(curve["step"]) < 3


def test_a_goal_is_reached_between_points():
    assert curves.time_to([0, 10, 20], [3.0, 2.0, 0.0], 1.0, below=True) == 15
    assert curves.time_to([0, 10], [3.0, 2.0], 1.0, below=True) == inf
    assert curves.time_to([0, 10], [1.0, 2.0], 1.0, below=True) == 0


def test_means_go_as_far_as_all_curves():
    assert curves.mean([{"loss": [3.0, 1.0]}, {"loss": [1.0]}], "loss") == [2.0]
