import json

import numpy as np
import pytest

from flwr_hetero.report import History, read_history
from flwr_hetero.report.compare.verdict import Judge, first_reach, result_of


@pytest.mark.parametrize(
    ("lines", "rounds", "notes"),
    [
        ([b""], [], []),
        ([b'{"round": 0}', b"\xff\xfe\x00"], [0], ["line 2 is incomplete"]),
        (
            [
                *(b'{"round": 1, "wall_s": 1}', b"not json", b"[1]", b'{"virtual_s": 1}', b""),
                *(b'{"round": 0}', b'{"round": true}', b'{"round": 1, "wall_s": 2}'),
                b'{"round": 2',
            ],
            [0, 1],
            [*[f"line {n} is not a round" for n in (2, 3, 4, 5, 7)], "line 9 is incomplete"],
        ),
    ],
)
def test_rounds_in_order_bad_lines_noted(tmp_path, lines, rounds, notes):
    (tmp_path / "history.jsonl").write_bytes(b"\n".join(lines))
    history = read_history(tmp_path)
    assert [record["round"] for record in history.rounds] == rounds
    assert [note.split(" and")[0] for note in history.notes] == notes
    assert history.last_round == max(rounds, default=-1)
    assert history.main_metric() is None
    assert history.column("wall_s").tolist()[1:] == [2.0] * (len(rounds) == 2)


def line(number, **more):
    return json.dumps({"round": number, "virtual_s": 1.5 * number} | more) + "\n"


def test_words_of_nodes_in_old_lines_are_printable_and_huge_numbers_are_none(tmp_path):
    failure = {"node": "a\x1b[2J\u202e", "reason": "b\x7f\n\b"}
    text = line(0, failures=[failure], train={"x\x1b": 1.0}, wall_s=10**400)
    raw = line(1, failures=[failure]).encode().replace(b"\\u001b", b"\x7f")
    (tmp_path / "history.jsonl").write_bytes(text.encode() + raw)
    first, second = read_history(tmp_path).rounds
    assert first["failures"] == [{"node": "a?[2J?", "reason": "b???"}]
    assert second["failures"][0]["node"] == "a?[2J?"
    assert first["train"] == {"x?": 1.0}
    assert np.isnan(read_history(tmp_path).column("wall_s")).all()


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_folder_without_a_run_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"run directory must (exist|hold a history.jsonl), got"):
        read_history(tmp_path / name)


def test_metrics_by_name():
    rounds = (
        {"global": {"accuracy": 0.1}, "cd_grab": {"bound": 9, "name": "x"}},
        {"train": {"loss": 2, "accuracy": 0.3}, "latency": {"node-0": 1.0}},
        {"global": None, "evaluate": {"eval-acc": None}, "cd_grab": {"bound": 7}},
        {"global": {"list": [1]}, "cd_grab": {"steps": {"a": 1, "b": None, "c": 4}}},
    )
    history = History(tuple({"round": i} | record for i, record in enumerate(rounds)))
    nan = np.nan
    expected = {
        "accuracy": [0.1, nan, nan, nan],
        "loss": [nan, 2, nan, nan],
        "train/accuracy": [nan, 0.3, nan, nan],
        "cd_grab/bound": [9, nan, 7, nan],
        "cd_grab/steps": [nan, nan, nan, 2.5],
    }
    assert [*history.names] == [*expected]
    for name, values in expected.items():
        np.testing.assert_array_equal(history.metric(name), values)
    assert history.range_of("cd_grab/steps")[3].tolist() == [1, 2.5, 4]
    for name in ("eval-acc", "cd_grab/name", "cd_grab/", "list", ""):
        with pytest.raises(ValueError, match="be in the history, which has accuracy, loss"):
            history.metric(name)


@pytest.mark.parametrize(
    ("metrics", "main"),
    [
        ({"global": {"loss": 1.0, "accuracy": 0.5}}, "accuracy"),
        ({"global": {"loss": 1.0}, "evaluate": {"eval-acc": 0.5}}, "eval-acc"),
        ({"train": {"lr": 0.1, "train-loss": 1.0}}, "train-loss"),
        ({"train": {"lr": 0.1}}, "lr"),
        ({"tifl": {"tier_accuracy": [0.5]}}, None),
    ],
)
def test_main_metric_is_accuracy_first(metrics, main):
    assert History(({"round": 0, **metrics},)).main_metric() == main


def history_of(name, values):
    rounds = [
        {"round": i, "virtual_s": 2.5 * i, "wall_s": 7.0 * i, "global": {name: value}}
        for i, value in enumerate(values)
    ]
    return History(tuple(rounds))


@pytest.mark.parametrize(
    ("name", "target", "clock", "cost"),
    [
        ("accuracy", 0.5, "virtual_s", 5.0),
        ("accuracy", 0.5, "wall_s", 14.0),
        ("accuracy", 0.95, "round", None),
        ("loss", 0.1, "round", None),  # an untrained model does not count
        ("loss", 0.5, "round", 2.0),
        ("loss", 0.05, "round", None),
    ],
)
def test_time_to_target_by_hand(name, target, clock, cost):
    history = history_of(name, [0.1, None, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9])
    judge = Judge(name, target, clock)
    assert result_of(history, judge).to_target == cost
    timeless = History(tuple({**record, clock: None} for record in history.rounds))
    assert first_reach(timeless, judge) is None
