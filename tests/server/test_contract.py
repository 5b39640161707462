"""What a wrapper needs of the nodes: found out in the first round, without a node ending a run."""

import textwrap

import numpy as np
import pytest
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import History

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mercury.strategy import SAMPLES
from flwr_hetero.server.contract import MissingHelpError
from flwr_hetero.strategy import (
    BiasedLocalSGD,
    CDGraB,
    FedNova,
    LocalSteps,
    OverSelect,
    RandomSelection,
    Resharding,
    TiFL,
    Wrapper,
)
from flwr_hetero_studies.rivals import AdaComm

NEEDS = [  # wrapper, what it needs, and a line that brings it
    (LocalSteps, "num-steps", "hetero.batches(loader, msg)"),
    (BiasedLocalSGD, "num-steps", "hetero.batches(loader, msg)"),
    (FedNova, "num-steps", "hetero.batches(loader, msg)"),
    (AdaComm, "num-steps", "hetero.batches(loader, msg)"),
    (AdaComm, "train-loss", '"train-loss": loss'),
    (CDGraB, keys.ORDER, "sampler=OrderedSampler, model=model)"),
    (Resharding, keys.RESHARDING, "shard.close(reply, context"),
]
STRICT = (CDGraB, Resharding)
IDS = [f"{kind.__name__}-{key}" for kind, key, _ in NEEDS]


def without(key, partitions, first_rounds=99):
    """Make a mod that takes a record or a metric out of some nodes' replies."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        number = message.content["config"].get(keys.SERVER_ROUND, 0)
        if context.node_config["partition-id"] in partitions and number <= first_rounds:
            reply.content.pop(key, None)
            for metrics in reply.content.metric_records.values():
                metrics.pop(key, None)
        return reply

    return mod


def model():
    return ArrayRecord({"w": Array(np.zeros(3, np.float32))})


def run(strategy, mods=(), nodes=5, num_rounds=2):
    history = History(strategy)
    history.start(LocalGrid(composition_app(mods), [DeviceProfile()] * nodes), model(), num_rounds)
    return history.records


@pytest.mark.parametrize(("kind", "key", "line"), NEEDS, ids=IDS)
def test_without_any_help_the_run_stops(kind, key, line):
    with pytest.raises(MissingHelpError) as stop:
        run(kind(), [without(key, range(5))])
    text = str(stop.value)
    assert text.startswith(f"{kind.__name__}: no node reports {key!r} (")
    assert line in text
    way_out = "leave out" if kind in STRICT else 'pass on_missing="warn" to'
    assert text.endswith(f"or {way_out} {kind.__name__}.")


@pytest.mark.parametrize(("kind", "key", "line"), [n for n in NEEDS if n[0] not in STRICT])
def test_without_any_help_it_may_go_on(kind, key, line, caplog):
    assert len(run(kind(on_missing="warn"), [without(key, range(5))])) == 3
    assert caplog.text.count(f"{kind.__name__}: no node reports {key!r}") == 1
    assert caplog.text.count(line) == 1


METRICS_OF_ALL = "train-loss"
"""Replies with fewer of the app's own metrics than the others are dropped anyway."""
SOME_HELP = [need for need in NEEDS if need[1] != METRICS_OF_ALL]


@pytest.mark.parametrize(("kind", "key", "line"), SOME_HELP)
def test_nodes_that_do_not_help_are_named(kind, key, line, caplog):
    records = run(kind(), [without(key, {1, 3})])
    assert f"{kind.__name__}: no {key!r} (" in caplog.text
    assert "from 2 of 5 nodes" in caplog.text
    assert ": node-1, node-3. Lines for the node:\n" in caplog.text
    assert caplog.text.count(line) == 1
    assert [record["failures"] for record in records] == [[]] * 3
    assert sorted(records[2]["weights"]) == [f"node-{i}" for i in range(5)]


@pytest.mark.parametrize("kind", [LocalSteps, CDGraB])
@pytest.mark.parametrize("hostile", [{0}, {0, 1}])
def test_two_nodes_never_end_a_run(kind, hostile, caplog):
    key = kind.contracts[0].key

    class First(Wrapper):
        """Ask the hostile nodes alone, then all."""

        def on_instructions(self, context, messages, grid):
            count = len(hostile) if context.round < 4 else 5
            return sorted(messages, key=lambda m: m.metadata.dst_node_id)[:count]

    records = run(First(kind()), [without(key, hostile)], num_rounds=4)
    assert [len(record["weights"]) for record in records[1:]] == [len(hostile)] * 3 + [5]
    assert f"from {len(hostile)} of 5 nodes" in caplog.text


def test_three_nodes_over_two_rounds_are_enough(caplog):
    strategy = RandomSelection(LocalSteps(), clients_per_round=2)
    with pytest.raises(MissingHelpError, match="no node reports 'num-steps'"):
        run(strategy, [without(keys.NUM_STEPS, range(5))], num_rounds=3)
    assert "[ROUND 2/3]" in caplog.text


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_small_fleet_needs_no_third_node(nodes):
    strategy = CDGraB(FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1))
    with pytest.raises(MissingHelpError):
        run(strategy, [without(keys.ORDER, range(5))], nodes, num_rounds=1)


def test_exact_orders_need_single_steps():
    with pytest.raises(MissingHelpError, match="CDGraB: no node reports 'num-steps'"):
        run(CDGraB(mode="exact"), [without(keys.NUM_STEPS, range(5))])


@pytest.mark.parametrize("kind", [cls for cls, *_ in NEEDS if cls not in STRICT])
def test_on_missing_is_checked(kind):
    with pytest.raises(ValueError, match=r"^on_missing must be one of raise, warn"):
        kind(on_missing="stop")


# --- replies that none of the strategies can use -----------------------------------------------

OUTER = {
    "TiFL": lambda: TiFL(clients_per_round=3, num_tiers=1),
    "BiasedLocalSGD": lambda: BiasedLocalSGD(fast_steps=4),
    "OverSelect": lambda: OverSelect(take=3),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_run_without_weights_stops_in_the_first_round(name, caplog):
    reason = "all for the same reason: metric 'num-examples' is None instead of a number"
    with pytest.raises(RuntimeError, match=reason):
        run(OUTER[name](), [without("num-examples", range(5))])
    assert "[ROUND 2/2]" not in caplog.text


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("hostile", [{0}, {0, 4}])
def test_two_nodes_without_weights_cost_their_replies(name, hostile):
    records = run(OUTER[name](), [without("num-examples", hostile)], num_rounds=6)
    assert any(record["weights"] for record in records)
    bad = {f"node-{i}" for i in hostile}
    assert not any(bad.intersection(record["weights"]) for record in records)


def evaluates_without_weights(partitions):
    def mod(message, context, call_next):
        reply = call_next(message, context)
        if "arrays" not in reply.content and context.node_config["partition-id"] in partitions:
            next(iter(reply.content.metric_records.values())).pop("num-examples", None)
        return reply

    return mod


@pytest.mark.parametrize("name", ["BiasedLocalSGD", "OverSelect"])
def test_an_evaluation_without_weights_stops_the_run(name, caplog):
    reason = "no reply to evaluation counts, all for the same reason: metric 'num-examples' is None"
    with pytest.raises(RuntimeError, match=reason):
        run(OUTER[name](), [evaluates_without_weights(range(5))])
    assert "[ROUND 2/2]" not in caplog.text


def test_two_nodes_that_do_not_evaluate_cost_their_replies():
    records = run(Wrapper(), [evaluates_without_weights({0, 4})], num_rounds=3)
    assert all(record["evaluate"] for record in records[1:])


def test_two_hostile_nodes_asked_alone_do_not_end_a_run():
    class Two(Wrapper):
        def on_instructions(self, context, messages, grid):
            return sorted(messages, key=lambda m: m.metadata.dst_node_id)[:2]

    records = run(Two(), [without("num-examples", {0, 1})], num_rounds=4)
    assert [record["weights"] for record in records] == [{}] * 5


def test_a_hostile_node_does_not_hide_the_reason():
    def lie(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0 and "arrays" in reply.content:
            del reply.content["arrays"]
        return reply

    reason = (
        r"counts, 4 of 5 for the same reason: metric 'num-examples' is None .* \(id-1001, id-1002, "
    )
    with pytest.raises(RuntimeError, match=reason):
        run(Wrapper(), [lie, without("num-examples", range(5))])


# --- the lines -------------------------------------------------------------------------------


def test_the_lines_for_samples_work():
    app, held = ClientApp(), {}

    @app.train()
    def train(msg, context):
        node = int(context.node_config["partition-id"])
        own = {
            "inputs": np.full((4, 2), node, np.float32),
            "targets": np.full(4, node),
            "num_classes": 3,
            "choose": lambda count, by_importance: np.arange(count),
        }
        metrics = MetricRecord({"num-examples": 4})
        content = RecordDict({"arrays": msg.content["arrays"], "metrics": metrics})
        own |= {"msg": msg, "context": context, "reply": Message(content, reply_to=msg)}
        exec(textwrap.dedent(SAMPLES.lines), own)
        held[node] = own["targets"].tolist()
        return own["reply"]

    strategy = Resharding(FedAvg(fraction_evaluate=0.0), share=0.5)
    strategy.start(LocalGrid(app, [DeviceProfile()] * 3), model(), num_rounds=3)
    targets = sorted(target for own in held.values() for target in own)
    assert targets == [0] * 4 + [1] * 4 + [2] * 4
    assert any(set(own) != {node} for node, own in held.items())
