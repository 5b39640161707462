"""Each method in a first Flower app, in as few changed lines as docs/dropin.md says."""

from pathlib import Path

import numpy as np
import pytest
from dropin.patching import node_lines

from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedSlice, TiFL

HERE = Path(__file__).parent


@pytest.fixture
def records(monkeypatch):
    """Collect the lines of the history."""
    lines = []

    def noting(keep):
        return lambda self, *found: (keep(self, *found), lines.append(found[-1]))[0]

    for strategy in (BiasedLocalSGD, CDGraB, FedSlice, TiFL):
        monkeypatch.setattr(strategy, "on_round_end", noting(strategy.on_round_end))
    return lines


def samplers(grid):
    """Yield what each node keeps of its sampler: arrays and numbers."""
    for node in grid.get_node_ids():
        state = grid.context(node).state
        arrays = state["flwr-hetero.sampler.arrays"].items()
        yield {name: array.numpy() for name, array in arrays}, state["flwr-hetero.sampler.scalars"]


@pytest.mark.parametrize(
    ("diff", "lines"),
    [("tifl", 2), ("slices", 3), *[(name, 5) for name in ("biased", "cd_grab", "mercury", "pgd")]],
)
def test_so_many_lines_of_the_node_change(diff, lines):
    assert node_lines((HERE / f"{diff}.diff").read_text()) <= lines


def test_the_app_runs_without_a_change(quickstart, capsys):
    quickstart(None, 1)
    assert "accuracy" in capsys.readouterr().out


def test_tifl(quickstart, records):
    quickstart("tifl.diff", 12, 1.0, **{"batch-size": 128})
    tiers = [{"node-0", "node-2"}, {"node-1", "node-3"}]
    assert set(records[1]["selected"]) == tiers[0]  # the first to answer; the others are timed
    drawn = [record["tifl"]["tier"] for record in records[2:]]
    assert set(drawn) == {0, 1}
    assert [set(record["selected"]) for record in records[2:]] == [tiers[tier] for tier in drawn]


def test_mercury(quickstart):
    grid = quickstart("mercury.diff", 4, **{"local-epochs": 2, "learning-rate": 0.3})
    for arrays, _ in samplers(grid):  # kept for the next round, and learnt from its own losses
        assert np.ptp(arrays["importance"]) > 0.1


def test_pgd(quickstart):
    rounds, epochs = 3, 2
    grid = quickstart("pgd.diff", rounds, **{"local-epochs": epochs})
    for arrays, scalars in samplers(grid):  # learnt from its own steps
        assert scalars["batches"] == rounds * epochs * -(-scalars["num_samples"] // 16)
        assert (arrays["computed_at"] >= 0).mean() > 0.5
        assert arrays["gradient.classes.weight"].any()
        assert np.bincount(arrays["order"]).max() >= 2  # the last epoch was no shuffle any more


def test_slices(quickstart, records):
    quickstart("slices.diff", 3)
    whole = 4 * 360  # examples of a round of FedAvg
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    for record in records[2:]:  # once all four have been timed
        steps = record["local_steps"]["num_steps"]
        assert steps["node-0"] == steps["node-2"] == 10
        assert max(steps["node-1"], steps["node-3"]) <= 2
        processed = record["train"]["examples-processed"] * len(record["selected"])
        assert 0.75 * whole <= processed <= 1.3 * whole
    assert records[3]["train"]["train_loss"] < records[1]["train"]["train_loss"] < 2.4


def test_biased_local_sgd(quickstart, records):
    grid = quickstart("biased.diff", 3)
    for record in records[2:]:
        steps = record["biased_local_sgd"]["num_steps"]
        assert steps == {"node-0": 20, "node-1": 1, "node-2": 20, "node-3": 1}
        assert record["train"]["num-steps"] == 10.5
        assert record["train"]["examples-processed"] < 11 * 16
    latency = records[3]["latency"]
    assert max(latency.values()) < 2 * min(latency.values())  # 16 times with equal steps
    kept = [scalars for _, scalars in samplers(grid)]
    assert [scalars["fast"] for scalars in kept] == [True, False] * 2
    assert [scalars["share"] for scalars in kept] == [pytest.approx(20 / 21)] * 4


def test_cd_grab(quickstart, records):
    grid = quickstart("cd_grab.diff", 3)
    for number in (1, 2, 3):  # a report of every pair from every node
        assert records[number]["cd_grab"]["pairs"] == 4 * 11
        assert records[number]["cd_grab"]["pairs_together"] == 4 * 11
    for arrays, scalars in samplers(grid):
        assert scalars["order.version"] == 2
        assert sorted(arrays["order.order"]) == list(range(len(arrays["order.order"])))
        assert arrays["order.order"].tolist() != sorted(arrays["order.order"])
