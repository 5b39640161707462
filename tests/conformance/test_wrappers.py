"""Every wrapper in every other, around every strategy: it works, or it is refused at once."""

import json
import logging
import random
from collections import deque
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from attacker import PHASE, STEPS, recorded, start
from composition_toy import USUAL_STEPS, composition_app, local_model, num_examples
from flwr.serverapp import strategy as flower
from recording import Folder
from toy import FLOWER_STRATEGIES

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies import rivals

FLEET = [DeviceProfile(speed, jitter=0.1) for speed in (1, 1.1, 1.2, 4, 4.1, 4.2)]
WRAPPERS = {
    "TiFL": lambda inner=None: ours.TiFL(inner, 3, 2, interval=2, **PHASE),
    "BiasedLocalSGD": lambda inner=None: ours.BiasedLocalSGD(inner, weigh_by_steps=True, **STEPS),
    "LocalSteps": lambda inner=None: ours.LocalSteps(inner, step_correction=0.0, **STEPS),
    "AdaComm": lambda inner=None: rivals.AdaComm(inner, 6, interval_s=0.0),
    "CDGraB": lambda inner=None: ours.CDGraB(inner, sketch_size=2),
    "Resharding": lambda inner=None: ours.Resharding(inner, share=0.5, budget_bytes=16),
    "SamplerMetrics": lambda inner=None: ours.SamplerMetrics(inner),
    "Compressed": lambda inner=None: ours.Compressed(inner),
    "RandomSelection": lambda inner=None: ours.RandomSelection(inner, 3),
    "FedBuff": lambda inner=None: ours.FedBuff(inner, buffer_size=3, weighting="examples"),
    "FedSlice": lambda inner=None: ours.FedSlice(inner, slice_steps=6, window=2),
    "ModelAverage": lambda inner=None: ours.ModelAverage(inner, window=2),
    "Recorded": lambda inner=None: recorded(inner),
    "Oort": lambda inner=None: rivals.Oort(inner, 3, profiling=True),
    "PowerOfChoice": lambda inner=None: rivals.PowerOfChoice(inner, 3, 4),
    "DeadlineSelection": lambda inner=None: rivals.DeadlineSelection(inner, 3),
    "FedAT": lambda inner=None: rivals.FedAT(inner, 2, 2),
    "FedAsync": lambda inner=None: rivals.FedAsync(inner),
    "FedCompass": lambda inner=None: rivals.FedCompass(inner, 2, 6),
    "RescaledASGD": lambda inner=None: rivals.RescaledASGD(inner),
    "RingleaderASGD": lambda inner=None: rivals.RingleaderASGD(inner),
    "WithoutSlowest": lambda inner=None: rivals.WithoutSlowest(inner, 3),
}
ONLY_WRAP = {"CDGraB", "Resharding", "SamplerMetrics", "Compressed", "Recorded"}
INFO = {  # what the history must hold of a wrapper, in some round
    "TiFL": ("tifl", lambda f: f["tier"] in (0, 1) and len(f["tier_probs"]) == 2),
    "BiasedLocalSGD": ("biased_local_sgd", lambda f: max(f["num_steps"].values()) == 6),
    "LocalSteps": ("local_steps", lambda f: max(f["num_steps"].values()) == 6),
    "AdaComm": ("adacomm", lambda f: f["num_steps"] < 6),
    "CDGraB": ("cd_grab", lambda f: f["pairs"] > 0),
    "Resharding": ("resharding", lambda f: f["swaps"] > 0),
    "SamplerMetrics": ("sampler", lambda f: f["coverage"] == 0.5),
    "Compressed": ("compressed", lambda f: f == {"without_mod": 0}),
    "RandomSelection": ("selected", lambda nodes: len(nodes) in (2, 3)),
    "FedBuff": ("fedbuff", lambda f: len(f["nodes"]) == 3),
    "FedSlice": ("fedslice", lambda f: f["updates"] > 1 and f["examples"] >= f["examples_wanted"]),
    "ModelAverage": ("model_average", lambda f: f["models"] == 2),
    "Recorded": ("virtual_s", lambda seconds: seconds > 0),
    "Oort": ("oort", lambda f: 0 < len(f["new"]) < 3 and f["preferred_s"] > 0),
    "PowerOfChoice": ("power_of_choice", lambda f: len(f["loss"]) in (2, 3)),
    "DeadlineSelection": ("deadline", lambda f: len(f["left_out"]) == 1),
    "FedAT": ("fedbuff", lambda f: f["tier"] == 0 and len(f["nodes"]) >= 2),
    "FedAsync": ("fedbuff", lambda f: len(f["nodes"]) == 1 and f["staleness"] != [0]),
    "FedCompass": ("fedbuff", lambda f: set(f["num_steps"].values()) <= set(range(2, 7))),
    "RescaledASGD": ("fedbuff", lambda f: len(f["nodes"]) == 1 and f["step"] != 1),
    "RingleaderASGD": ("fedbuff", lambda f: len(f["nodes"]) == 1),
    "WithoutSlowest": ("without_slowest", lambda f: len(f["left_out"]) == 1),
}
LOOPS = ("FedBuff", "FedAT", "FedAsync", "FedCompass", "RescaledASGD", "RingleaderASGD", "FedSlice")
RIVALS = ("Oort", "PowerOfChoice", "DeadlineSelection", "WithoutSlowest", *LOOPS[1:6])
DECISIVE = {"TiFL", "BiasedLocalSGD", "CDGraB", "Compressed", "FedBuff", "FedSlice", "Resharding"}
"""Wrappers that each decide something else: CI tries them in each other."""
DISTRUST = ("Krum", "MultiKrum", "Bulyan")
ASK_FEW = {"TiFL", *LOOPS[1:]}
"""Those that here make an update of one node or two."""
SELECTS = ("TiFL", "RandomSelection", *RIVALS, "FedBuff", "FedSlice")
ONLY_ROUNDS = ("CDGraB", "Resharding")
SETS_STEPS = ("BiasedLocalSGD", "LocalSteps", "AdaComm", *LOOPS[3:])


def why_illegal(outer, inner):
    """Say what the refusal must say; None for a pair that must work."""
    if outer == inner != "Recorded":
        return f"strategy must leave .* to {outer}, got '{inner}': use one of the two"
    if inner == "Recorded":
        return "be Recorded, whose place is outside" if outer != inner else "leave the record to"
    others = {*SETS_STEPS, *SELECTS, "ModelAverage"}
    if "FedSlice" in (outer, inner) and others >= {outer, inner}:
        return f"strategy must leave .* to {outer}, got '{inner}'"
    if outer in SETS_STEPS and inner in SETS_STEPS:
        return f"strategy must leave .*steps.* to {outer}, got '{inner}'"
    loops = {outer, inner}.intersection(LOOPS)
    if len(loops) == 2:
        return f"strategy must leave .*loop.* to {outer}, got '{inner}'"
    if inner == "Compressed" and outer in LOOPS:
        return rf"be Compressed, whose place is outside .* loop, .*: write Compressed\({outer}"
    if inner in LOOPS and outer in SETS_STEPS:
        return rf"be {inner}, whose place is outside .* steps, .*: write {inner}\({outer}"
    if (outer, inner) == ("FedAT", "ModelAverage"):
        return r"whose place is outside .* the global model, .*: write ModelAverage\(FedAT"
    if loops and (other := {outer, inner}.intersection(ONLY_ROUNDS)):
        return f"work without rounds in one composition with {loops.pop()}, got '{other.pop()}': "
    if outer in SELECTS and inner in SELECTS:
        return f"strategy must leave selection to {outer}, got '{inner}'"
    return None


LEGAL = [pair for pair in product(WRAPPERS, repeat=2) if why_illegal(*pair) is None]


def case(pair):
    """Make a parameter: CI tries decisive wrappers in one order, and each wrapper recorded."""
    outer, inner = pair
    is_second_order = (inner, outer) in LEGAL and outer > inner
    is_early = outer == "Recorded" or (DECISIVE.issuperset(pair) and not is_second_order)
    return pytest.param(*pair, marks=[] if is_early else [pytest.mark.nightly])


@pytest.fixture(autouse=True)
def _without_logs():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def make(names, leaf):
    for name in reversed(names):
        leaf = WRAPPERS[name](leaf)
    if names:
        # the goals of six nodes with one parameter are as far apart as those of liars
        leaf.update_limit = None
    return leaf


def go(names, folder, grid, stop_after=None, **recorded):
    """Run three rounds in a Recorded; return the models and the wrappers' states."""
    models = []
    inner = make([name for name in names if name != "Recorded"], flower.FedAvg())
    whole = ours.Recorded(inner, run_dir=folder, **recorded)
    whole.update_limit = None

    def watch(server_round, arrays):
        models.append(arrays["w"].numpy())
        if server_round == stop_after:
            whole.fleet.stop_reason = "the test stops it here"

    random.seed(3)
    whole.start(grid, start(), 3, evaluate_fn=watch)
    return models, [wrapper.state_dict() for wrapper in whole.wrappers()]


def expected(model, record):
    """Predict the next model from what a line of the history says of nodes and steps."""
    nodes = sorted(record["latency"])
    steps_of = dict.fromkeys(nodes, record.get("adacomm", {}).get("num_steps", USUAL_STEPS))
    for key in ("biased_local_sgd", "local_steps"):
        steps_of |= record.get(key, {}).get("num_steps", {})
    steps = np.array([steps_of[node] for node in nodes], float)
    parts = [int(node.removeprefix("node-")) for node in nodes]
    locals_ = np.array([local_model(model, p, int(s)) for p, s in zip(parts, steps, strict=True)])
    weights = steps if "biased_local_sgd" in record else np.array([*map(num_examples, parts)])
    weights = weights / weights.sum()
    return model + weights @ (locals_ - model)


def merged(models, record):
    """Predict the next model from what the history says of a merge."""
    info = record["fedbuff"]
    total = 0.0
    parts = [int(node.removeprefix("node-")) for node in info["nodes"]]
    share = np.array([num_examples(p) for p in parts], float) / sum(map(num_examples, parts))
    for part, staleness, weight in zip(parts, info["staleness"], share, strict=True):
        began = models[-1 - staleness]
        update = local_model(began, part, USUAL_STEPS) - began
        total = total + weight * info["step"] * update / np.sqrt(1 + staleness)
    return models[-1] + total


def newest(averages):
    """Find the models of which ModelAverage shows the averages, here of two."""
    later = pairwise(averages[1:])
    return [*averages[:2], *(2 * now - before for before, now in later)]


def timeless(records):
    """Drop wall time, and name nodes alike.

    A node that has not answered, or not since the resume, has no better name than its id.
    """
    for record in records:
        record["wall_s"] = 0
    return json.loads(json.dumps(records).replace("id-100", "node-"))


@pytest.mark.parametrize("outer", WRAPPERS)
def test_what_a_wrapper_accepts_inside_and_what_it_refuses(outer):
    for inner in WRAPPERS:
        inside = WRAPPERS[inner](flower.FedAvg())
        if reason := why_illegal(outer, inner):
            with pytest.raises(ValueError, match=reason):
                WRAPPERS[outer](inside)
        else:
            assert WRAPPERS[outer](inside).inner is not None


@pytest.mark.parametrize(("outer", "inner"), [case(pair) for pair in LEGAL])
def test_pair(outer, inner, tmp_path):
    outcome = whole_run((outer, inner), tmp_path / "whole")
    if outer < inner or (inner, outer) not in LEGAL:  # once for two orders of the same
        stop_save_load_continue((outer, inner), tmp_path / "broken", *outcome)


FOUR = deque(["TiFL", "BiasedLocalSGD", "CDGraB", "SamplerMetrics"])


@pytest.mark.parametrize("shift", [0, 2])
def test_four_wrappers(shift, tmp_path):
    names = FOUR.copy()
    names.rotate(shift)
    outcome = whole_run(names, tmp_path / "whole")
    stop_save_load_continue(names, tmp_path / "broken", *outcome)


def whole_run(names, path):
    """Find all wrappers in the history, and the model where their information puts it."""
    folder = Folder(path)
    seen, states = go(names, folder, LocalGrid(composition_app(), FLEET))
    models = newest(seen) if "ModelAverage" in names else seen
    for name in names:
        if "FedAsync" in names and name in SETS_STEPS:
            continue  # three merges are three nodes that were never measured
        key, says = INFO[name]
        assert any(says(r[key]) for r in folder.records[1:] if r.get(key)), (name, folder.records)
    for number, record in enumerate(folder.records[1:], 1):
        assert record["failures"] == []
        if not {*LOOPS}.intersection(names):
            assert models[number] == pytest.approx(expected(models[number - 1], record), rel=1e-5)
        elif "FedBuff" in names and not {*SETS_STEPS}.intersection(names):
            assert models[number] == pytest.approx(merged(models[:number], record), rel=1e-5)
    return seen, states, folder.records


def stop_save_load_continue(names, path, models, states, records):
    folder = Folder(path)
    grid = LocalGrid(composition_app(), FLEET)
    go(names, folder, grid, stop_after=1)
    rest, own_states = go(names, folder, grid, resume=True)
    if {*LOOPS}.intersection(names):  # nodes that were at work are free
        assert [record["round"] for record in folder.records] == [0, 1, 2, 3]
        assert all(record["train"] and not record["failures"] for record in folder.records[1:])
        return
    assert np.array_equal(rest[-1], models[-1])
    for mine, theirs in zip(own_states, states, strict=True):
        for key in theirs.keys() | mine.keys():
            np.testing.assert_equal(mine[key], theirs[key], err_msg=key)
    assert timeless(folder.records) == timeless(records)


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_around_every_strategy(name, are_all, tmp_path, monkeypatch):
    """By day every third wrapper, so that each has four strategies; at night all, and pairs."""
    monkeypatch.setattr(Folder, "checkpoint_dir", tmp_path)
    first = list(FLOWER_STRATEGIES).index(name)
    alone_or_in_pairs = [(wrapper,) for wrapper in WRAPPERS]
    if are_all:
        alone_or_in_pairs += LEGAL[first :: len(FLOWER_STRATEGIES)]
    else:
        alone_or_in_pairs = alone_or_in_pairs[first % 3 :: 3]
    app = composition_app()
    alone = None

    def final(names):
        random.seed(3)
        strategy = make(names, FLOWER_STRATEGIES[name](fraction_evaluate=0.0))
        result = strategy.start(LocalGrid(app, FLEET[1:5]), start(), 2)
        return result.arrays["w"].numpy(), dict(result.train_metrics_clientapp.get(2, {}))

    for names in [(), *alone_or_in_pairs]:
        if name in DISTRUST and ASK_FEW.intersection(names):
            with pytest.raises(ValueError, match=r"at least (3|12) around .*choose among fewer"):
                final(names)
            continue
        model, metrics = final(names)
        assert np.isfinite(model).all(), names
        if ONLY_WRAP.issuperset(names):
            alone = (model, metrics) if alone is None else alone
            assert model == pytest.approx(alone[0], rel=1e-6), names
            assert metrics == pytest.approx(alone[1]), names
        assert model.any(), names


BIASED = partial(ours.BiasedLocalSGD, shared_samples=100)
EXACT = partial(ours.CDGraB, mode="exact")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: ours.TiFL(ours.LocalSteps(ours.TiFL())), "leave selection to TiFL, got 'TiFL'"),
        (lambda: rivals.AdaComm(ours.TiFL(ours.LocalSteps())), "leave steps to AdaComm, got"),
        (lambda: ours.LocalSteps(EXACT()), "leave steps to LocalSteps, got 'CDGraB'"),
        (lambda: EXACT(rivals.AdaComm()), "leave steps to CDGraB, got 'AdaComm'"),
        (lambda: BIASED(ours.CDGraB()), "leave orders to BiasedLocalSGD"),
        (lambda: ours.Resharding(BIASED()), "leave samples to Resharding"),
        (lambda: ours.TiFL(flower.FedXgbCyclic()), "leave the choice of nodes"),
        (lambda: ours.CDGraB(flower.FedXgbBagging()), "train by gradient steps inside CDGraB"),
        (lambda: ours.TiFL(flower.FedAvg(fraction_train=0.5)), "FedAvg.fraction_train must be 1.0"),
        (lambda: ours.TiFL(flower.Krum(min_train_nodes=9)), "Krum.min_train_nodes must be at most"),
    ],
)
def test_other_compositions_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_table_has_every_wrapper():
    every = {*ours.__all__, *rivals.__all__}
    # These have tests of their own in tests/studies/rivals.
    every -= {"FedNova", "OverSelect"}
    assert set(WRAPPERS) == set(INFO) == every - {"Selection", "Wrapper"}
    decisions = [WRAPPERS[name]().decides for name in WRAPPERS]
    assert all(decisions)  # or a wrapper could be there twice


def test_refused_wrapper_can_be_used_elsewhere():
    inner = ours.Compressed()
    with pytest.raises(ValueError, match="whose place is outside"):
        ours.FedBuff(inner)
    assert recorded(inner).inner is inner
