"""Lies about a node's job in FedAvg: what a round of FedSlice takes of them."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from quadratics import app, fedavg, models
from toy import rewriting

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.slices.algorithm import believed_jobs
from flwr_hetero.strategy import FedSlice

NODES = 10
JOB = 24


def saying(claims, liar=0):
    """Make a mod that reports a node's work; one says something else of it."""

    def change(partition, message, reply):
        steps = message.content["config"][keys.NUM_STEPS]
        work = {keys.NUM_STEPS: steps, keys.EXAMPLES_PROCESSED: steps, keys.PASSES: 1}
        work |= {keys.JOB_STEPS: JOB} | (claims if partition == liar else {})
        reply.content[keys.WORK] = ConfigRecord(work)

    return rewriting(change)


class Ended(Exception):
    """The run takes too long."""


def steps_taken(claims, rounds=2, most=None):
    """Return the steps of all nodes in some rounds."""
    mods = [saying(claims)]
    grid = LocalGrid(
        app(1 + np.arange(NODES) / NODES, [JOB] * NODES, 0.05, mods=mods),
        named_fleet("paper-5", NODES),
    )
    strategy = FedSlice(fedavg())
    steps = []

    def arrived(update):
        (metrics,) = update.reply.content.metric_records.values()
        steps.append(metrics[keys.NUM_STEPS])
        if most is not None and sum(steps) > most:
            raise Ended

    strategy.rule.arrived = arrived
    models(strategy, grid, rounds)
    return sum(steps)


LIES = [
    {keys.PASSES: 1000, keys.JOB_STEPS: 1},
    {keys.JOB_STEPS: 0},
    {keys.JOB_STEPS: 10**9},
]


def test_one_node_does_not_set_how_long_a_run_is():
    honest = steps_taken({})
    assert honest == pytest.approx(2 * NODES * JOB, rel=0.1)
    for claims in LIES:
        assert 0.7 * honest < steps_taken(claims, most=1.4 * honest) < 1.4 * honest, claims


def test_jobs_of_nodes_that_are_gone_are_forgotten():
    grid = LocalGrid(
        app([1.0] * 8, [JOB] * 7 + [9 * JOB], 0.05, mods=[saying({})]), named_fleet("paper-5", 8)
    )
    strategy = FedSlice(fedavg())
    strategy.rule.node_limit = None
    wanted = []

    def leave(number, arrays):
        wanted.append(strategy.rule.round_facts.get("examples_wanted"))
        if number == 2:
            grid.leave(1007)

    strategy.start(grid, models.__globals__["start"](0.0), 5, evaluate_fn=leave)
    assert wanted[2] == 16 * JOB
    assert wanted[5] == 7 * JOB


def test_what_is_believed_stays_to_the_last_bit():
    rng = np.random.default_rng(0)
    passes = np.full(50, 3)
    examples = rng.integers(90, 400, 50)
    claims = (passes, passes * -(-examples // 32), passes * examples)
    np.testing.assert_array_equal(believed_jobs(*claims), claims)


def test_of_the_first_few_the_most_modest_counts():
    passes, steps, examples = believed_jobs([1, 9, 9], [4, 1, 1], [32, 288, 288], early=True)
    assert passes.tolist() == [1, 4, 4]
    assert (examples / steps).max() <= 4 * 8
