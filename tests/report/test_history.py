import json

import numpy as np
import pytest

from flwr_hetero.report.history import History, read_history


def test_rounds_come_in_order_and_bad_lines_are_noted(tmp_path):
    lines = ['{"round": 1, "virtual_s": 5.0}', "not json", "[1]", '{"virtual_s": 1}', ""]
    lines += ['{"round": 0}', '{"round": true}', '{"round": 2, "global": {"acc']
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path)
    assert [record["round"] for record in history.rounds] == [0, 1]
    assert history.last_round == 1
    assert [note.split(" and")[0] for note in history.notes] == [
        "line 2 is no round",
        "line 3 is no round",
        "line 4 is no round",
        "line 5 is no round",
        "line 7 is no round",
        "line 8 is torn",
    ]


def test_a_whole_history_has_no_notes(make_run, rounds_of):
    rounds = rounds_of(5)
    history = read_history(make_run(rounds=rounds))
    assert history.notes == ()
    assert list(history.rounds) == json.loads(json.dumps(rounds))


def test_of_a_round_that_stands_twice_the_later_line_counts(tmp_path):
    text = '{"round": 0, "wall_s": 1}\n{"round": 0, "wall_s": 2}\n'
    (tmp_path / "history.jsonl").write_text(text)
    history = read_history(tmp_path)
    assert history.column("wall_s").tolist() == [2.0]
    assert history.notes == ("round 0 stands twice; the later line counts",)


def test_an_empty_history_is_a_history(tmp_path):
    (tmp_path / "history.jsonl").touch()
    history = read_history(tmp_path)
    assert history.rounds == ()
    assert history.last_round == -1
    assert history.main_metric() is None


def test_bytes_that_are_no_text_do_not_stop_the_reader(tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b'{"round": 0}\n\xff\xfe\x00')
    assert read_history(tmp_path).last_round == 0


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("{tmp}/nowhere", "must exist, got '{tmp}/nowhere': check the path"),
        ("{tmp}/empty", "must hold a history.jsonl, got '{tmp}/empty': pass the output-dir"),
        ("{tmp}", "must hold a history.jsonl, got '{tmp}': did you mean {tmp}/run"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, make_run, directory, words):
    make_run("run", rounds=[])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="run directory") as caught:
        read_history(directory.format(tmp=tmp_path))
    assert words.format(tmp=tmp_path) in str(caught.value)


@pytest.fixture
def history():
    return History(
        (
            {"round": 0, "global": {"accuracy": 0.1}, "cd-grab": {"bound": 9, "name": "x"}},
            {"round": 1, "train": {"loss": 2, "accuracy": 0.3}, "latency": {"node-0": 1.0}},
            {"round": 2, "global": None, "evaluate": {"eval-acc": None}, "cd-grab": {"bound": 7}},
        )
    )


def test_metrics_are_found_by_name(history):
    assert history.metrics() == ["accuracy", "loss", "train/accuracy", "cd-grab/bound"]
    np.testing.assert_array_equal(history.metric("accuracy"), [0.1, np.nan, np.nan])
    np.testing.assert_array_equal(history.metric("train/accuracy"), [np.nan, 0.3, np.nan])
    np.testing.assert_array_equal(history.metric("loss"), [np.nan, 2, np.nan])
    np.testing.assert_array_equal(history.metric("cd-grab/bound"), [9, np.nan, 7])


@pytest.mark.parametrize("name", ["eval-acc", "cd-grab/name", "cd-grab/", ""])
def test_an_unknown_metric_is_refused_and_the_known_ones_named(history, name):
    with pytest.raises(ValueError, match="metric must be in the history, which has accuracy, loss"):
        history.metric(name)


@pytest.mark.parametrize(
    ("metrics", "main"),
    [
        ({"global": {"loss": 1.0, "accuracy": 0.5}}, "accuracy"),
        ({"global": {"loss": 1.0}, "evaluate": {"eval-acc": 0.5}}, "eval-acc"),
        ({"train": {"lr": 0.1, "train-loss": 1.0}}, "train-loss"),
        ({"train": {"lr": 0.1}}, "lr"),
        ({"tifl": {"actual_s": 1.0}}, None),
    ],
)
def test_a_run_is_judged_by_accuracy_first(metrics, main):
    assert History(({"round": 0, **metrics},)).main_metric() == main
