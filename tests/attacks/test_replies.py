"""Replies made to end a run, or to ruin its model, in every wrapper: each costs itself."""

import json
from itertools import product

import numpy as np
import pytest
from attacker import BY_NIGHT, NESTS, LyingGrid, attack, leaf, names_of, reasons
from attacker import trained as in_training
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from flwr_hetero import keys

LIAR = 4
MUCH = 100_000
HUGE = "x" * MUCH
LONGEST_LINE = 20_000
"""Characters of a round's line with six nodes; an honest one has 3,000 at most."""
MOST = 20
"""Bound of an honest model, whose goals are 1 to 8.5."""


def renamed(message, reply):
    """Put the model under another record name."""
    reply.content["x"] = reply.content.pop("arrays")


def another_source(message, reply):
    reply.metadata.__dict__["_src_node_id"] = 1001
    return Message(reply.content, metadata=reply.metadata)


def another_partition(message, reply):
    """Claim another partition in each round."""
    number = int(message.content["config"].get("server-round", 0))
    reply.content[keys.TIMING][keys.PARTITION_ID] = number % 6


def one_more(name):
    return lambda _, reply: reply.content["arrays"].update({name: reply.content["arrays"]["w"]})


def written_by(kind):
    return lambda _, reply: setattr(reply.content["arrays"]["w"], "stype", kind)


def metric(name, value):
    def lie(message, reply):
        for record in reply.content.metric_records.values():
            record[name] = value

    return lie


def more(name, record):
    return lambda _, reply: reply.content.update({name: record})


def model(value, dtype, shape=None):
    """Send a model full of one value."""

    def lie(message, reply):
        values = np.full(shape or message.content["arrays"]["w"].shape, value, dtype)
        reply.content["arrays"] = ArrayRecord({"w": Array(values)})

    return lie


def backwards(message, reply):
    reply.content[keys.TIMING].update({keys.TRAIN_TIME: 5.0, keys.TRANSFER_TIME: -4.0})


def statistics(**entries):
    return more(keys.SAMPLER, ConfigRecord(entries))


ATTACKS = {
    "model under another name": (renamed, "other names"),
    "a number and a group of one name": (statistics(**{"x": 1.0, "x.y": 1.0}), None),
    "another source": (another_source, "another node as its source"),
    "int64 of 2**62": (model(2**62, np.int64), "holds values above"),
    "float32 of 9e14": (model(9e14, np.float32), "times"),
    "float16 of 6e4": (model(6e4, np.float16), "times"),
    # faults that bugs make as well
    "another shape": (model(0, np.float32, (3, 3)), "has shape (3, 3) instead of (3,)"),
    "complex numbers": (model(1j, np.complex64), "cannot be averaged"),
    "NaN": (model(np.nan, np.float32), "NaN or infinity"),
    "written by torch": (written_by("torch.tensor"), "is written as 'torch.tensor'"),
    "an array too many": (one_more("v"), "missing or unknown"),
    "two records of metrics": (more("x", MetricRecord({"n": 1})), "2 MetricRecords instead of 1"),
    "negative examples": (metric("num-examples", -100), "instead of a number of at least 0"),
    "no examples": (metric("num-examples", 0), None),
    # too much, or under changing names
    "a list as long as a model": (metric("train-loss", [0.5] * MUCH), "more than 20000 numbers"),
    "weights in a list": (metric("num-examples", [0.5] * 10_000), "instead of a number"),
    "a metric with a long name": (metric(HUGE, 1.0), "more characters than"),
    "a long name among statistics": (statistics(**{HUGE: 1.0, f"a.{HUGE}": 1.0}), None),
    "many names among statistics": (statistics(**{f"x{i}": 1.0 for i in range(5_000)}), None),
    "too many examples to add up": (metric("num-examples", 1e308), "instead of a number"),
    "a value whose square is infinite": (model(3e38, np.float32), "holds values above"),
    "the largest figure": (statistics(coverage=1.7e308, x=1.7e308), None),
    "a long text among statistics": (statistics(coverage=HUGE), None),
    "an array with a long name": (one_more(HUGE), "arrays ['xxx"),
    "an array of a kind with a long name": (written_by(HUGE), "is written as"),
    "a clock that runs backwards": (backwards, None),
    "another name in each round": (another_partition, None),
}
"""Lies, and what the history says of them; None: nothing, they do no harm."""


def case(nest, name):
    """Make a parameter: by day each attack meets one of the two large nests, in turn."""
    large = ("everything", "merged")
    is_early = nest == large[list(ATTACKS).index(name) % 2]
    return pytest.param(nest, name, marks=[] if is_early else pytest.mark.nightly)


@pytest.mark.parametrize(("nest", "name"), [case(*both) for both in product(NESTS, ATTACKS)])
def test_a_reply_costs_itself(nest, name):
    lie, reason = ATTACKS[name]
    records, models = attack(NESTS[nest](leaf()), {LIAR: in_training(lie)})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert 0 < np.abs(models[-1]).max() <= np.abs(models).max() < MOST, models
    for record in records:
        assert len(json.dumps(record)) < LONGEST_LINE
        assert {failure["node"] for failure in record["failures"]} <= names_of(LIAR)
    texts = reasons(records, LIAR)
    assert bool(texts) == bool(reason), texts
    assert all(reason in text for text in texts)


def test_the_first_to_say_how_long_vectors_are():
    def lie(message, reply):
        reply.content[keys.ORDER].update({keys.SKETCH_SIZE: 1, keys.VECTORS: bytes(8)})

    records, _ = attack(NESTS["CDGraB"](leaf()), {0: in_training(lie, range(1, 2))})
    assert [len(record["failures"]) for record in records] == [1, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), -1e308, [1.0] * 9])
@pytest.mark.parametrize("nest", BY_NIGHT)
def test_evaluation_of_two_liars(nest, value):
    """Each costs its evaluation at most; two of them may still spoil a mean of figures."""
    lies = dict.fromkeys((0, LIAR), metric("eval-acc", value))
    records, models = attack(NESTS[nest](leaf(fraction_evaluate=1.0)), lies)
    assert len(records) == 3
    assert all(line["train"] for line in records)
    assert all(len(json.dumps(line)) < LONGEST_LINE for line in records)
    assert all(0 <= p <= 1 for line in records for p in line.get("tifl", {}).get("tier_probs", []))
    assert 0 < np.abs(models[-1]).max() < MOST


@pytest.mark.parametrize("nest", ["LocalSteps", "everything", "merged"])
def test_steps_above_those_assigned_do_not_count(nest):
    lie = in_training(metric("num-steps", 10**6))
    records, models = attack(NESTS[nest](leaf()), {LIAR: lie})
    assert any("steps" in text for text in reasons(records, LIAR))
    assert np.abs(models).max() < MOST


@pytest.mark.parametrize("inner", ["FedMedian", "Krum", "Bulyan"])
@pytest.mark.parametrize("nest", ["none", "merged"])
def test_model_under_another_name_in_a_robust_rule(nest, inner):
    records, models = attack(NESTS[nest](leaf(inner)), {LIAR: in_training(renamed)})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert reasons(records, LIAR)


@pytest.mark.parametrize("nest", ["none", "TiFL", "merged"])
def test_a_metric_that_ruins_a_rule_leaves_the_model(nest):
    """QFedAvg weights by the losses that nodes report: its model of such a round is not used."""
    lie = in_training(metric("train-loss", float("nan")), range(2, 3))
    records, models = attack(NESTS[nest](leaf("QFedAvg")), {LIAR: lie})
    assert len(records) == 3
    assert np.isfinite(models).all()
    assert models[-1].any()


class Forger(LyingGrid):
    """Bring each reply twice, and with it some that nobody asked for."""

    def forged(self, replies):
        all_replies = []
        for reply in replies:
            all_replies += [reply, reply, Message(reply.content, reply_to=reply)]
            for node_id in (1001, 4711):
                other = Message(reply.content, reply_to=reply)
                other.metadata.__dict__["_src_node_id"] = node_id
                other.metadata.__dict__["_reply_to_message_id"] = "no such message"
                all_replies.append(other)
        return all_replies

    def wait_for(self, message_ids, timeout=None):
        return self.forged(super().wait_for(message_ids, timeout))

    def wait_for_next(self, message_ids, until_s=float("inf")):
        return self.forged(super().wait_for_next(message_ids, until_s))


@pytest.mark.parametrize("nest", BY_NIGHT)
def test_replies_that_nobody_asked_for(nest):
    forged, honest = (attack(NESTS[nest](leaf()), {}, grid=kind)[1] for kind in (Forger, LyingGrid))
    assert np.array_equal(forged, honest)
