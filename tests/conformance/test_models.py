"""Boosted trees and scikit-learn in every wrapper, as the table of docs/models.md says."""

import json
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from attacker import recorded
from composition_toy import SAMPLE_BYTES, swap
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from recording import Folder, History

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.server.client_support import MissingClientSupportError
from flwr_hetero_studies import rivals

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LINES = re.findall(r"^\| (`.+?`) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
ROWS = [(name, cells) for names, cells in LINES for name in re.findall(r"`(\w+)`", names)]
KINDS = ["FedXgbBagging", "FedXgbCyclic", "scikit-learn"]
CELLS = [
    (wrapper, kind, cell.strip())
    for wrapper, cells in ROWS
    for kind, cell in zip(KINDS, cells.split("|"), strict=True)
]
REASONS = {
    "one node at a time": r"leave the choice of nodes open|ask several nodes at once",
    "no mean": r"updates of trees cannot be added to a newer model|trees have no mean",
    "no steps": r"train by gradient steps inside",
}
NEEDS = {"`num-steps`": "num-steps", "`train-loss`": "train-loss", "samples": keys.RESHARDING}
WRAPPERS = {
    "TiFL": lambda inner: ours.TiFL(inner, 2, 2),
    "FedAT": lambda inner: rivals.FedAT(inner, 2, 2),
    "RandomSelection": lambda inner: ours.RandomSelection(inner, 3),
    "RescaledASGD": lambda inner: rivals.RescaledASGD(inner),
    "RingleaderASGD": lambda inner: rivals.RingleaderASGD(inner),
    "WithoutSlowest": lambda inner: rivals.WithoutSlowest(inner, 3),
    "Oort": lambda inner: rivals.Oort(inner, 3),
    "PowerOfChoice": lambda inner: rivals.PowerOfChoice(inner, 2, 3),
    "DeadlineSelection": lambda inner: rivals.DeadlineSelection(inner, 3),
    "Resharding": lambda inner: ours.Resharding(inner, share=0.5, budget_bytes=SAMPLE_BYTES),
    "Recorded": recorded,
}
NODES = 4
NOT_ON_THE_PAGE = {"Selection", "Wrapper", "FedNova", "OverSelect"}
"""Base classes, and two rivals that would have the rows of LocalSteps and RandomSelection."""
ALL = {name: getattr(face, name) for face in (ours, rivals) for name in face.__all__}


def answer(message, content, metrics):
    metrics |= {"num-examples": 20}
    return Message(RecordDict({**content, "metrics": MetricRecord(metrics)}), reply_to=message)


def make_app(train, helps, mods=()) -> ClientApp:
    app = ClientApp(mods=[*mods, timing])

    @app.train()
    def fit(message, context):
        reply = train(message, int(context.node_config["partition-id"]), helps)
        if helps:
            swap(message, context, reply)
        return reply

    @app.evaluate()
    def evaluate(message, context):
        return answer(message, {}, {"eval-acc": 0.5})

    return app


def in_bytes(text) -> ArrayRecord:
    """Make an array of a text, as models of XGBoost travel."""
    return ArrayRecord([np.frombuffer(text.encode(), np.uint8)])


def forest(trees, /, **changes) -> ArrayRecord:
    """Make a model as XGBoost writes it, as far as Flower reads it; changes spoil it."""
    model = {
        "gbtree_model_param": {"num_trees": str(len(trees)), "num_parallel_tree": "1"},
        "iteration_indptr": list(range(len(trees) + 1)),
        "trees": trees,
        "tree_info": [0] * len(trees),
    }
    return in_bytes(json.dumps({"learner": {"gradient_booster": {"model": model | changes}}}))


def trees_of(arrays) -> list[dict]:
    """Read the trees of a model; none of the empty one that a run begins with."""
    whole = arrays["0"].numpy().tobytes()
    return json.loads(whole)["learner"]["gradient_booster"]["model"]["trees"] if whole else []


def grow(keep):
    """Make a ``train`` that grows a tree; ``keep``: with those that were there."""

    def train(message, partition, helps):
        before = trees_of(message.content["arrays"]) if keep else []
        arrays = forest([*before, {"id": len(before), "grown-by": partition}])
        return answer(message, {"arrays": arrays}, {"train-loss": 1.0} if helps else {})

    return train


BAD = {
    "no model": in_bytes("garbage"),
    "empty": in_bytes(""),
    "two": ArrayRecord([np.zeros(3, np.uint8)] * 2),
    "another name": ArrayRecord({"w": forest([{}])["0"]}),
}
BAD_JSON = {
    "no booster": in_bytes("{}"),
    "fewer trees": forest([{"id": 0}], trees=[]),
    "no rounds": forest([{"id": 0}], iteration_indptr=[]),
}


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *(pytest.param("FedXgbBagging", bad, id=name) for name, bad in (BAD | BAD_JSON).items()),
        *(pytest.param("FedXgbCyclic", bad, id=f"{name}, cyclic") for name, bad in BAD.items()),
    ],
)
def test_what_is_no_forest_costs_the_reply(kind, bad):
    def lie(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 1 and "arrays" in reply.content:
            reply.content["arrays"] = bad
        return reply

    train, strategy = APPS[kind]
    app = make_app(train, helps=False, mods=[lie])
    grid = LocalGrid(app, [DeviceProfile()] * NODES)
    result = History(strategy()).start(grid, in_bytes(""), num_rounds=4)
    grown_by = [tree["grown-by"] for tree in trees_of(result.arrays)]
    assert set(grown_by) == {0, 2, 3}


def fit(message, partition, helps):
    """Continue a logistic regression on a node's own data."""
    # imported here, as collecting tests need not wait for it
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(partition)
    inputs = rng.standard_normal((20, 3))
    targets = np.arange(20) % 2
    inputs[:, 0] += targets + partition
    steps = int(message.content["config"].get(keys.NUM_STEPS, 1)) if helps else 1
    model = LogisticRegression(max_iter=steps, warm_start=True)
    model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
    model.classes_ = np.arange(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(inputs, targets)
    loss = float(np.mean(model.predict(inputs) != targets))
    own = {"train-loss": loss, "num-steps": int(model.n_iter_[0])} if helps else {}
    arrays = ArrayRecord([model.coef_, model.intercept_])
    return answer(message, {"arrays": arrays}, {"train-error": loss} | own)


APPS = {
    "FedXgbBagging": (grow(keep=False), flower.FedXgbBagging),
    "FedXgbCyclic": (grow(keep=True), flower.FedXgbCyclic),
    "scikit-learn": (fit, flower.FedAvg),
}


def run(wrapper, kind, helps):
    train, strategy = APPS[kind]
    beside = issubclass(ALL[wrapper], Rule)  # it evaluates beside the work
    evaluates = 0.0 if beside else 1.0
    empty = [np.zeros(0, np.uint8)]
    arrays = ArrayRecord([np.zeros((1, 3)), np.zeros(1)] if kind == "scikit-learn" else empty)
    make = WRAPPERS.get(wrapper, ALL[wrapper])
    whole = make(strategy(fraction_evaluate=evaluates))
    records = []
    end = whole.on_round_end
    whole.on_round_end = lambda run, record: records.append(record) or end(run, record)
    random.seed(0)
    speeds = (1, 1.1, 4, 4.1)
    grid = LocalGrid(make_app(train, helps), [DeviceProfile(speed) for speed in speeds])
    result = whole.start(grid, arrays, num_rounds=6 if beside else 3)
    assert not any(record["failures"] for record in records)
    return result, records[1:]


def check_model(kind, result, records):
    """See that all that was counted is in the model."""
    counted = [list(record["weights"]) for record in records]
    assert all(counted)
    if kind == "scikit-learn":
        assert [array.dtype for array in result.arrays.values()] == ["float64"] * 2
        assert np.abs(result.arrays.to_numpy_ndarrays()[0]).max() > 0.1
        assert len(records[0]["train"]) >= 1
    else:
        parts = [int(node.removeprefix("node-")) for nodes in counted for node in nodes]
        trees = trees_of(result.arrays)
        assert [tree["grown-by"] for tree in trees] == parts
        assert [tree["id"] for tree in trees] == list(range(len(parts)))


@pytest.mark.parametrize(("wrapper", "kind", "cell"), CELLS)
def test_the_table(wrapper, kind, cell, tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "checkpoint_dir", tmp_path)
    outcome, _, reason = cell.partition(": ")
    if outcome == "refused":
        with pytest.raises(ValueError, match=REASONS[reason]):
            WRAPPERS.get(wrapper, ALL[wrapper])(APPS[kind][1]())
    elif outcome == "stops":
        for helps in (True, False):
            with pytest.raises(MissingClientSupportError, match=f"{wrapper}: no node reports"):
                run(wrapper, kind, helps)
    else:
        check_model(kind, *run(wrapper, kind, helps=True))
        if outcome == "works":
            check_model(kind, *run(wrapper, kind, helps=False))
        else:
            told = f"{wrapper}: no node reports '{NEEDS[outcome.removeprefix('works with ')]}'"
            with pytest.raises(MissingClientSupportError, match=told):
                run(wrapper, kind, helps=False)


def test_the_table_is_whole():
    assert sorted(wrapper for wrapper, _ in ROWS) == sorted(set(ALL) - NOT_ON_THE_PAGE)
    assert len(CELLS) == len(KINDS) * len(ROWS)
    outcomes = {cell.partition(":")[0] for _, _, cell in CELLS}
    assert outcomes == {"works", "refused", "stops", *(f"works with {what}" for what in NEEDS)}
