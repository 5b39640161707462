"""PGD's experiments: its workers, what is read off their curves, and claims that can fail."""

from math import inf

import numpy as np
import pytest
import torch

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.pgd import figures, priorities, tasks, workers
from flwr_hetero_studies.papers.pgd.workers import AUTHORS, METHODS, PGD_S, SGD
from flwr_hetero_studies.tasks import Examples

QUIET = Options(fast=True)


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


def test_what_is_read_off_curves():
    assert workers.jumps({"loss": [2.0, 5.0, 1.0, 2.0, 1.0, 1.5]}) == 0.25, "in the later half"
    slow = {"work": [0.0, 10.0, 20.0, 30.0, 40.0], "loss": [4.0, 3.0, 2.0, 1.0, 0.0]}
    fast = slow | {"work": [x / 2 for x in slow["work"]]}
    never = slow | {"loss": [4.0, 4.0, 4.0, 4.0, inf]}
    assert figures.gains([fast, slow, never], [slow] * 3, 0.5).tolist() == [2.0, 1.0, 0.0]


def test_time_of_a_step_is_work_and_link():
    cnn = tasks.paper_cnn((1, 28, 28), 10)
    assert figures.COSTS["cnn"][1] == sum(p.numel() for p in cnn.parameters())
    seconds, parameters = figures.COSTS["mlp"]
    assert figures.round_s("mlp", 4, inf) == pytest.approx(seconds * 300)
    link = figures.round_s("mlp", 4, 1000.0) - figures.round_s("mlp", 4, inf)
    assert link == pytest.approx(64 * parameters / 1e9)


def test_a_step_along_all_gradients_lowers_the_loss_by_the_sum_of_priorities(task):
    model = task.make_model(0).double()
    examples = Examples(task.examples.inputs.double(), task.examples.targets)
    before = [p.clone() for p in model.parameters()]
    found = priorities.look_at(model, examples)
    assert all(map(torch.equal, before, model.parameters()))
    np.testing.assert_allclose(found.of_decrease, found.of_priorities, rtol=0.02)


def test_fall_tells_a_steep_start_from_an_even_end_and_lines_from_noise():
    steps = np.arange(0.0, 51)
    logs = np.where(steps < 5, -2.0 * steps, -10 - 0.1 * (steps - 5))
    fall = priorities.Fall.of(np.exp(logs)[:, None])
    assert fall.early > 2 * fall.late
    assert (fall.positive, fall.line) == (1.0, pytest.approx(1))
    assert priorities.explained(np.random.default_rng(0).normal(size=(20, 50))) < 0.2


@pytest.mark.parametrize(("speed", "verdict"), [(2.0, "reproduced"), (0.5, "partly")])
def test_convergence_is_decided_by_work(monkeypatch, speed, verdict):
    work = np.linspace(0, 100, 21)

    def found(task, method, settings, seed):
        loss = np.exp(-0.03 * work) + 0.2 * (method == PGD_S)
        spent = (work / (speed if method == AUTHORS else 1.0)).tolist()
        return {"work": spent, "step": spent, "loss": loss.tolist()}

    monkeypatch.setattr(figures, "train", found)
    finding = figures.convergence(Options(fast=True, seeds=range(10)), "mlp")
    assert finding.verdict == verdict
    assert [row[0] for row in finding.rows] == [SGD, AUTHORS, PGD_S]
