"""Checkpoints: a resumed run equals an unbroken one, and what does not fit is refused."""

import json
import pickle
import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from attacker import FLEET, leaf, start
from attacker import NESTS as NESTED
from composition_toy import composition_app
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping
from recording import (
    Folder,
    KilledError,
    checkpoint,
    evaluate,
    history,
    killed_and_resumed,
    timeless,
    write,
)
from toy import altered, toy_app, toy_arrays

from flwr_hetero.files import GrowingFile
from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.report import RunDirectory
from flwr_hetero.server import checkpoint as module
from flwr_hetero.server.checkpoint import Checkpoints
from flwr_hetero.server.loop import Run
from flwr_hetero.strategy import FedBuff, Recorded, Wrapper
from flwr_hetero_studies.core.quiet import only_errors


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("flwr_hetero.report.page.write_report", lambda path: path)


def late(partition, number):
    return partition == 0 and number > 3


RUNS = {
    **{n: (partial(leaf, n), 15, ()) for n in ("FedAvg", "FedAdam", "FedAvgM")},
    "sampling by Flower": (partial(leaf, fraction_train=0.3), 15, ()),
    "the usual metrics": (leaf, 2, [altered({"odd": 1.0}, late)]),
    "what nodes said first": (leaf, 4, [altered({"num-examples": 900}, late)]),
}


@pytest.mark.parametrize(("make", "num_nodes", "mods"), RUNS.values(), ids=RUNS)
def test_killed_and_resumed_equals_unbroken(tmp_path, make, num_nodes, mods):
    def go(folder, evaluate_fn, resume):
        grid = LocalGrid(toy_app(mods=mods), profiles=named_fleet("paper-5", num_nodes))
        strategy = Recorded(make(), run_dir=folder, resume=resume)
        return strategy.start(grid, toy_arrays(buffer=False), 5, evaluate_fn=evaluate_fn)

    killed_and_resumed(go, tmp_path, killed_in=4)


# --- in a run directory ----------------------------------------------------------------------
def run(path, num_rounds=2, arrays=None, inner=None, **options):
    """Run, or resume, in a run directory; return the folder of its checkpoints."""
    strategy = Recorded(inner, run_dir=str(path), **options)
    grid = LocalGrid(toy_app(), profiles=named_fleet("paper-5", 5))
    strategy.start(grid, arrays or toy_arrays(), num_rounds)
    return path / "checkpoint"


def spoil(path, change=lambda meta: None, **model):
    """Write other arrays of the model, and another meta, into a checkpoint."""
    arrays, meta = checkpoint(path)
    change(meta)
    write(path, arrays | {f"model/{name}": value for name, value in model.items()}, meta)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "a flipped bit": lambda path: path.write_bytes(flipped(path.read_bytes(), 200)),
    "a pickle": lambda path: path.write_bytes(pickle.dumps([1])),
    "another file": lambda path: np.savez(path, meta=np.array("[3]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back(tmp_path, damage, caplog):
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    random.seed(0)
    run(whole, 4)
    random.seed(0)
    checkpoints = run(broken, 3)
    DAMAGES[damage](checkpoints / "state.npz")
    run(broken, 4, resume=True)
    assert [timeless(r) for r in history(broken)] == [timeless(r) for r in history(whole)]
    assert f"{checkpoints / 'state.npz'} cannot be read" in caplog.text
    DAMAGES[damage](checkpoints / "state.npz")
    (checkpoints / "previous.npz").write_bytes(b"PK")
    text = rf"no checkpoint in {checkpoints} can be read .*put back a copy of it, or leave resume"
    with pytest.raises(ValueError, match=text):
        run(broken, 5, resume=True)


SHAPE = np.zeros((3, 2), np.float32)
WIDE = np.zeros(4)
NAN = np.full(4, np.nan, np.float32)
OTHERS = {
    "its model has w (3, 2) float32, this run's (4,) float32": {"w": SHAPE},
    "its model has w (4,) float64, this run's (4,) float32": {"w": WIDE},
    "its model has v (4,) float64, this run's missing": {"v": WIDE},
    "its model holds NaN or infinity in w, training has diverged": {"w": NAN},
    "KeyError('virtual_s')": {"change": lambda meta: meta.pop("virtual_s")},
    "it is of Recorded > FedAvg, this run is Recorded > Wrapper > FedAvg": {},
}


@pytest.mark.parametrize("reason", OTHERS)
def test_checkpoint_of_another_run_is_refused(tmp_path, reason):
    checkpoints = run(tmp_path / "run")
    spoil(checkpoints / "state.npz", **OTHERS[reason])
    lines = (tmp_path / "run" / "history.jsonl").read_bytes()
    text = re.escape(f"cannot go on from {checkpoints}/state.npz: {reason}")
    with pytest.raises(ValueError, match=text):
        run(tmp_path / "run", 4, inner=None if OTHERS[reason] else Wrapper(), resume=True)
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == lines


@pytest.mark.parametrize("inner", [leaf, lambda: FedBuff(leaf(), buffer_size=3)])
@pytest.mark.parametrize("lacks", ["checkpoint", "round"])
def test_a_run_directory_that_lacks_something_is_refused(tmp_path, inner, lacks):
    checkpoints = run(tmp_path, inner=inner())
    path = tmp_path / "history.jsonl"
    if lacks == "checkpoint":
        text = "run_dir must hold a checkpoint to resume from"
        for file in checkpoints.glob("*.npz"):
            file.unlink()
    else:
        text = f"{path} lacks round 1, but the checkpoint is of round 2"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(lines[0] + lines[2])
    before = path.read_text()
    with pytest.raises(ValueError, match=text):
        run(tmp_path, 4, inner=inner(), resume=True)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"run_dir": None}, "run_dir must be an absolute path or a RunDirectory, got None"),
        ({"run_dir": "runs/first"}, "run_dir must be an absolute path"),
        ({"resume": True}, "resume must be the same for Recorded and for"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        Recorded(**{"run_dir": settings.get("run_dir") or RunDirectory(tmp_path)} | settings)


# --- the files -------------------------------------------------------------------------------
ROUNDS = 3


def go(folder, evaluate_fn=None, resume=False, inner=None, rounds=ROUNDS):
    strategy = Recorded(inner or leaf(), run_dir=Folder(folder), resume=resume)
    grid = LocalGrid(composition_app(), profiles=FLEET)
    with only_errors():
        return strategy, strategy.start(grid, start(), rounds, evaluate_fn=evaluate_fn)


class Keeping(Wrapper):
    """Keep the run."""

    def on_start(self, run):
        self.of_run = run


def test_a_checkpoint_writes_as_much_after_many_rounds_as_after_few(tmp_path):
    strategy, result = go(tmp_path, inner=Keeping(leaf()))
    log = tmp_path / "metrics.jsonl"
    records = result.evaluate_metrics_serverapp
    sizes = []
    for number in (1000, 50_000):
        for earlier in range(number - 10, number):
            records[10**8 + number * 1000 + earlier] = MetricRecord({"accuracy": 0.5})
        strategy.checkpoints.save(strategy.inner.of_run)
        before = log.stat().st_size
        records[10**9 + number] = MetricRecord({"accuracy": 0.5})
        strategy.checkpoints.save(strategy.inner.of_run)
        sizes.append((log.stat().st_size - before, (tmp_path / "state.npz").stat().st_size))
    assert sizes[0][0] == sizes[1][0] < 200
    assert abs(sizes[0][1] - sizes[1][1]) <= 64, "only numbers of more digits"


def test_checkpoints_keep_to_their_share_of_the_time(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="flwr")
    strategy, _ = go(tmp_path, inner=Keeping(leaf()))
    run = strategy.inner.of_run
    checkpoints = strategy.checkpoints
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    saved = []

    def save(run):
        saved.append(run.round)
        clock.now += 1.5

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "ALWAYS_S", 2.0)
    monkeypatch.setattr(checkpoints, "save", save)
    run.num_rounds = 1000
    run.started_s = 0.0
    for run.round in range(1000):
        clock.now += 1.0
        checkpoints.save_if_due(run)
    # The first one is free of the limit, and then each one pays for itself by time without any.
    assert saved[0] == 0
    assert 0.04 * clock.now < 1.5 * len(saved) <= 0.05 * clock.now + 2.0
    run.round = 1000
    checkpoints.save_if_due(run)
    assert saved[-1] == 1000, "the last round is always saved"
    said = [text for text in caplog.messages if text.startswith("A checkpoint takes")]
    assert said == ["A checkpoint takes 1.5 s: some rounds have none, and a resume may repeat 30 s"]


def test_metrics_of_all_kinds_come_back(tmp_path):
    strategy, result = go(tmp_path, evaluate(), inner=Keeping(leaf(fraction_evaluate=1.0)))
    odd = MetricRecord({"nan": float("nan"), "inf": float("inf"), "n": 3, "x": 0.1, "y": [1, 2]})
    result.evaluate_metrics_serverapp[99] = odd
    strategy.checkpoints.save(strategy.inner.of_run)
    _, again = go(tmp_path, None, resume=True, inner=Keeping(leaf(fraction_evaluate=1.0)))
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        assert getattr(again, kind) == getattr(result, kind) != {}
    assert repr(again.evaluate_metrics_serverapp) == repr(result.evaluate_metrics_serverapp)


@pytest.mark.parametrize("torn", ['["train_metrics_clientapp", 4, {"tr', "", "x" * 5000 + "\n"])
def test_what_a_killed_process_has_added_is_cut_off(tmp_path, torn):
    """It was killed after a line of metrics was begun, or written, and before the state was."""

    def run(folder, evaluate_fn, resume):
        if resume:
            with (folder.checkpoint_dir / "metrics.jsonl").open("a") as file:
                file.write(torn)
        strategy = Recorded(leaf(), run_dir=folder, resume=resume)
        grid = LocalGrid(composition_app(), profiles=FLEET)
        return strategy.start(grid, start(), 5, evaluate_fn=evaluate_fn)

    with only_errors():
        killed_and_resumed(run, tmp_path, killed_in=4)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "broken")]
    assert texts[0] == texts[1]
    assert all(json.loads(line) for line in texts[0].splitlines())


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_damaged_metrics_are_refused_or_those_before_are_taken(tmp_path, damage):
    go(tmp_path, evaluate())
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes()
    damaged = {"gone": b"", "cut": lines[:-1], "changed": b"[" + lines[1:].replace(b"0", b"1")}
    path.write_bytes(damaged[damage])
    if damage == "cut":
        _, result = go(tmp_path, evaluate(), resume=True)
        assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
        return
    with pytest.raises(ValueError, match=r"metrics\.jsonl has been cut or changed"):
        go(tmp_path, resume=True)
    assert path.read_bytes() == damaged[damage]


def test_a_link_is_no_file_of_metrics(tmp_path):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        GrowingFile(tmp_path / "metrics.jsonl").append(["a"])
    assert (tmp_path / "there").read_text() == "mine"


def test_checkpoint_of_an_older_version_is_read(tmp_path):
    """It has all numbers, those that the user had set beside them, and the metrics in one file."""

    def adam(eta=0.1):
        return leaf("FedAdam", eta=eta)

    whole = tmp_path / "whole"
    old = tmp_path / "old"
    random.seed(1)
    _, expected = go(whole, evaluate(), inner=adam(), rounds=5)
    random.seed(1)
    with pytest.raises(KilledError):
        go(old, evaluate(killed_in=4), inner=adam(), rounds=5)
    arrays, meta = checkpoint(old / "state.npz")
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    meta["results"] = {kind: {} for kind in kinds}
    for line in (old / "metrics.jsonl").read_text().splitlines():
        kind, number, metrics = json.loads(line)
        meta["results"][kind][number] = metrics
    del meta["metrics"]
    meta["strategies"][1]["scalars"]["value/eta"] = 0.1
    meta["strategies"][1]["initial"] = {"eta": 0.1}
    np.savez(old / "state.npz", meta=np.array(json.dumps(meta)), **arrays)
    (old / "metrics.jsonl").unlink()
    _, resumed = go(old, evaluate(), resume=True, inner=adam(), rounds=5)
    assert resumed.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp
    strategy, again = go(old, evaluate(), resume=True, inner=adam(0.5), rounds=5)
    assert again.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp
    assert strategy.inner.eta == 0.5


def test_a_changed_setting_holds_from_the_resume_on(tmp_path):
    def adam(eta, rounds=ROUNDS):
        inner = leaf("FedAdam", eta=eta)
        return go(tmp_path, resume=eta != 0.1, inner=inner, rounds=rounds)[0].inner

    adam(0.1)
    moments = checkpoint(tmp_path / "state.npz")[0]["1/dict/m_t/w"]
    resumed = adam(0.5)
    assert resumed.eta == 0.5
    np.testing.assert_array_equal(resumed.m_t["w"], moments)
    adam(0.2, rounds=4)
    assert adam(0.3, rounds=4).eta == 0.3


def test_a_number_that_the_run_has_changed_goes_on(tmp_path):
    def clipping(norm, resume):
        settings = {"noise_multiplier": 0.1, "num_sampled_clients": 6}
        settings["initial_clipping_norm"] = norm
        inner = DifferentialPrivacyServerSideAdaptiveClipping(leaf(), **settings)
        return go(tmp_path, resume=resume, inner=Wrapper(inner))[0].inner.inner.clipping_norm

    norm = clipping(0.1, resume=False)
    assert norm != 0.1
    assert [clipping(given, resume=True) for given in (0.1, 9.0, norm, 0.1)] == [norm] * 4


@pytest.mark.parametrize(
    "entry",
    ["value/aggregate_train", "value/__class__", "dict/strategy/w", "list/eta/0", "odd/eta"],
)
def test_nothing_but_state_is_replaced(tmp_path, entry):
    go(tmp_path, inner=leaf("FedAdam"))
    arrays, meta = checkpoint(tmp_path / "state.npz")
    meta["strategies"][1]["scalars"][entry] = 3.0
    write(tmp_path / "state.npz", arrays, meta)
    with pytest.raises(ValueError, match="this run cannot go on from"):
        go(tmp_path, resume=True, inner=leaf("FedAdam"))


# --- whatever a file holds -------------------------------------------------------------------
ODD = [
    None,
    [],
    {},
    "",
    "x\x1b[2J",
    -1,
    1.5,
    10**400,
    float("nan"),
    [[1, 2]],
    {"a": {"b": 1}},
    True,
]
CLEAR = r"this run cannot go on from .*state\.npz: |no checkpoint in .* can be read"
GRID = LocalGrid(composition_app(), profiles=FLEET)


def unrecorded(strategy):
    strategy.inner.outer = None
    return strategy.inner


NESTS = {
    "FedAdam": lambda: leaf("FedAdam"),
    "everything": lambda: unrecorded(NESTED["everything"](leaf())),
    "merged": lambda: unrecorded(NESTED["merged"](leaf())),
}


def places(meta, path=()):
    """Find every entry of a table or list of few, however deep."""
    items = meta.items() if isinstance(meta, dict) else enumerate(meta[:4])
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated(meta, place, value):
    *above, last = place
    for key in above:
        meta = meta[key]
    meta[last] = value


def refusal(folder, inner):
    """Load a checkpoint; return why it is refused, empty if it is not."""
    strategy = Recorded(inner, run_dir=Folder(folder), resume=True)
    run = Run(strategy, GRID, start(), 0, 60.0, ConfigRecord(), ConfigRecord(), None)
    try:
        Checkpoints(folder, run).load(run)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("nest", NESTS)
def test_a_mutated_checkpoint_is_read_or_clearly_refused(tmp_path, nest):
    go(tmp_path, evaluate(), inner=NESTS[nest]())
    path = tmp_path / "state.npz"
    rng = np.random.default_rng(3)
    (tmp_path / "previous.npz").unlink()
    whole = path.read_bytes()
    arrays, meta = checkpoint(path)
    every = [place for place in places(meta) if place[:1] != ("random",) or len(place) < 3]
    why = []
    for number in range(40):
        own = json.loads(json.dumps(meta))
        some = dict(arrays)
        mutated(own, every[rng.integers(len(every))], ODD[rng.integers(len(ODD))])
        if number % 3 == 0:
            name = sorted(arrays)[rng.integers(len(arrays))]
            some[name] = [np.array("x"), np.zeros((2, 0)), np.array(np.nan)][rng.integers(3)]
        write(path, some, own)
        why.append(refusal(tmp_path, NESTS[nest]()))
    assert sum(map(bool, why)) > 10
    for number in range(20):
        torn = bytearray(whole)
        torn[rng.integers(len(torn))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(torn) if number % 2 else whole[: rng.integers(len(whole))])
        why.append(refusal(tmp_path, NESTS[nest]()))
    assert not [text for text in why if text and not re.match(CLEAR, text)]
    assert "\x1b" not in "".join(why)
