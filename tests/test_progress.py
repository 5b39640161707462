import re
from logging import DEBUG, WARNING

import pytest
from toy import toy_app, toy_arrays

from flwr_hetero import progress
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.progress import Progress, bar
from flwr_hetero.strategy import Wrapper


def record(number, **more):
    return {"round": number, "virtual_s": 2.0 * number, "selected": ["a"], **more}


def test_time_of_a_round_is_since_the_one_before():
    lines = Progress(3)
    lines.see(record(0) | {"virtual_s": 1.5})  # profiling before round 1
    assert " 0.50 s " in lines.line(record(1))
    assert " 2.00 s  at    4.0 s " in lines.line(record(2))


def test_columns_are_aligned():
    lines = Progress(100)
    texts = [
        lines.line(record(number, tifl={"tier": tier}) | {"global": {"accuracy": accuracy}})
        for number, tier, accuracy in ((1, 0, 0.05), (9, None, 1.0), (100, 4, 0.5))
    ]
    assert len({text.index(" ETA") for text in texts}) == 1
    assert len({text.index("accuracy") for text in texts}) == 1
    assert "tier 4   1 nodes" in texts[2]
    assert "accuracy  50.0 %  best 100.0 %" in texts[2]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"global": {"loss": 0.5}, "evaluate": {"eval-acc": 0.75}}, "eval-acc  75.0 %"),
        ({"train": {"train-loss": 1.25}, "global": {"loss": 0.5}}, "loss     0.5  best    0.25"),
        ({"global": {"accuracy": 0.5}, "evaluate": {"accuracy": 0.25}}, "accuracy  50.0 %"),
        ({"train": {"num-steps": 3}}, "2.00 s                "),  # its place is kept free
        ({"failures": [{"node": n} for n in "bbcde"]}, "failed: b, c and 2 more"),
    ],
)
def test_metric_is_an_accuracy_else_a_loss(figures, words):
    lines = Progress(3)
    lines.line(record(1, **{"global": {"loss": 0.25}}))
    assert words in lines.line(record(2, **figures))


def test_time_left_is_by_rounds_after_the_first(monkeypatch):
    clock = iter((100.0, 110.0, 130.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Progress(20)  # of a resumed run: rounds 11, 12, 13
    ends = [lines.line(record(number)).partition("ETA ")[2] for number in (11, 12, 13)]
    assert ends == ["-", "1:20", "1:45"]


def test_no_bar_where_there_is_no_terminal(capsys):
    with bar(3) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_run_logs_one_line_a_round_and_each_kind_of_warning_thrice(caplog):
    def fails(message, context, call_next):
        if context.node_config["partition-id"] < 4:
            raise ValueError(f"disk of node {context.node_config['partition-id']} is full")
        return call_next(message, context)

    grid = LocalGrid(toy_app(mods=[fails]), profiles=[DeviceProfile()] * 6)
    Wrapper().start(grid, toy_arrays(), num_rounds=5)
    shown = [log for log in caplog.records if log.levelno > DEBUG and log.name == "flwr"]
    rounds = [log for log in shown if re.match(r"round \d/5", log.getMessage())]
    assert len(rounds) == 5
    assert all("failed: id-" in log.getMessage() for log in rounds)
    warnings = [log.getMessage() for log in shown if log.levelno == WARNING]
    assert sum("is full" in text for text in warnings) == 3
    assert len(shown) - len(rounds) - len(warnings) <= 2  # the header
    chatter = [log for log in caplog.records if "Received" in log.getMessage()]
    assert {log.levelno for log in chatter} == {DEBUG}
