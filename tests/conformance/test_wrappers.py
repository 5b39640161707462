"""Every wrapper in every other, around every strategy: it works, or it is refused at once."""

import gc
import json
import logging
import os
import random
from collections import deque
from itertools import product

import numpy as np
import pytest
from composition_toy import USUAL_STEPS, composition_app, local_model, num_examples
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from flwr_hetero import strategy
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import (
    AdaComm,
    BiasedLocalSGD,
    CDGraB,
    FedNova,
    HerdingMeter,
    LocalSteps,
    OverSelect,
    RandomSelection,
    Recorded,
    Resharding,
    SamplerFacts,
    TiFL,
)

FLEET = [DeviceProfile(speed, jitter=0.1) for speed in (1, 1.1, 1.2, 4, 4.1, 4.2)]
STEPS = {"fast_steps": 6, "min_steps": 2}
WRAPPERS = {
    "TiFL": lambda inner=None: TiFL(inner, 3, 2, sync_rounds=1, warmup_rounds=0, interval=2),
    "BiasedLocalSGD": lambda inner=None: BiasedLocalSGD(inner, **STEPS),
    "LocalSteps": lambda inner=None: LocalSteps(inner, **STEPS),
    "FedNova": lambda inner=None: FedNova(inner, **STEPS),
    "AdaComm": lambda inner=None: AdaComm(inner, 6, interval_s=0.0),
    "CDGraB": lambda inner=None: CDGraB(inner, sketch_size=2),
    "HerdingMeter": lambda inner=None: HerdingMeter(inner, sketch_size=2),
    "Resharding": lambda inner=None: Resharding(inner, share=0.5, budget_bytes=16),
    "SamplerFacts": lambda inner=None: SamplerFacts(inner),
    "OverSelect": lambda inner=None: OverSelect(inner, take=2),
    "RandomSelection": lambda inner=None: RandomSelection(inner, 3),
    "Recorded": lambda inner=None: Recorded(inner, run_dir=Folder()),
}
ONLY_WRAP = {"CDGraB", "HerdingMeter", "Resharding", "SamplerFacts", "Recorded"}
INFO = {  # what the history must hold of a wrapper, in some round
    "TiFL": ("tifl", lambda f: f["tier"] in (0, 1) and len(f["tier_probs"]) == 2),
    "BiasedLocalSGD": ("biased-local-sgd", lambda f: max(f["num-steps"].values()) == 6),
    "LocalSteps": ("local-steps", lambda f: max(f["num-steps"].values()) == 6),
    "FedNova": ("fednova", lambda f: max(f["num-steps"].values()) == 6),
    "AdaComm": ("adacomm", lambda f: f["num_steps"] < 6),
    "CDGraB": ("cd-grab", lambda f: f["pairs"] > 0 and f["bytes-up"] > 0),
    "HerdingMeter": ("herding", lambda f: f["herding-bound"] > 0),
    "Resharding": ("resharding", lambda f: f["swaps"] > 0),
    "SamplerFacts": ("sampler", lambda f: f["coverage"] == 0.5),
    "OverSelect": ("over-select", lambda f: len(f["not_waited_for"]) > 0),
    "RandomSelection": ("selected", lambda nodes: len(nodes) in (2, 3)),
    "Recorded": ("virtual_s", lambda seconds: seconds > 0),
}
STRATEGIES = {
    "FedAvg": flower.FedAvg,
    "FedAdagrad": flower.FedAdagrad,
    "FedAdam": flower.FedAdam,
    "FedYogi": flower.FedYogi,
    "FedAvgM": lambda **own: flower.FedAvgM(server_momentum=0.9, **own),
    "FedProx": lambda **own: flower.FedProx(proximal_mu=0.1, **own),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": flower.FedTrimmedAvg,
    "Krum": flower.Krum,
    "MultiKrum": lambda **own: flower.MultiKrum(num_nodes_to_select=2, **own),
    "Bulyan": flower.Bulyan,
    "QFedAvg": lambda **own: flower.QFedAvg(0.1, train_loss_key="train-loss", **own),
}
SELECTS = ("TiFL", "RandomSelection")
SETS_STEPS = ("BiasedLocalSGD", "LocalSteps", "FedNova", "AdaComm")


def why_illegal(outer, inner):
    """Say what the refusal must say; None for a pair that must work."""
    if outer == inner != "Recorded":
        return f"strategy must leave .* to {outer}, got '{inner}': use one of the two"
    if inner == "Recorded":
        return "be Recorded, whose place is outside" if outer != inner else "leave the record to"
    if outer in SETS_STEPS and inner in SETS_STEPS:
        return f"strategy must leave steps to {outer}, got '{inner}'"
    if outer in SELECTS and inner in SELECTS:
        return f"strategy must leave selection to {outer}, got '{inner}'"
    if inner == "OverSelect" and outer in (*SELECTS, "Resharding"):
        return rf"OverSelect, whose place is outside .*: write OverSelect\({outer}"
    return None


PAIRS = list(product(WRAPPERS, repeat=2))
LEGAL = [pair for pair in PAIRS if why_illegal(*pair) is None]


class Folder:
    """The least that Recorded needs of a run directory, in memory but for the checkpoint."""

    checkpoint_dir = None

    def __init__(self, path=None):
        self.checkpoint_dir, self.records = path or self.checkpoint_dir, []

    def append_round(self, record):
        self.records.append(json.loads(json.dumps(record)))

    def cut_after(self, last_round):
        assert [r["round"] for r in self.records] == list(range(last_round + 1))

    def save_model(self, arrays):
        pass

    def finish(self):
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # Flower's QFedAvg and Bulyan: once per reply
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def make(names, leaf):
    for name in reversed(names):
        leaf = WRAPPERS[name](leaf)
    return leaf


def start():
    return ArrayRecord({"w": Array(np.zeros(3, np.float32))})


def go(names, folder, grid, stop_after=None, **recorded):
    """Run three rounds in a Recorded; return the models and the wrappers' states."""
    models = []
    inner = make([name for name in names if name != "Recorded"], flower.FedAvg())
    whole = Recorded(inner, run_dir=folder, **recorded)

    def watch(server_round, arrays):
        models.append(arrays["w"].numpy())
        if server_round == stop_after:
            whole.session.stop_reason = "the test stops it here"

    random.seed(3)
    whole.start(grid, start(), 3, evaluate_fn=watch)
    return models, [wrapper.state_dict() for wrapper in whole.wrappers()]


def expected(model, record):
    """Foretell the next model from what a line of the history says of nodes and steps."""
    nodes = sorted(record["latency"])
    own = [record[key] for key in ("biased-local-sgd", "local-steps", "fednova") if key in record]
    usual = record.get("adacomm", {}).get("num_steps", USUAL_STEPS)
    steps = np.array([own[0]["num-steps"][n] if own else usual for n in nodes], float)
    parts = [int(node.removeprefix("node-")) for node in nodes]
    locals_ = np.array([local_model(model, p, int(s)) for p, s in zip(parts, steps, strict=True)])
    weights = np.array([num_examples(p) for p in parts], float)
    if "biased-local-sgd" in record:
        weights = steps
    weights /= weights.sum()
    scale = weights @ steps / steps if "fednova" in record else np.ones(len(nodes))
    return model + (weights * scale) @ (locals_ - model)


def timeless(records):
    """Drop wall time and what is sent again after a resume, and name nodes alike.

    A node that has not answered, or not since the resume, has no better name than its id.
    """
    for record in records:
        record["wall_s"] = record["bytes_down"] = record["bytes_up"] = 0
        record.get("cd-grab", {}).update({"bytes-down": 0})
        record.get("resharding", {}).update({"delivered_bytes": 0})
    return json.loads(json.dumps(records).replace("id-100", "node-"))


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_pair(outer, inner, tmp_path):
    if reason := why_illegal(outer, inner):
        with pytest.raises(ValueError, match=reason):
            WRAPPERS[outer](WRAPPERS[inner](flower.FedAvg()))
    else:
        outcome = whole_run((outer, inner), tmp_path / "whole")
        if outer < inner or (inner, outer) not in LEGAL:  # once for two orders of the same
            stop_save_load_continue((outer, inner), tmp_path / "broken", *outcome)


FOUR = deque(["TiFL", "BiasedLocalSGD", "CDGraB", "HerdingMeter"])


@pytest.mark.parametrize("shift", range(4))
def test_four_wrappers(shift, tmp_path):
    names = FOUR.copy()
    names.rotate(shift)
    outcome = whole_run(names, tmp_path / "whole")
    stop_save_load_continue(names, tmp_path / "broken", *outcome)


def whole_run(names, path):
    """Find all wrappers in the history, and the model where their information puts it."""
    path.mkdir()
    folder = Folder(path)
    models, states = go(names, folder, LocalGrid(composition_app(), FLEET))
    for name in names:
        key, says = INFO[name]
        assert any(says(r[key]) for r in folder.records[1:] if r.get(key)), (name, folder.records)
    for before, after, record in zip(models, models[1:], folder.records[1:], strict=False):
        assert after == pytest.approx(expected(before, record), rel=1e-5)
        assert record["failures"] == []
    return models, states, folder.records


def stop_save_load_continue(names, path, models, states, records):
    path.mkdir()
    folder, grid = Folder(path), LocalGrid(composition_app(), FLEET)
    go(names, folder, grid, stop_after=1)
    rest, own_states = go(names, folder, grid, resume=True)
    assert np.array_equal(rest[-1], models[-1])
    for mine, theirs in zip(own_states, states, strict=True):
        for key in theirs.keys() | mine.keys():
            if not key.endswith("/lost"):  # whole orders are sent after a resume
                np.testing.assert_equal(mine[key], theirs[key], err_msg=key)
    assert timeless(folder.records) == timeless(records)


@pytest.mark.parametrize("name", STRATEGIES)
def test_around_every_strategy(name, tmp_path, monkeypatch):
    """Each wrapper alone, and every twelfth pair."""
    monkeypatch.setattr(Folder, "checkpoint_dir", tmp_path)
    first = list(STRATEGIES).index(name)

    def final(names):
        random.seed(3)
        strategy = make(names, STRATEGIES[name](fraction_evaluate=0.0))
        return strategy.start(LocalGrid(app, FLEET[1:5]), start(), 2).arrays["w"].numpy()

    app, alone = composition_app(), None
    for names in [(), *((wrapper,) for wrapper in WRAPPERS), *LEGAL[first :: len(STRATEGIES)]]:
        model = final(names)
        assert np.isfinite(model).all(), names
        if ONLY_WRAP.issuperset(names):
            alone = model if alone is None else alone
            assert model == pytest.approx(alone, rel=1e-6), names
        if not {*SELECTS, "OverSelect"}.intersection(names):  # two replies are too few for Bulyan
            assert model.any(), names


SHARED = {"shared_samples": 100}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: TiFL(LocalSteps(TiFL())), "leave selection to TiFL, got 'TiFL'"),
        (lambda: AdaComm(TiFL(FedNova())), "leave steps to AdaComm, got 'FedNova'"),
        (lambda: LocalSteps(CDGraB(mode="exact")), "leave steps to LocalSteps, got 'CDGraB'"),
        (lambda: CDGraB(AdaComm(), mode="exact"), "leave steps to CDGraB, got 'AdaComm'"),
        (lambda: BiasedLocalSGD(CDGraB(), **SHARED), "leave orders to BiasedLocalSGD"),
        (lambda: Resharding(BiasedLocalSGD(**SHARED)), "leave samples to Resharding"),
        (lambda: TiFL(CDGraB(OverSelect())), "be OverSelect, whose place is outside .*selection"),
        (lambda: TiFL(flower.FedXgbCyclic()), "derive from FedAvg and leave the choice of nodes"),
        (lambda: CDGraB(flower.FedXgbBagging()), "train by gradient steps inside CDGraB"),
        (lambda: TiFL(flower.FedAvg(fraction_train=0.5)), "FedAvg.fraction_train must be 1.0"),
        (lambda: TiFL(flower.Krum(min_train_nodes=9)), "Krum.min_train_nodes must be at most"),
    ],
)
def test_other_compositions_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_table_has_every_wrapper():
    assert set(WRAPPERS) == set(INFO) == set(strategy.__all__) - {"Selection", "Wrapper"}
    decisions = [WRAPPERS[name]().decides for name in WRAPPERS]
    assert all(decisions)  # or a wrapper could be there twice


def test_refused_wrapper_can_be_used_elsewhere():
    inner = OverSelect()
    with pytest.raises(ValueError, match="whose place is outside"):
        TiFL(inner)
    assert Recorded(inner, run_dir=Folder()).inner is inner
