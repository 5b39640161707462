"""Replies made to end a run, or to ruin its model, in every wrapper: each costs itself."""

import numpy as np
import pytest
from attacker import NESTS, attack, leaf, names_of, reasons, trained
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from flwr_hetero import keys

LIAR = 4


def renamed(message, reply):
    """Put the model under another record name."""
    reply.content["x"] = reply.content.pop("arrays")


def number_and_group(message, reply):
    reply.content[keys.SAMPLER] = ConfigRecord({"x": 1.0, "x.y": 1.0, "coverage.z": 2.0})


def another_source(message, reply):
    metadata = reply.metadata
    metadata.__dict__["_src_node_id"] = 1001
    return Message(reply.content, metadata=metadata)


def filled(value, dtype):
    """Send a model full of one value."""

    def lie(message, reply):
        values = np.full(message.content["arrays"]["w"].shape, value, dtype)
        reply.content["arrays"] = ArrayRecord({"w": Array(values)})

    return lie


LARGE = "times"
ATTACKS = {
    "model under another name": (renamed, "other names"),
    "a number and a group of one name": (number_and_group, None),
    "another source": (another_source, "another node as its source"),
    "int64 of 2**62": (filled(2**62, np.int64), "holds values above"),
    "float32 of 9e14": (filled(9e14, np.float32), LARGE),
    "float16 of 6e4": (filled(6e4, np.float16), LARGE),
}
"""What a node does, and what the history says of it; None: nothing, it does no harm."""


def check(nest, strategy, lie, reason):
    records, models = attack(strategy, {LIAR: trained(lie)})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert np.abs(models).max() < 20, models  # the goals are 1 to 8.5
    assert models[-1].any()
    for record in records:
        failed = {failure["node"] for failure in record["failures"]}
        assert failed <= names_of(LIAR), record["failures"]
    found = reasons(records, LIAR)
    assert all(reason in text for text in found) if reason else not found, found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("nest", NESTS)
def test_a_reply_costs_itself(nest, name):
    check(nest, NESTS[nest](leaf()), *ATTACKS[name])


@pytest.mark.parametrize("inner", ["FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan"])
@pytest.mark.parametrize("nest", ["none", "TiFL", "OverSelect", "everything", "merged"])
def test_model_under_another_name_in_a_robust_rule(nest, inner):
    records, models = attack(NESTS[nest](leaf(inner)), {LIAR: trained(renamed)})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert reasons(records, LIAR)


@pytest.mark.parametrize("nest", ["none", "TiFL", "merged"])
def test_a_metric_that_ruins_a_rule_leaves_the_model(nest):
    """QFedAvg weights by the losses that nodes report: its model of such a round is not used."""

    def lie(message, reply):
        reply.content["metrics"]["train-loss"] = float("nan")

    records, models = attack(NESTS[nest](leaf("QFedAvg")), {LIAR: trained(lie, range(2, 3))})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert models[-1].any()
