"""Mercury's experiments: clock, training and gains by hand, and whole ones in a tiny form."""

from math import inf

import numpy as np
import pytest

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.mercury import importance, training
from flwr_hetero_studies.papers.mercury.clock import StepCosts
from flwr_hetero_studies.papers.mercury.speed import gain, spent, written
from flwr_hetero_studies.papers.mercury.training import Sampling, TrainedRun, Training, Workload

COST = StepCosts(compute_s=1.0, exchange_s=4.0, score_all_s=16.0)
TINY = Workload("digits", "softmax", 8, 12, 6, rows=120)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(training, "FAST", dict.fromkeys(training.FAST, TINY))
    return Options(fast=True)


def run_of(accuracy, second=1.0):
    places = np.arange(1.0, len(accuracy) + 1)
    return TrainedRun(places.tolist(), places.tolist(), (second * places).tolist(), accuracy)


def test_gain_is_the_ratio_of_what_is_spent_0_if_the_plateau_is_not_reached():
    rising = [0.1 * n for n in range(10)] + [0.9] * 20
    base = run_of(rising)
    twice = run_of(rising, 0.5)
    worse = run_of([0.5] * 30)
    assert spent(base, 0.5) == pytest.approx(6.0)
    assert gain(base, twice) == pytest.approx(2.0)
    assert gain(base, twice, "steps") == pytest.approx(1.0)
    assert (spent(worse, 0.8), gain(base, worse), written(0.0)) == (inf, 0.0, "never")


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


@pytest.mark.parametrize(("name", "is_biased"), [("paper", True), ("package", False)])
def test_the_papers_estimator_is_biased_and_the_packages_is_not(name, is_biased):
    off, error = importance.bias(name, 4000, 0)
    assert (abs(off) > importance.ERRORS * error) == is_biased
