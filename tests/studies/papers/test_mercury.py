"""Mercury's experiments: clock, training and gains by hand, and whole ones in a tiny form."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from flwr_hetero_studies.core.criteria import times
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury import importance, reading, speed, training
from flwr_hetero_studies.papers.mercury.clock import StepCosts, costs, overlapped_s
from flwr_hetero_studies.papers.mercury.reading import gain, spent
from flwr_hetero_studies.papers.mercury.training import (
    ADACOMM,
    MERCURY,
    SAMPLERS,
    Sampling,
    TrainedRun,
    Training,
    Workload,
)

COST = StepCosts(compute_s=1.0, exchange_s=4.0, score_all_s=16.0)
TINY = Workload("digits", "softmax", 8, 12, 6, rows=120)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(training, "FAST", dict.fromkeys(training.FAST, TINY))
    return Options(fast=True)


def run_of(accuracy, second=1.0):
    places = np.arange(1.0, len(accuracy) + 1)
    return TrainedRun(places.tolist(), places.tolist(), (second * places).tolist(), accuracy)


def test_a_step_hides_scoring_or_adds_it():
    assert (COST.hidden_share, COST.step_s(0.25), COST.step_s(0.5)) == (0.25, 5.0, 9.0)
    assert COST.step_s(0.25, is_hidden=False) == 9.0


def test_wifi_costs_are_the_papers():
    assert costs(10).exchange_s == pytest.approx(72.0)
    assert costs(10).compute_s == pytest.approx(0.5, rel=0.1)
    assert costs(10, 12).score_all_s == pytest.approx(costs(10).score_all_s / 3)


def test_overlapping_lies_between_the_longer_part_and_both():
    for cost in map(costs, (10, 200, 1000, 50_000)):
        both = cost.compute_s + cost.exchange_s
        assert max(cost.compute_s, cost.exchange_s) <= overlapped_s(cost) < both
    assert overlapped_s(COST, [(1.0, 1.0)]) == pytest.approx(5.0), "one layer cannot overlap"
    even = StepCosts(1.0, exchange_s=1.0, score_all_s=0.0)
    assert overlapped_s(even, [(0.5, 0.5)] * 2) == pytest.approx(5 / 3)


def test_gain_is_the_ratio_of_what_is_spent_0_if_the_plateau_is_not_reached():
    rising = [0.1 * n for n in range(10)] + [0.9] * 20
    base, twice, worse = run_of(rising), run_of(rising, 0.5), run_of([0.5] * 30)
    assert spent(base, 0.5) == pytest.approx(6.0)
    assert gain(base, twice) == pytest.approx(2.0)
    assert gain(base, twice, "steps") == pytest.approx(1.0)
    assert (spent(worse, 0.8), gain(base, worse), reading.written(0.0)) == (inf, 0.0, "never")


def test_gains_have_an_interval_over_seeds():
    rng, wave = np.random.default_rng(0), np.minimum(0.02 * np.arange(60), 0.8)
    base = [run_of((wave + 0.01 * rng.normal(size=60)).tolist()) for _ in range(10)]
    twice = [run._replace(seconds=[s / 2 for s in run.seconds]) for run in base]
    assert reading.gains(base, twice) == pytest.approx(np.full(10, 2.0))
    other = [run_of((wave + 0.01 * rng.normal(size=60)).tolist()) for _ in range(10)]
    assert times("", 2, reading.gains(base, other)).verdict == "not reproduced"
    never = [run_of([0.1] * 60)] * 10
    assert (reading.gains(base, never) == 0).all()


@pytest.mark.parametrize("sampling", SAMPLERS)
def test_the_same_seed_gives_the_same_run_whose_steps_have_one_cost(sampling):
    method = Sampling(sampling, share=0.25)
    one, other = (Training(TINY, method, COST, 3).run() for _ in range(2))
    assert one == other
    assert one.steps == [2, 4, 6, 8, 10, 12]
    assert one.seconds[-1] == pytest.approx(12 * 5.0)


def test_adacomm_averages_and_pays_an_exchange_for_many_steps():
    training = Training(replace(TINY, num_steps=40), ADACOMM, COST, 0)
    steps, seconds = training.advance()
    assert (steps, seconds) == (2, 6.0)
    for params in zip(*(model.parameters() for model in training.models), strict=True):
        assert all((param == params[0]).all() for param in params)


def test_scores_are_those_of_the_model_before_the_step():
    training = Training(TINY, Sampling("paper", share=1.0), COST, 0)
    rows = training.workers[0].rows
    before = training.all_losses(rows)
    training.advance()
    cached = training.workers[0].sampler.importance
    assert cached == pytest.approx(before, rel=1e-5)
    assert training.all_losses(rows) != pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize("which", ["importance", "random"])
def test_resharding_moves_samples_and_loses_none(which):
    training = Training(TINY, Sampling("paper", resharding=which, reshard_share=1.0), COST, 0)
    before = np.concatenate([worker.rows for worker in training.workers])
    training.advance()
    moved = training.reshard()
    after = np.concatenate([worker.rows for worker in training.workers])
    assert moved == (after != before).sum() > 0
    assert sorted(after) == list(range(120))


def test_bandwidth_noise_changes_seconds_and_adaptive_groups():
    noisy = [replace(MERCURY, bandwidth_noise=0.1, is_adaptive=on) for on in (True, False)]
    adaptive, fixed = (Training(TINY, method, COST, 0).run().seconds[-1] for method in noisy)
    assert adaptive < fixed, "a fixed group is too large when the link is fast"


FIGURES = [importance.figure_3, importance.figure_6, speed.figure_12, speed.figure_14]


@pytest.mark.parametrize("run", [*FIGURES, speed.figure_17, speed.figure_18])
def test_an_experiment_has_rows_and_claims(run, tiny):
    outcome = run(tiny)
    assert all(len(row) == len(outcome.head) for row in outcome.rows)
    assert 1 <= len(outcome.claims) <= 4


def test_the_way_that_takes_longer_is_not_called_faster(tiny):
    hidden = Sampling("paper", share=0.1)
    methods = {"hidden": hidden, "not hidden": replace(hidden, is_hidden=False)}
    assert speed.compare(tiny, methods, 1.0, 2.0).claims[-1].verdict == "not reproduced"


@pytest.mark.parametrize(("name", "is_biased"), [("paper", True), ("package", False)])
def test_the_papers_estimator_is_biased_and_the_packages_is_not(name, is_biased):
    off, error = importance.bias(name, 4000, 0)
    assert (abs(off) > importance.ERRORS * error) == is_biased


def test_without_overlapping_nothing_is_saved(monkeypatch):
    monkeypatch.setattr(importance, "overlapped_s", lambda cost: cost.compute_s + cost.exchange_s)
    little, *much = (claim.verdict for claim in importance.figure_2(Options()).claims)
    assert little == "reproduced"
    assert much == ["not reproduced"] * 2
