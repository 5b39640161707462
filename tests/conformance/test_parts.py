"""Nodes return a part of the arrays: under every strategy that part is trained as if it was all."""

from functools import partial
from itertools import product

import pytest
from attacker import leaf
from composition_toy import composition_app
from conformance.test_wrappers import FLEET, WRAPPERS
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from parts_toy import changed, frozen_arrays, run, seen_by, whole_model
from recording import Folder, killed_and_resumed
from toy import FLOWER_STRATEGIES

from flwr_hetero import strategy as ours
from flwr_hetero.compression import wire
from flwr_hetero.fleet import LocalGrid

NAMES = [name for name in WRAPPERS if name != "Recorded"]


def alone():
    """The same model with what is trained and no more."""
    return ArrayRecord({"w": whole_model()["w"]})


def check(build, *, packs=False, exactly=True, kinds="fib"):
    """See that arrays which are not returned keep their value, and change nothing else."""
    sent = []
    first = whole_model(kinds)
    records, models = run(build(), arrays=first, mods=[seen_by(sent)], rounds=3)
    _, expected = run(build(), arrays=alone(), rounds=3)
    assert not any(record["failures"] for record in records)
    assert len(models) == len(expected) == 5
    for model, other in zip(models, expected, strict=True):
        assert list(model) == list(first)
        assert not changed(model)
        assert not exactly or model["w"].data == other["w"].data
    assert models[-1]["w"].numpy().any()
    assert {tuple(model) for model in sent} == {tuple(first)}
    whole = [model for model in sent if model["a.base"].stype not in wire.STYPES]
    assert not [model for model in whole if changed(model)]
    assert (len(whole) < len(sent)) == packs


@pytest.mark.parametrize("name", NAMES)
def test_part_in_every_strategy(name):
    check(lambda: WRAPPERS[name](flower.FedAvg()), packs=name == "Compressed")


AROUND_BY_DAY = ("FedAdam", "FedAvgM", "FedMedian", "Krum", "QFedAvg")
"""Strategies that each make the model in another way."""
AROUND = [
    pytest.param(name, outer, marks=[] if is_early else pytest.mark.nightly)
    for name, outer in product(FLOWER_STRATEGIES, ("Compressed", "FedBuff"))
    for is_early in [outer == "Compressed" and name in AROUND_BY_DAY]
]


@pytest.mark.parametrize(("name", "outer"), AROUND)
def test_part_around_every_strategy(name, outer):
    make = WRAPPERS[outer]
    kinds = "f" if name == "QFedAvg" else "fib"  # it cannot have integers
    check(lambda: make(FLOWER_STRATEGIES[name]()), packs=outer == "Compressed", kinds=kinds)


def test_part_with_noise_for_privacy():
    def build():
        noisy = flower.DifferentialPrivacyServerSideFixedClipping(leaf(), 0.1, 1.0, 6)
        return ours.ModelAverage(noisy)

    check(build, exactly=False, kinds="f")  # noise is drawn for all arrays


def recorded_run(name, folder, evaluate_fn, resume, rounds=4):
    inner = WRAPPERS[name](leaf(fraction_evaluate=1.0))
    strategy = ours.Recorded(inner, run_dir=folder, resume=resume)
    grid = LocalGrid(composition_app(), FLEET)
    result = strategy.start(grid, whole_model(), rounds, evaluate_fn=evaluate_fn)
    assert not changed(result.arrays)
    assert set(strategy.fleet.votes.by_node.values()) == {frozenset(frozen_arrays())}
    return result


@pytest.mark.parametrize("name", ["ModelAverage", "TiFL"])
def test_part_of_a_killed_run(name, tmp_path):
    killed_and_resumed(partial(recorded_run, name), tmp_path, killed_in=2)


@pytest.mark.parametrize("name", ["FedSlice", "FedBuff"])
def test_part_of_a_resumed_run_without_rounds(name, tmp_path):
    folder = Folder(tmp_path)
    for rounds in (2, 6):
        recorded_run(name, folder, None, resume=rounds == 6, rounds=rounds)


def test_votes_outlast_a_resume(tmp_path):
    """The first to answer after it may be one that returns other arrays than most."""
    folder = Folder(tmp_path)
    found = []
    for resume in (False, True):
        inner = ours.Wrapper(leaf())
        inner.on_start = lambda run: found.append(dict(run.fleet.votes.by_node))
        strategy = ours.Recorded(inner, run_dir=folder, resume=resume)
        strategy.start(LocalGrid(composition_app(), FLEET), whole_model(), 1 + resume)
    left_out = frozenset(frozen_arrays())
    assert found == [{}, {f"node-{i}": left_out for i in range(6)}]
