"""Biased local SGD's experiments in a tiny form, and claims that fail."""

import numpy as np
import pytest

from flwr_hetero_studies.core.experiment import Curve
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.papers.biased_local_sgd import figures, runs
from flwr_hetero_studies.papers.biased_local_sgd.runs import Case, HighLossToSlow, MeanRun

QUIET = Options(fast=True)


def trained(seconds, percent):
    percents = percent + np.linspace(-0.01, 0.01, 10)
    ends = [Curve([0.0, seconds], [10.0, each]) for each in percents]
    return MeanRun(10, 1.0, [seconds] * 10, percents, ends)


def test_biased_takes_less_time_than_balanced(monkeypatch):
    monkeypatch.setattr(runs, "SHORT_EPOCHS", 1.4)
    both = {"biased": Case(fast=1, slow=1), "balanced": Case(fast=1, slow=1, balanced=True)}
    found = runs.compare(QUIET, both)
    (seconds,) = found["biased"].times
    (balanced,) = found["balanced"].times
    assert seconds == pytest.approx(found["biased"].rounds * 32 * 16 * 0.01)
    assert seconds < balanced / 2
    assert found["biased"].by_time[0].y[1] > 15  # as many steps in the first round


def test_high_losses_go_to_slow_nodes():
    shared = HighLossToSlow(100, 10, high_loss_fraction=1.0, seed=0)
    shared.losses = np.arange(100, dtype=np.float32)
    fast, slow = shared.draw([8, 2], [True, False])
    assert sorted(slow) == list(range(80, 100))
    assert min(fast) < 80


PARTS = ["table_1", "table_2", "table_3", "table_6", "table_7", "figure_3", "figure_4"]


@pytest.mark.parametrize("name", PARTS)
def test_without_differences_nothing_is_reproduced(name, monkeypatch):
    def alike(options, cases):
        return {case: trained(10.0, 80.0) for case in cases}

    monkeypatch.setattr(figures, "compare", alike)
    found = getattr(figures, name)(QUIET)
    assert found.verdict in ("partly", "not reproduced")
    assert all(len(row) == len(found.head) for row in found.rows)


def test_table_1_holds_on_the_papers_own_numbers(monkeypatch):
    def printed(options, cases):
        cells = {name: figures.TABLE_1[name].split() for name in cases}
        return {name: trained(float(c[0]), float(c[2])) for name, c in cells.items()}

    monkeypatch.setattr(figures, "compare", printed)
    assert figures.table_1(QUIET).verdict == "reproduced"
