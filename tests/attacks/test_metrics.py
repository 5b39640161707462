"""Metrics, names and words of nodes: one sets no figure, fills no file, reaches no terminal."""

import json
import logging
import random
import string
from functools import cache

import numpy as np
import pytest
from attacker import LyingGrid, attack, leaf, reasons
from recording import Folder, History
from toy import toy_app, toy_arrays

from flwr_hetero import strategy as ours
from flwr_hetero._flwr import NodeInfo
from flwr_hetero.exchange.nodes import MOST_KINDS, NodeBook
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.report import RunDirectory
from flwr_hetero_studies import rivals
from flwr_hetero_studies.core.quiet import only_errors

TWENTY = [DeviceProfile(1.0 + 0.01 * i) for i in range(20)]
LIAR = 7
ODD = [-7.0, 1e308, float("nan"), 10**400]


def told(value, name, kind="evaluate"):
    """Say something else of a metric, in replies of one kind."""

    def lie(message, reply):
        if message.metadata.message_type == kind:
            (metrics,) = reply.content.metric_records.values()
            metrics.update({name: value})

    return lie


def run(strategy, lies, profiles=TWENTY, rounds=2, app=None):
    history = History(strategy)
    with only_errors():
        grid = LyingGrid(app or toy_app(), profiles, lies)
        result = history.start(grid, toy_arrays(buffer=False), rounds)
    return history.records[1:], result


EVALUATED = {
    "rounds": lambda: ours.Wrapper(leaf(fraction_evaluate=1.0)),
    "TiFL": lambda: ours.TiFL(leaf(fraction_evaluate=1.0), 5, 2),
    "FedBuff": lambda: ours.FedBuff(leaf(fraction_evaluate=1.0)),
}


@cache
def honest_records(name):
    return run(EVALUATED[name](), {}, rounds=3)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("rounds", value) for value in ODD), ("TiFL", 7.0), ("FedBuff", 1e308)],
    ids=map(str, range(len(ODD) + 2)),
)
def test_one_node_does_not_set_the_accuracy(name, value):
    honest = honest_records(name)
    lied, _ = run(EVALUATED[name](), {LIAR: told(value, "eval-acc")}, rounds=3)
    for before, after in zip(honest, lied, strict=True):
        if before["evaluate"] and after["evaluate"]:
            assert after["evaluate"] == pytest.approx(before["evaluate"], abs=0.05)
            low, usual, high = after["evaluate_range"]["eval-acc"]
            assert before["evaluate_range"]["eval-acc"][1] == pytest.approx(usual, abs=0.011)
            assert 0 <= low <= usual <= high <= 1
            assert 0 <= after["fairness"]["mean"] <= 1
    said = [record["limited"] for record in lied if "limited" in record]
    assert [list(names) for names in said] == [[f"node-{LIAR}"]], "once in a run"
    assert "reports 'eval-acc' as" in said[0][f"node-{LIAR}"]
    assert not any(record["failures"] for record in (*honest, *lied))
    assert not any("limited" in record for record in honest)


@pytest.mark.parametrize("name", ["FedAvg", "Bulyan", "QFedAvg"])
def test_one_node_sets_no_metric_of_training_and_the_model_is_the_same(name):
    usual = dict.fromkeys(range(20), told(0.5, "odd", "train"))
    lies = usual | {LIAR: told(1e308, "odd", "train")}
    honest, model = run(ours.Wrapper(leaf(name)), usual)
    lied, other = run(ours.Wrapper(leaf(name)), lies)
    for before, after in zip(honest, lied, strict=True):
        assert before["train"]["odd"] == pytest.approx(0.5)
        assert after["train"]["odd"] == pytest.approx(0.5, abs=0.26)
        assert after["train_range"]["odd"][1] == 0.5
    np.testing.assert_array_equal(model.arrays["w"].numpy(), other.arrays["w"].numpy())


def test_lists_are_cut_number_by_number():
    usual = dict.fromkeys(range(20), told([0.5, 2.0], "two"))
    lie = told([float("nan"), 1e308], "two")
    records, _ = run(EVALUATED["rounds"](), usual | {LIAR: lie})
    assert records[-1]["evaluate"]["two"] == pytest.approx([0.5, 3.0])


def flood(count, length=20):
    """Add metrics whose names are new in every reply."""

    def lie(message, reply):
        (metrics,) = reply.content.metric_records.values()
        letters = (random.choices(string.ascii_letters, k=length) for _ in range(count))
        metrics.update({"".join(name): 1.0 for name in letters})

    return lie


BUFFERS = {
    "one": lambda: rivals.FedAsync(leaf()),
    "three": lambda: ours.FedBuff(leaf(), buffer_size=3),
    "a round of two": lambda: ours.RandomSelection(leaf(), 2),
}


@pytest.mark.parametrize(
    ("name", "count", "length"),
    [("three", 900, 20), ("a round of two", 900, 20), ("one", 20_000, 20), ("one", 1, 5000)],
)
def test_names_are_bounded_whatever_the_size_of_a_buffer(name, count, length, tmp_path):
    folder = Folder(tmp_path)
    strategy = ours.Recorded(BUFFERS[name](), run_dir=folder)
    attack(strategy, {0: flood(count, length)}, rounds=12, app=toy_app(), profiles=TWENTY[:8])
    lines = [json.dumps(record) for record in folder.records]
    flooded = [line for line in lines if len(line) > 2500]
    assert len(flooded) <= 1
    assert max(map(len, lines)) < 100_000
    kept = sum(path.stat().st_size for path in tmp_path.glob("state.npz"))
    assert kept < 60_000
    known = strategy.fleet.metrics["train"]
    assert len(known) <= 8
    assert sum(len(name) for names in known.values() for name in names) < 25_000


@pytest.mark.parametrize("name", ["one", "three", "a round of two"])
def test_a_quick_liar_adds_no_metric_and_hides_none(name):
    quick = [DeviceProfile(20.0), *[DeviceProfile(1.0 + 0.01 * i) for i in range(9)]]
    lie = flood(3)
    records, _ = run(BUFFERS[name](), {0: lie}, profiles=quick, rounds=40)
    assert all(set(record["train"]) <= {"train-loss"} for record in records[-20:])
    late = [record for record in records[-20:] if record["weights"]]
    assert len(late) > 10
    assert all("train-loss" in record["train"] for record in late)


def test_all_nodes_may_change_their_names():
    """An app reports another metric from the fifth round on."""

    def from_fifth(message, reply):
        if message.content["config"]["server-round"] >= 5:
            told(1.0, "new", "train")(message, reply)

    for make in (lambda: ours.RandomSelection(leaf(), 5), lambda: rivals.FedAsync(leaf())):
        records, _ = run(make(), dict.fromkeys(range(20), from_fifth), rounds=40)
        assert "new" in records[-1]["train"]


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\u202eb", "a\nb", "\ud800"])
def test_a_name_that_cannot_be_printed_costs_the_reply(name):
    records, _ = run(ours.Wrapper(leaf()), {LIAR: told(1.0, name, "train")})
    assert reasons(records, LIAR) == ["names of its metrics cannot be printed"] * 2


WORDS = "\x1b]0;owned\x07\x1b[2J \x9b1m \u202eabc\u2066 \u200b\x7f\r\n\ud800"


def wordy(message, context, call_next):
    """Fail with an escape sequence, or give it as a name where there is one."""
    if context.node_config["partition-id"] == 0:
        raise ValueError("".join(random.choices(string.ascii_letters, k=20)) + WORDS[:-3])
    return call_next(message, context)


def test_words_of_nodes_reach_no_terminal_and_no_file(tmp_path, caplog):
    grid = LocalGrid(toy_app(mods=[wordy]), TWENTY[:6])
    strategy = ours.Recorded(leaf(fraction_evaluate=1.0), run_dir=RunDirectory(tmp_path / "run"))
    with caplog.at_level(logging.INFO):
        strategy.start(grid, toy_arrays(), 8)
    shown = [log.getMessage() for log in caplog.records if log.name == "flwr"]
    assert all(text.replace("\n", "").isprintable() for text in shown)
    said = [text for text in shown if "owned" in text]
    dropped = [text for text in said if "reply dropped" in text]
    assert len(dropped) <= 3, "random letters make no kind of their own"
    assert len(said) - len(dropped) == 1, "that the node fails in each round is said once"
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    failed = [f["reason"] for line in lines for f in json.loads(line)["failures"]]
    assert len(failed) == 16
    assert all(text.isprintable() and len(text) <= 300 for text in failed)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "owned" in page
    assert not any(char in page for char in "\x1b\x9b\u202e\u2066\x7f\x07")


class Registered:
    """A real fleet whose nodes have these names."""

    def get_nodes(self):
        return [NodeInfo(node_id=1, name="edge\x1b[2J-1"), NodeInfo(node_id=2, name="x" * 5000)]


def test_names_of_registered_nodes_are_printable():
    book = NodeBook()
    book.learn(Registered(), [1, 2])
    assert book.identity(1) == "edge?[2J-1"
    assert len(book.identity(2)) == 300


def test_memory_of_warnings_is_bounded(caplog):
    book = NodeBook()
    with caplog.at_level(logging.INFO):
        for number in range(2000):
            letters = "".join(random.choices(string.ascii_letters, k=30))
            for text in (f"error 2: {letters}", f"metric '{letters}' is {number}", letters):
                book.warn(number, f"reply dropped: {text}")
    assert len(book._warned) <= MOST_KINDS + 1
    assert max(len(kind) for kind in book._warned) < 100
    assert sum("error 2" in log.getMessage() for log in caplog.records) == 3
