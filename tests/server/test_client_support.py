"""What a wrapper needs of the nodes: found out in the first round, without a node ending a run."""

import sys
import textwrap
from functools import partial

import numpy as np
import pytest
from attacker import start
from composition_toy import composition_app
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import reply_with, rewriting

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.exchange.checks import NO_EVALUATION
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mercury.strategy import SAMPLES
from flwr_hetero.mod import hetero
from flwr_hetero.server.client_support import STEP_LINES, MissingClientSupportError, step_lines
from flwr_hetero_studies.rivals import AdaComm

NEEDS = [  # wrapper, what it needs, and a line that brings it
    (ours.LocalSteps, "num-steps", "hetero.batches(loader, msg)"),
    (ours.BiasedLocalSGD, "num-steps", "hetero.batches(loader, msg)"),
    (AdaComm, "num-steps", "hetero.batches(loader, msg)"),
    (AdaComm, "train-loss", '"train-loss": loss'),
    (ours.CDGraB, keys.ORDER, "sampler=OrderedSampler, model=model)"),
    (ours.Resharding, keys.RESHARDING, "shard.close(reply, context"),
]


@pytest.fixture(autouse=True)
def only_torch(monkeypatch):
    """Let other frameworks, which another test may have imported, be away."""
    for name in ("transformers", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def without(key, partitions, kind="train"):
    """Make a mod that takes a record or a metric out of some nodes' replies."""

    def take(partition, message, reply):
        if message.metadata.message_type == kind and partition in partitions:
            for record in (reply.content, *reply.content.metric_records.values()):
                record.pop(key, None)

    return rewriting(take)


def run(strategy, mods=(), nodes=5, num_rounds=2):
    history = History(strategy)
    history.start(LocalGrid(composition_app(mods), [DeviceProfile()] * nodes), start(), num_rounds)
    return history.records


class First(ours.Wrapper):
    """Ask so many nodes in some rounds, and all in others."""

    def __init__(self, strategy, count, rounds):
        super().__init__(strategy)
        self.count = count
        self.rounds = rounds

    def on_instructions(self, context, messages, grid):
        asked = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        return asked[: self.count] if context.round in self.rounds else asked


@pytest.mark.parametrize(("kind", "key", "line"), NEEDS)
def test_without_any_support_the_run_stops(kind, key, line):
    with pytest.raises(MissingClientSupportError) as stop:
        run(kind(), [without(key, range(5))])
    assert str(stop.value).startswith(f"{kind.__name__}: no node reports {key!r} (")
    assert line in str(stop.value)


# replies with fewer of the app's own metrics than the others are dropped anyway
@pytest.mark.parametrize(("kind", "key", "line"), [n for n in NEEDS if n[1] != "train-loss"])
def test_nodes_without_support_are_named(kind, key, line, caplog):
    records = run(kind(), [without(key, {1, 3})])
    assert f"{kind.__name__}: no {key!r} (" in caplog.text
    assert "from 2 of 5 nodes" in caplog.text
    assert ": node-1, node-3. Lines for the node:\n" in caplog.text
    assert caplog.text.count(line) == 1
    assert [record["failures"] for record in records] == [[]] * 3
    assert sorted(records[2]["weights"]) == [f"node-{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("kind", "key"), [(ours.LocalSteps, "num-steps"), (ours.CDGraB, keys.ORDER)]
)
@pytest.mark.parametrize("count", [1, 2])
def test_two_nodes_never_end_a_run(kind, key, count, caplog):
    records = run(First(kind(), count, range(4)), [without(key, range(count))], num_rounds=4)
    assert [len(record["weights"]) for record in records[1:]] == [count] * 3 + [5]
    assert f"from {count} of 5 nodes" in caplog.text


@pytest.mark.parametrize("strays", [range(3), range(12)])
def test_who_answers_first_does_not_tell_for_all(strays):
    """Without rounds, three of twelve nodes that are at once through with nothing."""

    app = composition_app([without("num-steps", strays)])
    profiles = [DeviceProfile(2.0 if i < 3 else 1.0) for i in range(12)]
    strategy = ours.FedBuff(ours.LocalSteps(budget="deadline", fast_steps=4), buffer_size=3)
    begin = partial(strategy.start, LocalGrid(app, profiles), start(), 6)
    if len(strays) > 3:
        with pytest.raises(MissingClientSupportError, match="no node reports 'num-steps'"):
            begin()
    else:
        begin()


@pytest.mark.parametrize("last", [10, 100])
def test_three_nodes_of_many_end_no_run(last):
    """Though all that are asked fail for one reason; 20 such rounds in a row end it."""
    mods = [without("arrays", range(3))]
    strategy = First(FedAvg(fraction_evaluate=0.0), 3, range(2, last + 1))
    if last > 20:
        with pytest.raises(RuntimeError, match="no reply to training has counted in 20 rounds"):
            run(strategy, mods, 12, 30)
        return
    records = run(strategy, mods, 12, 12)
    assert [len(record["weights"]) for record in records[1:]] == [9, *[0] * 9, 9, 9]


OUTER = {
    "TiFL": lambda: ours.TiFL(clients_per_round=3, num_tiers=1),
    "BiasedLocalSGD": lambda: ours.BiasedLocalSGD(fast_steps=4),
}
STOPS = [*((name, "train") for name in OUTER), ("BiasedLocalSGD", "evaluate")]


@pytest.mark.parametrize(("name", "kind"), STOPS)
def test_a_run_without_weights_stops_in_the_first_round(name, kind, caplog):
    of = {"train": "training", "evaluate": "evaluation"}[kind]
    reason = f"no reply to {of} counts, all for the same reason: metric 'num-examples' is None"
    with pytest.raises(RuntimeError, match=reason):
        run(OUTER[name](), [without("num-examples", range(5), kind)])
    assert "[ROUND 2/2]" not in caplog.text


def test_a_hostile_node_does_not_hide_the_reason():
    mods = [without("arrays", {0}), without("num-examples", range(5))]
    reason = r"4 of 5 for the same reason: metric 'num-examples' is None .* \(id-1001, id-1002, "
    with pytest.raises(RuntimeError, match=reason):
        run(ours.Wrapper(), mods)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["torch", "transformers"], "hetero.batches(trainer.get_train_dataloader(), msg)"),
        (["torch", "lightning", "sklearn"], "max_epochs=1"),
        (["pytorch_lightning"], "max_epochs=1"),
        (["sklearn", "torch"], "loader = hetero.batches(loader, msg)"),
        (["sklearn"], "model.max_iter = hetero.num_steps("),
        ([], "for _ in range(hetero.num_steps("),
    ],
)
def test_lines_are_of_the_framework_at_hand(names, line, monkeypatch):
    for name in ("transformers", "lightning", "pytorch_lightning", "torch", "sklearn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in names:
        monkeypatch.setitem(sys.modules, name, object())
    assert line in step_lines()
    assert "app = ClientApp(mods=[hetero])" in step_lines()


def test_lines_for_scikit_learn_and_numpy_run():
    class Model:
        max_iter = 50

    LocalGrid(ClientApp(), [DeviceProfile()])
    msg = Message(RecordDict({"config": ConfigRecord({"num-steps": 3})}), 1, "train")
    known = {"hetero": hetero, "msg": msg, "model": Model(), "X": [0] * 9, "done": []}
    exec(textwrap.dedent(STEP_LINES["sklearn"]), known)
    assert known["model"].max_iter == 3
    exec(textwrap.dedent(STEP_LINES["numpy"]) + "\n    done.append(1)", known)
    assert len(known["done"]) == 3


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
        reply = reply_with(msg, {"num-examples": 4}, dict(msg.content["arrays"]))
        own |= {"msg": msg, "context": context, "reply": reply}
        exec(textwrap.dedent(SAMPLES.lines), own)
        held[node] = own["targets"].tolist()
        return own["reply"]

    strategy = ours.Resharding(FedAvg(fraction_evaluate=0.0), share=0.5)
    strategy.start(LocalGrid(app, [DeviceProfile()] * 3), start(), num_rounds=3)
    targets = sorted(target for own in held.values() for target in own)
    assert targets == [0] * 4 + [1] * 4 + [2] * 4
    assert any(set(own) != {node} for node, own in held.items())


# --- an app without a function for evaluation -------------------------------------------------
STRATEGIES = {
    "rounds": ours.Wrapper,
    "TiFL": lambda inner: ours.TiFL(inner, 3),
    "FedBuff": lambda inner: ours.FedBuff(inner, concurrency=3),
    "FedSlice": ours.FedSlice,
}


def run_lacking(make, lacking):
    """Run with some nodes that cannot evaluate; return the history and who was asked to."""
    asked = []

    def mod(message, context, call_next):
        if message.metadata.message_type != "evaluate":
            return call_next(message, context)
        asked.append(int(context.node_config["partition-id"]))
        if asked[-1] not in lacking:
            return call_next(message, context)
        return Message(Error(2, f"ValueError: {NO_EVALUATION}"), reply_to=message)

    history = History(make(FedAvg()))
    grid = LocalGrid(composition_app([mod]), [DeviceProfile()] * 5)
    history.start(grid, start(), 6)
    return history.records, asked


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_an_app_without_evaluation_is_asked_once(make, caplog):
    records, asked = run_lacking(make, range(5))
    assert len(records) == 7
    assert asked, "else nothing was tried"
    assert len(asked) == len(set(asked))
    assert not any(record["failures"] for record in records)
    said = [text for text in caplog.messages if "has no function for evaluation" in text]
    assert len(said) == 1


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_other_nodes_still_evaluate(make):
    records, asked = run_lacking(make, {0})
    assert asked.count(0) <= 1
    assert asked.count(1) > 1
    assert any(record["evaluate"] for record in records)


def test_the_text_is_that_of_flower():
    grid = LocalGrid(ClientApp(), [DeviceProfile()])
    (reply,) = grid.send_and_receive(
        [Message(RecordDict(), next(iter(grid.get_node_ids())), "evaluate")]
    )
    assert NO_EVALUATION in reply.error.reason
