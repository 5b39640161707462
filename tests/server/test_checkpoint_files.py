"""What checkpoints hold: metrics that are appended, settings of today, and nothing unchecked."""

import json
import logging
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from attacker import FLEET, leaf, start
from attacker import NESTS as NESTED
from composition_toy import composition_app
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping
from recording import Folder, KilledError, checkpoint, evaluate, killed_and_resumed, write

from flwr_hetero import strategy as ours
from flwr_hetero.files import GrowingFile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.server import checkpoint as pace
from flwr_hetero.server.checkpoint import Checkpoints
from flwr_hetero.server.loop import Run
from flwr_hetero_studies.core.quiet import only_errors

ROUNDS = 3


def go(folder, evaluate_fn=None, resume=False, inner=None, rounds=ROUNDS):
    strategy = ours.Recorded(inner or leaf(), run_dir=folder, resume=resume)
    grid = LocalGrid(composition_app(), profiles=FLEET)
    with only_errors():
        return strategy, strategy.start(grid, start(), rounds, evaluate_fn=evaluate_fn)


class Keeping(ours.Wrapper):
    """Keep the run."""

    def on_start(self, run):
        self.of_run = run


def test_a_checkpoint_writes_as_much_after_many_rounds_as_after_few(tmp_path):
    strategy, result = go(Folder(tmp_path), inner=Keeping(leaf()))
    run = strategy.inner.of_run
    sizes = []
    paths = [tmp_path / n for n in ("state.npz",)]
    log = tmp_path / "metrics.jsonl"
    records = result.evaluate_metrics_serverapp
    for number in (1000, 50_000):
        for earlier in range(number - 10, number):
            records[10**8 + number * 1000 + earlier] = MetricRecord({"accuracy": 0.5})
        strategy.checkpoints.save(run)
        before = log.stat().st_size
        records[10**9 + number] = MetricRecord({"accuracy": 0.5})
        strategy.checkpoints.save(run)
        sizes.append((log.stat().st_size - before, *(path.stat().st_size for path in paths)))
    assert sizes[0][0] == sizes[1][0] < 200
    assert abs(sizes[0][1] - sizes[1][1]) <= 64, "only numbers of more digits"


def test_checkpoints_keep_to_their_share_of_the_time(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="flwr")
    strategy, _ = go(Folder(tmp_path), inner=Keeping(leaf()))
    run = strategy.inner.of_run
    checkpoints = strategy.checkpoints
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    saved = []

    def save(run):
        saved.append(run.round)
        clock.now += 1.5

    monkeypatch.setattr(pace, "time", clock)
    monkeypatch.setattr(pace, "ALWAYS_S", 2.0)
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
    strategy, result = go(Folder(tmp_path), evaluate(), inner=Keeping(leaf(fraction_evaluate=1.0)))
    odd = MetricRecord({"nan": float("nan"), "inf": float("inf"), "n": 3, "x": 0.1, "y": [1, 2]})
    result.evaluate_metrics_serverapp[99] = odd
    strategy.checkpoints.save(strategy.inner.of_run)
    _, again = go(Folder(tmp_path), None, resume=True, inner=Keeping(leaf(fraction_evaluate=1.0)))
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
        return go(folder, evaluate_fn, resume, rounds=5)[1]

    killed_and_resumed(run, tmp_path, killed_in=4)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "broken")]
    assert texts[0] == texts[1]
    assert all(json.loads(line) for line in texts[0].splitlines())


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_damaged_metrics_are_refused_or_those_before_are_taken(tmp_path, damage):
    go(Folder(tmp_path), evaluate())
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes()
    damaged = {"gone": b"", "cut": lines[:-1], "changed": b"[" + lines[1:].replace(b"0", b"1")}
    path.write_bytes(damaged[damage])
    if damage == "cut":
        _, result = go(Folder(tmp_path), evaluate(), resume=True)
        assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
        return
    with pytest.raises(ValueError, match=r"metrics\.jsonl has been cut or changed"):
        go(Folder(tmp_path), resume=True)
    assert path.read_bytes() == damaged[damage]


def test_a_link_is_no_file_of_metrics(tmp_path):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        GrowingFile(tmp_path / "metrics.jsonl").append(["a"])
    assert (tmp_path / "there").read_text() == "mine"


def test_checkpoint_of_an_older_version_is_read(tmp_path):
    whole = tmp_path / "whole"
    old = tmp_path / "old"
    random.seed(1)
    _, expected = go(Folder(whole), evaluate(), rounds=5)
    random.seed(1)
    with pytest.raises(KilledError):
        go(Folder(old), evaluate(killed_in=4), rounds=5)
    arrays, meta = checkpoint(old / "state.npz")
    kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
    meta["results"] = {kind: {} for kind in kinds}
    for line in (old / "metrics.jsonl").read_text().splitlines():
        kind, number, metrics = json.loads(line)
        meta["results"][kind][number] = metrics
    del meta["metrics"]
    for each in meta["strategies"]:
        del each["initial"]
    np.savez(old / "state.npz", meta=np.array(json.dumps(meta)), **arrays)
    (old / "metrics.jsonl").unlink()
    _, resumed = go(Folder(old), evaluate(), resume=True, rounds=5)
    assert resumed.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp
    _, again = go(Folder(old), evaluate(), resume=True, rounds=5)
    assert again.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp


def test_a_changed_setting_holds_from_the_resume_on(tmp_path, caplog):
    def adam(eta):
        return leaf("FedAdam", eta=eta)

    go(Folder(tmp_path), inner=adam(0.1))
    moments = checkpoint(tmp_path / "state.npz")[0]["1/dict/m_t/w"]
    with caplog.at_level(logging.INFO):
        strategy, _ = go(Folder(tmp_path), resume=True, inner=adam(0.5))
    assert strategy.inner.eta == 0.5
    np.testing.assert_array_equal(strategy.inner.m_t["w"], moments)
    strategy, _ = go(Folder(tmp_path), resume=True, inner=adam(0.2), rounds=4)
    strategy, _ = go(Folder(tmp_path), resume=True, inner=adam(0.3), rounds=4)
    assert strategy.inner.eta == 0.3


def test_a_changed_setting_is_said(tmp_path, caplog):
    go(Folder(tmp_path), inner=leaf("FedAvgM", server_learning_rate=1.0))
    strategy = ours.Recorded(
        leaf("FedAvgM", server_learning_rate=0.5), run_dir=Folder(tmp_path), resume=True
    )
    with caplog.at_level(logging.INFO):
        strategy.start(LocalGrid(composition_app(), profiles=FLEET), start(), ROUNDS)
    assert "FedAvgM: server_learning_rate is 0.5 from now on, was 1.0" in caplog.text
    assert caplog.text.count("from now on") == 1


def clipped(norm):
    return DifferentialPrivacyServerSideAdaptiveClipping(
        leaf(), noise_multiplier=0.1, num_sampled_clients=6, initial_clipping_norm=norm
    )


def test_a_number_that_the_run_has_changed_goes_on_and_says_so(tmp_path, caplog):
    before, _ = go(Folder(tmp_path), inner=ours.Wrapper(clipped(0.1)))
    norm = before.inner.inner.clipping_norm
    assert norm != 0.1
    for given, said in ((0.1, 0), (9.0, 1), (0.1, 0)):
        caplog.clear()
        inner = ours.Wrapper(clipped(given))
        strategy = ours.Recorded(inner, run_dir=Folder(tmp_path), resume=True)
        strategy.start(LocalGrid(composition_app(), profiles=FLEET), start(), ROUNDS)
        assert inner.inner.clipping_norm == norm
        text = "clipping_norm=9.0 has no effect in a resumed run, which goes on with"
        assert caplog.text.count(text) == said


@pytest.mark.parametrize(
    "entry",
    ["value/aggregate_train", "value/__class__", "dict/strategy/w", "list/eta/0", "odd/eta"],
)
def test_nothing_but_state_is_replaced(tmp_path, entry):
    go(Folder(tmp_path), inner=leaf("FedAdam"))
    arrays, meta = checkpoint(tmp_path / "state.npz")
    meta["strategies"][1]["scalars"][entry] = 3.0
    write(tmp_path / "state.npz", arrays, meta)
    with pytest.raises(ValueError, match="this run cannot go on from"):
        go(Folder(tmp_path), resume=True, inner=leaf("FedAdam"))


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


NESTS = {
    "FedAdam": lambda: leaf("FedAdam"),
    "everything": lambda: unrecorded(NESTED["everything"](leaf())),
    "merged": lambda: unrecorded(NESTED["merged"](leaf())),
}


def unrecorded(strategy):
    strategy.inner.outer = None
    return strategy.inner


@pytest.mark.parametrize("nest", NESTS)
def test_a_mutated_checkpoint_is_read_or_clearly_refused(tmp_path, nest):
    go(Folder(tmp_path), evaluate(), inner=NESTS[nest]())
    path = tmp_path / "state.npz"
    rng = np.random.default_rng(3)
    (tmp_path / "previous.npz").unlink()
    whole = path.read_bytes()
    arrays, meta = checkpoint(path)
    every = [place for place in places(meta) if place[:1] != ("random",) or len(place) < 3]
    why = []
    for number in range(60):
        own = json.loads(json.dumps(meta))
        some = dict(arrays)
        mutated(own, every[rng.integers(len(every))], ODD[rng.integers(len(ODD))])
        if number % 3 == 0:
            name = sorted(arrays)[rng.integers(len(arrays))]
            some[name] = [np.array("x"), np.zeros((2, 0)), np.array(np.nan)][rng.integers(3)]
        write(path, some, own)
        why.append(refusal(tmp_path, NESTS[nest]()))
    assert sum(map(bool, why)) > 20
    for number in range(30):
        torn = bytearray(whole)
        torn[rng.integers(len(torn))] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(torn) if number % 2 else whole[: rng.integers(len(whole))])
        why.append(refusal(tmp_path, NESTS[nest]()))
    assert not [text for text in why if text and not re.match(CLEAR, text)]
    assert "\x1b" not in "".join(why)


def refusal(folder, inner):
    """Load a checkpoint; return why it is refused, empty if it is not."""
    strategy = ours.Recorded(inner, run_dir=Folder(folder), resume=True)
    run = Run(strategy, GRID, start(), 0, 60.0, ConfigRecord(), ConfigRecord(), None)
    try:
        Checkpoints(folder, run).load(run)
    except ValueError as error:
        return str(error)
    return ""
