"""PGD's experiments: its workers, what is read off their curves, and claims that can fail."""

import numpy as np
import pytest
import torch

from flwr_hetero_studies.papers.pgd import priorities, tasks, workers
from flwr_hetero_studies.papers.pgd.workers import AUTHORS, METHODS, SGD
from flwr_hetero_studies.tasks import Examples


@pytest.fixture
def task():
    inputs = torch.randn(80, 4, 1, 1, generator=torch.Generator().manual_seed(0))
    examples = Examples(inputs, (inputs[:, 0, 0, 0] > 0).long())
    return tasks.Problem(examples, lambda seed: tasks.make_model("softmax", (4, 1, 1), 2, seed))


def test_pgd_s_steps_on_the_top_and_adds_the_gradients_of_s(task):
    model = task.make_model(0)
    sampler = workers.BasicPGD(model, task.examples, num_renewed=10, num_top=8, seed=0)
    exact, _ = priorities.priorities_of(model, task.examples)
    before = {name: part.clone() for name, part in sampler.gradient.total.items()}
    indices, weights = sampler.next_batch()
    assert set(indices.tolist()) == set(np.argsort(-exact)[:8].tolist())
    assert weights.tolist() == [1.0] * 8
    examples = task.examples.take(sampler.order[:10])
    loss = tasks.each_loss(model(examples[0]), examples[1]).sum()
    sums = torch.autograd.grad(loss, list(model.parameters()))
    for (name, part), own in zip(sampler.gradient.total.items(), sums, strict=True):
        torch.testing.assert_close(part, 70 / 80 * before[name] + own)


def test_the_authors_step_is_mean_of_s_plus_mean_of_t(task):
    model = task.make_model(0)
    settings = workers.Ratios(0.3, 0.1, 0.1, steps=1)
    feed = workers.make_sampler(AUTHORS, model, task.examples, settings, seed=0)
    _, weights = feed.next_batch()
    assert weights.tolist() == [4.0] * 8 + [4 / 3] * 24
    losses = np.arange(32.0)
    assert (weights * losses).mean() == pytest.approx(losses[:8].mean() + losses[8:].mean())
    feed.close()


@pytest.mark.parametrize("method", METHODS)
def test_work_counts_gradients_and_the_first_pass(task, method):
    settings = workers.Ratios(0.1, 0.1, 0.1, steps=8)
    curve = workers.train(task, method, settings, seed=1)
    first = 0 if method == SGD else 80
    assert curve["work"] == [first + 16 * step for step in range(9)]
    assert curve["loss"][-1] < curve["loss"][0]
    assert workers.train(task, method, settings, seed=1) == curve
