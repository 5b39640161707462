"""PGD's experiments: its workers, what is read off their curves, and claims that can fail."""

from math import inf

import numpy as np
import pytest
import torch
from torch import nn

from flwr_hetero_studies.core.plan import Data, Options
from flwr_hetero_studies.papers.pgd import cases, costs, figures, gains, priorities, tasks, workers
from flwr_hetero_studies.papers.pgd.workers import METHODS, PAPER, PGD_A, PGD_S, SGD
from flwr_hetero_studies.tasks import Examples

QUIET = Options(fast=True)


@pytest.fixture
def task():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 4, 1, 1, generator=generator)
    examples = Examples(inputs, (inputs[:, 0, 0, 0] > 0).long())
    return tasks.Problem(examples, lambda seed: tasks.make_model("softmax", (4, 1, 1), 2, seed))


def test_pgd_s_steps_on_the_top_alone(task):
    model = task.make_model(0)
    sampler = workers.BasicPGD(model, task.examples, num_renewed=10, num_top=6, seed=0)
    exact, _ = priorities.priorities_of(model, task.examples)
    indices, weights = sampler.next_batch()
    assert set(indices.tolist()) == set(np.argsort(-exact)[:6].tolist())
    assert weights.tolist() == [1.0] * 6


def test_pgd_s_adds_the_gradients_of_its_step(task):
    model = task.make_model(0)
    sampler = workers.BasicPGD(model, task.examples, num_renewed=10, num_top=8, seed=0)
    before = {name: part.clone() for name, part in sampler.gradient.total.items()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    sampler.on_batch(model, sampler.next_batch()[0], torch.zeros(8))
    for name, part in sampler.gradient.total.items():
        torch.testing.assert_close(part, 0.9 * before[name] + 8 * 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_work_counts_gradients_and_the_first_pass(task, method):
    settings = workers.Ratios(0.1, 0.1, 0.1, steps=8, workers=4)
    curve = workers.train(task, method, settings, seed=1)
    first = 80 if method in (PGD_A, PGD_S) else 0
    assert curve["work"] == [first + 16 * step for step in range(9)]
    assert curve["loss"][-1] < curve["loss"][0]
    assert workers.train(task, method, settings, seed=1) == curve


def test_the_best_rate_is_that_of_the_least_loss(task):
    settings = workers.Ratios(0.1, 0.1, 0.0, steps=8)
    rate, curves = workers.at_best_rate(task, SGD, settings, (1e-4, 0.5), seeds=(0, 1))
    assert rate == 0.5
    assert len(curves) == 2


def test_prices_are_in_steps_of_sgd(task):
    methods = (SGD, PGD_A)
    found = cases.prices(task, workers.Ratios(0.1, 0.1, 0.1, 0, workers=0), methods, turns=2)
    assert found[SGD]["price"] == 1.0
    assert found[PGD_A]["start"] > found[SGD]["start"] == 0.0


def test_ways_to_priorities_agree():
    found = costs.ways("cnn", 4)
    exact = found[costs.PER_SAMPLE]()
    for way in ("forward mode", "step with priorities, all"):
        torch.testing.assert_close(found[way](), exact, rtol=1e-4, atol=1e-6)
    assert all(found[way]() is None for way in ("forward", costs.BASE))


@pytest.mark.parametrize(("name", "shape"), [("lr-synthetic", (30, 1000, 1, 1)),
                                             ("mlp-synthetic", (30, 100, 1, 1)),
                                             ("cnn-digits", (30, 1, 8, 8))])  # fmt: skip
def test_data_of_races(name, shape, tmp_path):
    task = tasks.of_race(name, 30, Data("digits", str(tmp_path)))
    assert task.examples.inputs.shape == shape
    assert task.make_model(0)(task.examples.inputs).shape[0] == 30


def test_a_plan_takes_the_best_rate_of_the_first_seed():
    lines = []
    for _ in range(3):
        known = {str((line["case"], line["seed"])) for line in lines}
        for trial in cases.plan(Options(cases.SETTINGS, "fashion"), lines):
            if (
                trial.case["experiment"] in cases.RACES
                and str((trial.case, trial.seed)) not in known
            ):
                loss = abs(trial.case["lr"] - 0.3)
                curve = {"iteration": [trial.case["iterations"]], "loss": [loss]}
                lines.append({"case": trial.case, "seed": trial.seed, "curve": curve})
    others = [line["case"] for line in lines if line["seed"]]
    assert {case["lr"] for case in others if case["task"] == "mlp-fashion"} == {0.3}
    drawn = [line for line in lines if line["case"]["method"] == workers.DRAWN]
    assert len({(x["case"]["experiment"], x["case"]["task"], x["seed"]) for x in drawn}) == len(
        drawn
    )


def test_fit_never_rises_and_treats_jumps_alike():
    assert gains.falling([3.0, 1.0, 2.0, 0.5]).tolist() == [3.0, 1.5, 1.5, 0.5]
    assert gains.falling([1.0, 2.0, 3.0]).tolist() == [2.0, 2.0, 2.0]


def test_rises_count_in_the_later_half_only():
    assert workers.jumps({"loss": [2.0, 5.0, 1.0, 2.0, 1.0, 1.5]}) == pytest.approx(0.25)


def test_gain_is_the_ratio_of_work_to_one_loss():
    slow = {"work": [0.0, 10.0, 20.0, 30.0, 40.0], "loss": [4.0, 3.0, 2.0, 1.0, 0.0]}
    fast = slow | {"work": [x / 2 for x in slow["work"]]}
    never = slow | {"loss": [4.0, 4.0, 4.0, 4.0, inf]}
    gains = [figures.gain([curve], [slow], 0.5) for curve in (fast, slow, never)]
    assert gains == [2.0, 1.0, 0.0]


def test_curves_leave_out_what_is_not_finite():
    curve = figures.curve_of({"work": [0.0, 1.0], "loss": [1.0, inf]})
    assert (curve.x, curve.y) == ([0.0], [1.0])


def test_time_of_a_step_is_work_and_link():
    seconds, parameters = figures.COSTS["mlp"]
    assert figures.round_s("mlp", 4, inf) == pytest.approx(seconds * 300)
    link = figures.round_s("mlp", 4, 1000.0) - figures.round_s("mlp", 4, inf)
    assert link == pytest.approx(64 * parameters / 1e9)


def test_paper_cnn_fits_images_of_28_pixels():
    model = tasks.paper_cnn((1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == figures.COSTS["cnn"][1]
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_a_step_along_all_gradients_lowers_the_loss_by_the_sum_of_priorities(task):
    model = task.make_model(0).double()
    examples = Examples(task.examples.inputs.double(), task.examples.targets)
    before = [p.clone() for p in model.parameters()]
    look = priorities.look_at(model, examples)
    assert all(map(torch.equal, before, model.parameters()))
    np.testing.assert_allclose(look.of_decrease, look.of_priorities, rtol=0.02)


def test_decrease_is_the_square_of_the_gradient_times_the_step(task):
    model = task.make_model(0).double()
    examples = Examples(task.examples.inputs.double(), task.examples.targets)
    _, total = priorities.priorities_of(model, examples)
    square = sum(float(part.square().sum()) for part in total.values()) / 80**2
    fell = priorities.decrease(model, examples, total)
    assert fell == pytest.approx(priorities.SMALL_STEP * square, rel=0.02)


def test_straight_lines_are_explained_and_noise_is_not():
    x = np.arange(20.0)[:, None]
    assert priorities.explained(-0.3 * x + np.array([1.0, 2.0])) == pytest.approx(1)
    assert priorities.explained(np.random.default_rng(0).normal(size=(20, 50))) < 0.2


def test_fall_tells_a_steep_start_from_an_even_end():
    steps = np.arange(0.0, 51)
    logs = np.where(steps < 5, -2.0 * steps, -10 - 0.1 * (steps - 5))
    fall = priorities.Fall.of(np.exp(logs)[:, None])
    assert fall.early > 2 * fall.late
    assert (fall.positive, fall.line) == (1.0, pytest.approx(1))


@pytest.mark.parametrize(("speed", "verdict"), [(2.0, "reproduced"), (0.5, "partly")])
def test_convergence_is_decided_by_work(monkeypatch, speed, verdict):
    work = np.linspace(0, 100, 21)

    def found(task, method, settings, rates, seeds):
        own = {SGD: 1.0, PGD_A: speed, PGD_S: 1.0}[method]
        loss = np.exp(-0.03 * work) + (0.2 if method == PGD_S else 0.0)
        spent = (work / own).tolist()
        return rates[0], [{"work": spent, "step": spent, "loss": loss.tolist()}]

    monkeypatch.setattr(figures, "at_best_rate", found)
    finding = figures.convergence(QUIET, "mlp")
    assert finding.verdict == verdict
    assert [row[0] for row in finding.rows] == list(PAPER)


def test_figure_1_of_a_tiny_task(monkeypatch, task):
    small = tasks.Problem(task.examples, lambda seed: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    monkeypatch.setattr(priorities, "of_figure", lambda options, model: small)
    finding = priorities.figure_1(QUIET)
    assert len(finding.rows) == len(priorities.LOOKS) + 1
    assert finding.claims[2].holds
