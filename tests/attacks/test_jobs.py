"""Lies about a node's job in FedAvg: what a round of FedSlice takes of them."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from quadratics import app, fedavg, models
from toy import rewriting

from flwr_hetero import keys
from flwr_hetero.fleet import LocalGrid, named_fleet
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


LIES = [{keys.PASSES: 1000, keys.JOB_STEPS: 1}, {keys.JOB_STEPS: 0}, {keys.JOB_STEPS: 10**9}]


def test_one_node_does_not_set_how_long_a_run_is():
    honest = steps_taken({})
    assert honest == pytest.approx(2 * NODES * JOB, rel=0.1)
    for claims in LIES:
        assert 0.7 * honest < steps_taken(claims, most=1.4 * honest) < 1.4 * honest, claims
