"""Methods with a half on the server and a half on the node, in a first Flower app."""

import numpy as np
import pytest
from dropin.patching import node_lines
from dropin.test_dropin import HERE, quickstart  # noqa: F401

from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.strategy import BiasedLocalSGD, CDGraB, FedSlice


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
    for strategy in (BiasedLocalSGD, CDGraB, FedSlice):
        add = lambda self, run, record: lines.append(record)  # noqa: E731
        monkeypatch.setattr(strategy, "on_round_end", add)
    return lines


def model_of(reply):
    arrays = reply.content["arrays"].values()
    return np.concatenate([array.numpy().ravel() for array in arrays]).astype(float)


def test_slices_in_three_lines(quickstart, records):  # noqa: F811
    assert node_lines((HERE / "slices.diff").read_text()) <= 3
    quickstart("slices.diff", 3)
    whole = 4 * 360  # examples of a round of FedAvg
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    for record in records[2:]:  # once all four have been timed
        steps = record["local-steps"]["num-steps"]
        assert steps["node-0"] == steps["node-2"] == 10
        assert max(steps["node-1"], steps["node-3"]) <= 2
        processed = record["train"]["examples-processed"] * len(record["selected"])
        assert 0.75 * whole <= processed <= 1.3 * whole
    assert records[3]["train"]["train_loss"] < records[1]["train"]["train_loss"] < 2.4


def test_biased_local_sgd_in_five_lines(quickstart, records, spied):  # noqa: F811
    assert node_lines((HERE / "biased.diff").read_text()) <= 5
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
        steps = records[number]["biased-local-sgd"]["num-steps"]
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


def test_cd_grab_in_five_lines(quickstart, records, spied):  # noqa: F811
    assert node_lines((HERE / "cd_grab.diff").read_text()) <= 5
    visits = []

    def see_draws(self, result):
        if result:
            if not visits or visits[-1][0] is not self:
                visits.append((self, []))
            visits[-1][1].append(sorted(result[0][0].tolist()))

    spied(OrderedSampler, "next_batch", see_draws)
    grid = quickstart("cd_grab.diff", 3)
    for number in (1, 2, 3):  # a report of every pair from every node
        assert records[number]["cd-grab"]["pairs"] == 4 * 11
        assert records[number]["cd-grab"]["pairs-together"] == 4 * 11
        assert records[number]["cd-grab"]["bytes-up"] > 4 * 11 * 1024 * 2
    first, *others = [batches for _, batches in visits]
    assert len(others) == 4 * 3 - 1
    assert all(batches == first for batches in others[:3])
    for batches in others[3:]:  # the same batches in another order, in each round another
        assert sorted(batches) == sorted(first)
        assert batches != first
    assert not any(batches in others[3:7] for batches in others[7:])
    for node in grid.get_node_ids():
        assert grid.context(node).state["flwr-hetero.sampler.scalars"]["order.version"] == 2
