"""Where x stays on quadratics whose weighted means are known: what no row of objectives.md shows.

The slow half of the nodes pulls x to 1, the quick half to 0. Examples are such that FedAvg's
optimum is 0.5, and where quick nodes count more x is far below.
"""

import numpy as np
import pytest
from quadratics import Watched, fedavg, models
from recording import History

from flwr_hetero.strategy import FedBuff, LocalSteps

GOALS = np.array([0.0] * 4 + [1.0] * 4)
EXAMPLES = [50, 150, 100, 100, 150, 50, 100, 100]
SPEEDS = np.array([2.0, 1.71, 1.33, 1.13, 0.61, 0.557, 0.503, 0.457])
LR = 8e-4


def mean(strategy, updates, speeds=SPEEDS, lr=LR, **settings):
    """Return the mean of x over the last three quarters of a run that begins at 0.5."""
    grid = Watched(GOALS, speeds, lr=lr, examples=EXAMPLES, **settings)
    found, _ = models(strategy, grid, updates, x=0.5)
    return found[updates // 4 :].mean()


def weighted(*weights):
    """Return the mean of the goals by products of weights."""
    product = np.prod([np.asarray(w, float) for w in weights], axis=0)
    return float(product @ GOALS / product.sum())


def sliced():
    return LocalSteps(fedavg(), fast_steps=10, budget="slice", step_correction=1.0)


@pytest.mark.parametrize(
    ("build", "updates", "rel", "settings"),
    [
        (lambda: FedBuff(fedavg()), 250, 0.01, {"speeds": [1.0] * 8, "jitter": 0.2}),
        (lambda: FedBuff(sliced(), concurrency=3), 300, 0.02, {"lr": 4e-4}),
    ],
)
def test_fair_is_fedavgs_optimum_whatever_the_speeds(build, updates, rel, settings):
    """Up to the drift of nodes that take many steps, half a per cent here."""
    assert mean(build(), updates, **settings) == pytest.approx(0.5, rel=rel)


def test_stale_nodes_count_less_by_the_papers_rule():
    found = mean(FedBuff(fedavg(), weighting="equal"), 120, lr=6 * LR)
    assert found < weighted(SPEEDS) - 0.02


def test_what_clipping_leaves_out_is_in_the_history():
    strategy = History(FedBuff(fedavg(), max_weight=1.0))
    models(strategy, Watched(GOALS, SPEEDS, examples=EXAMPLES), 20)
    shares = [record["fedbuff"]["clipped_share"] for record in strategy.records[5:]]
    assert 0.05 < np.mean(shares) < 0.5
