"""Each method in a first Flower app, in as few changed lines as docs/dropin.md says."""

from pathlib import Path

import numpy as np
import pytest
from dropin.patching import node_lines

from flwr_hetero.sampler import MercurySampler, OrderedSampler, PriorityFeed
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedSlice, TiFL

HERE = Path(__file__).parent


@pytest.fixture
def spied(monkeypatch):
    """Give a function that notes what a method does to a class's objects, after each call."""

    def spy(owner, name, note):
        method = getattr(owner, name)

        def noting(self, *args):
            before = note(self, None, *args)
            result = method(self, *args)
            note(self, (result, before), *args)
            return result

        monkeypatch.setattr(owner, name, noting)

    return spy


@pytest.fixture
def records(monkeypatch):
    """Collect the lines of the history."""
    lines = []

    def noting(keep):
        return lambda self, *found: (keep(self, *found), lines.append(found[-1]))[0]

    for strategy in (BiasedLocalSGD, CDGraB, FedSlice, TiFL):
        monkeypatch.setattr(strategy, "on_round_end", noting(strategy.on_round_end))
    return lines


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


def test_mercury(quickstart, spied):
    weights = []
    note = lambda self, result: result and weights.append(result[0][1])  # noqa: E731
    spied(MercurySampler, "next_batch", note)
    grid = quickstart("mercury.diff", 4, **{"local-epochs": 2, "learning-rate": 0.3})
    last = np.concatenate(weights[-len(weights) // 4 :])
    assert last.min() < 0.9
    assert last.max() > 1.1
    for node in grid.get_node_ids():  # kept for the next round, and learnt from its own losses
        state = grid.context(node).state["flwr-hetero.sampler.arrays"]
        assert np.ptp(state["importance"].numpy()) > 0.1


def test_pgd(quickstart, monkeypatch):
    passes, iterate = [], PriorityFeed.__iter__

    def spy(self):
        passes.append((self, []))
        for indices in iterate(self):
            passes[-1][1].extend(indices)
            yield indices

    monkeypatch.setattr(PriorityFeed, "__iter__", spy)
    rounds, epochs = 3, 2
    grid = quickstart("pgd.diff", rounds, **{"local-epochs": epochs})
    assert len(passes) == 4 * rounds * epochs
    for node in grid.get_node_ids():  # kept for the next round, and learnt from its own steps
        state = grid.context(node).state
        arrays, scalars = (state[f"flwr-hetero.sampler.{kind}"] for kind in ("arrays", "scalars"))
        assert scalars["batches"] == rounds * epochs * -(-scalars["num_samples"] // 16)
        assert (arrays["computed_at"].numpy() >= 0).mean() > 0.5
        assert arrays["gradient.classes.weight"].numpy().any()
    for feed, drawn in passes[-4:]:  # of the last round: no shuffle any more
        counts = np.bincount(drawn, minlength=feed.num_samples)
        assert counts.sum() == feed.num_samples
        assert counts.max() >= 2
        weights = feed.sampler.weights
        assert (weights.min() < 0.8) & (weights.max() > 1.2)


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


def model_of(reply):
    arrays = reply.content["arrays"].values()
    return np.concatenate([array.numpy().ravel() for array in arrays]).astype(float)


def test_biased_local_sgd(quickstart, records, spied):
    taken, models, starts = {}, {}, {}

    def see_replies(self, result, context, replies):
        if result is None:
            for reply in replies:
                node = reply.metadata.src_node_id
                taken[context.round, node] = reply.content["metrics"]["num-steps"]
            return [model_of(reply) for reply in replies]
        return models.update({context.round: [*zip(*result, strict=True)]})

    def see_instructions(self, result, context, messages, grid):
        starts[context.round] = model_of(messages[0])

    spied(BiasedLocalSGD, "on_replies", see_replies)
    spied(BiasedLocalSGD, "on_instructions", see_instructions)
    grid = quickstart("biased.diff", 3)
    fast, slow = (list(grid.get_node_ids())[turn::2] for turn in (0, 1))
    for number in (2, 3):
        steps = records[number]["biased_local_sgd"]["num_steps"]
        assert steps == {"node-0": 20, "node-1": 1, "node-2": 20, "node-3": 1}
        assert [taken[number, node] for node in fast + slow] == [20, 20, 1, 1]
        assert records[number]["train"]["num-steps"] == 10.5
        assert records[number]["train"]["examples-processed"] < 11 * 16
        for reply, sent in models[number]:  # scaled by the root of mean steps over its own
            node = reply.metadata.src_node_id
            scale = np.sqrt(10.5 / (20 if node in fast else 1))
            moved = model_of(reply) - starts[number]
            np.testing.assert_allclose(moved, scale * (sent - starts[number]), atol=1e-4)
    latency = records[3]["latency"]
    assert max(latency.values()) < 2 * min(latency.values())  # 16 times with equal steps
    for node in fast + slow:
        scalars = grid.context(node).state["flwr-hetero.sampler.scalars"]
        assert scalars["fast"] == (node in fast)
        assert scalars["share"] == pytest.approx(20 / 21)


def test_cd_grab(quickstart, records, spied):
    visits = []

    def see_draws(self, result):
        if result:
            if not visits or visits[-1][0] is not self:
                visits.append((self, []))
            visits[-1][1].append(sorted(result[0][0].tolist()))

    spied(OrderedSampler, "next_batch", see_draws)
    grid = quickstart("cd_grab.diff", 3)
    for number in (1, 2, 3):  # a report of every pair from every node
        assert records[number]["cd_grab"]["pairs"] == 4 * 11
        assert records[number]["cd_grab"]["pairs_together"] == 4 * 11
        assert records[number]["cd_grab"]["bytes_up"] > 4 * 11 * 1024 * 2
    first, *others = [batches for _, batches in visits]
    assert len(others) == 4 * 3 - 1
    assert all(batches == first for batches in others[:3])
    for batches in others[3:]:  # the same batches in another order, in each round another
        assert sorted(batches) == sorted(first)
        assert batches != first
    assert not any(batches in others[3:7] for batches in others[7:])
    for node in grid.get_node_ids():
        assert grid.context(node).state["flwr-hetero.sampler.scalars"]["order.version"] == 2
