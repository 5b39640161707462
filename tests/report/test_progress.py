import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_hetero.report.history import History, best_round, settled_value, time_to_target

values = st.lists(
    st.one_of(st.none(), st.floats(0, 1, allow_nan=False)), min_size=1, max_size=30
).filter(lambda given: any(value is not None for value in given))
names = st.sampled_from(["accuracy", "loss"])


def history_of(name, given):
    return History(
        tuple(
            {"round": i, "virtual_s": 2.5 * i, "wall_s": 7.0 * i, "global": {name: value}}
            for i, value in enumerate(given)
        )
    )


@pytest.mark.parametrize(
    ("name", "target", "clock", "cost"),
    [
        ("accuracy", 0.5, "virtual_s", 5.0),
        ("accuracy", 0.5, "wall_s", 14.0),
        ("accuracy", 0.6, "round", 4.0),
        ("accuracy", 0.0, "round", 0.0),
        ("accuracy", 0.95, "round", None),
        ("loss", 0.1, "round", 0.0),
        ("loss", 0.05, "round", None),
    ],
)
def test_time_to_target_by_hand(name, target, clock, cost):
    history = history_of(name, [0.1, None, 0.5, 0.4, 0.9])
    assert time_to_target(history, name, target, clock) == cost


@settings(deadline=None)
@given(names, values, st.floats(0, 1))
def test_time_to_target_agrees_with_a_plain_search(name, given, target):
    expected = None
    for number, value in enumerate(given):
        if value is not None and (value <= target if name == "loss" else value >= target):
            expected = float(number)
            break
    assert time_to_target(history_of(name, given), name, target, "round") == expected


@settings(deadline=None)
@given(names, values)
def test_the_settled_value_was_reached_and_is_no_better_than_the_best(name, given):
    history = history_of(name, given)
    settled = settled_value(history, name)
    best = history.metric(name)[best_round(history, name)]
    assert settled in given
    assert settled >= best if name == "loss" else settled <= best
    assert time_to_target(history, name, settled) is not None


def test_one_lucky_round_does_not_set_the_settled_value():
    assert (
        settled_value(history_of("accuracy", [0.1, 0.5, 0.6, 0.6, 0.62, 0.99]), "accuracy") == 0.6
    )
    assert settled_value(history_of("loss", [9, 3.0, 2.0, 2.1, 2.2, 0.1]), "loss") == 2.1


def test_of_an_even_number_the_worse_of_the_middle_is_settled():
    assert settled_value(history_of("accuracy", [0.2, 0.4]), "accuracy") == 0.2
    assert settled_value(history_of("loss", [0.2, 0.4]), "loss") == 0.4


def test_a_round_without_a_clock_is_not_counted_as_reached():
    history = History(({"round": 0, "global": {"accuracy": 0.9}},))
    assert time_to_target(history, "accuracy", 0.5, "virtual_s") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clock": "moon"}, "clock must be one of virtual_s, wall_s, round, got 'moon'"),
        ({"target": np.nan}, "target must be a finite number, got nan"),
        ({"metric": "f1"}, "metric must be in the history, which has accuracy, got 'f1'"),
    ],
)
def test_bad_questions_are_refused(change, words):
    arguments = {"metric": "accuracy", "target": 0.5, "clock": "round"} | change
    with pytest.raises(ValueError, match=words):
        time_to_target(history_of("accuracy", [0.5]), **arguments)
