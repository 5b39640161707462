"""TiFL's experiments in a tiny form, and claims that fail."""

from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch

from flwr_hetero_studies.core.experiment import Curve
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.tifl import figures, models, runs, times
from flwr_hetero_studies.papers.tifl.runs import ADAPTIVE, CAPPED, CIFAR_CPUS, Plan, Trained

QUIET = Options(fast=True)
TINY = Plan(CIFAR_CPUS, nodes=10, per_round=2, fast_rounds=3, fast_seeds=2)


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    monkeypatch.setattr(runs, "SHORT_MODEL", "softmax")


def trained(seconds, accuracy):
    return Trained(seconds, seconds, accuracy, Curve([0.0, seconds], [10.0, accuracy]))


def alike_all(options, plans, policies):
    return {setting: {name: trained(10.0, 80.0) for name in policies} for setting in plans}


def test_five_groups_of_equal_size():
    speeds = [device.compute_factor for device in TINY.fleet]
    assert speeds == pytest.approx([4, 4, 2, 2, 1, 1, 0.5, 0.5, 0.1, 0.1], rel=0.2)
    assert len(set(speeds)) == 10


def test_vanilla_waits_for_slow_nodes_and_fast_does_not():
    vanilla, fast = (runs.train(QUIET, TINY, policy) for policy in ("vanilla", "fast"))
    assert fast.seconds < vanilla.seconds / 2
    assert fast.all_s > fast.seconds  # profiling
    assert len(vanilla.by_time.x) == 4
    assert vanilla.accuracy == vanilla.by_time.y[-1]


def test_adaptive_measures_tiers_and_keeps_to_credits():
    plan = replace(TINY, fast_rounds=6, fast_seeds=1)
    free, capped = (runs.train(QUIET, plan, policy) for policy in (ADAPTIVE, CAPPED))
    profiled = runs.train(QUIET, plan, "uniform")
    assert free.all_s - free.seconds > profiled.all_s - profiled.seconds
    assert len(capped.by_time.x) == 7


@pytest.mark.parametrize("name", ["1b", "3a", "3b", "4", "5", "6a", "6b", "7", "8", "9"])
def test_a_figure_without_differences_is_not_reproduced(name, monkeypatch):
    monkeypatch.setattr(figures, "compare", alike_all)
    found = getattr(figures, f"figure_{name}")(QUIET)
    assert found.verdict != "reproduced"
    assert all(len(row) == len(found.head) for row in found.rows)


def test_figure_3a_holds_on_the_papers_own_numbers(monkeypatch):
    own = {"vanilla": 110.0, "slow": 150.0, "uniform": 18.0, "random": 14.0, "fast": 10.0}
    found = {name: trained(seconds, 80.0) for name, seconds in own.items()}
    monkeypatch.setattr(figures, "compare", lambda options, plans, policies: {"resource": found})
    assert figures.figure_3a(QUIET).verdict == "reproduced"


def test_table_1_fails_on_another_probability(monkeypatch):
    assert times.table_1(QUIET).verdict == "reproduced"
    monkeypatch.setattr(times, "policy_probs", lambda policy, num_tiers: np.ones(5) / 5)
    assert times.table_1(QUIET).verdict == "not reproduced"


def test_an_idle_run_takes_the_time_of_its_tier():
    strategy = times.idle_run("slow", rounds=20, seed=0)
    assert strategy.actual_s == pytest.approx(20 * 10, rel=0.15)


def test_a_round_with_a_straggler_is_told_by_its_length():
    timed = times.RoundTimes(times.idle_strategy("slow", 0))
    times.start(timed, 5, 0)
    assert (np.diff(timed.ends_s) > times.DELAYED_S).all()


def test_straggler_chance_counts_subsets():
    subsets = list(combinations(range(7), 3))
    share = sum(max(subset) >= 5 for subset in subsets) / comb(7, 3)
    assert times.straggler_chance(7, 2, 3) == pytest.approx(share)
    assert times.straggler_chance(7, 2, 6) == 1
    assert times.straggler_chance(7, 2, 3) > times.straggler_bound(7, 2, 3)


@pytest.mark.parametrize("build", [models.cifar_cnn, models.mnist_cnn, models.leaf_cnn])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_models_fit_small_and_larger_images(build, shape):
    assert build(shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)
