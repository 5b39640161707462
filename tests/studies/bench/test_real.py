"""The race on real nodes: its plan, what lines keep, devices as measured, and how it is judged."""

import pytest

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.real import cases, race

NODES = {"node-0": {"message_s": 3.0, "train_s": 2.0, "first_s": [5.0, 4.0]}}


def line(trial, target_s, seconds=(1.0, 50.0, 100.0), target=0.8):
    metrics = {"target": target, "target_s": target_s, "nodes": NODES, "replies": 9, "load": 0.1}
    metrics |= {"end": 0.81, "end_slow": 0.805}
    curve = {"seconds": list(seconds), "accuracy": [0.1, 0.5, 0.81], "bytes": [0, 1, 2_000_000]}
    return {"case": trial.case, "seed": trial.seed, "metrics": metrics, "curve": curve,
            "versions": {"flwr": "1"}}  # fmt: skip


def planned(lines, **options):
    return list(cases.plan(Options(cases.SETTINGS, "data", **{"seeds": [0], **options}), lines))


# --- the plan -------------------------------------------------------------------------------


def test_fedavg_comes_first_and_sets_target_and_end_of_the_others():
    first = planned([])
    assert {trial.case["name"] for trial in first} == {"FedAvg"}
    assert first[0].label == "light-warm/FedAvg"
    assert all(trial.alone for trial in first), "none disturbs another"
    then = planned([line(first[0], 90.0)])
    assert [trial.label for trial in then][:2] == ["light-warm/FedAvg", "light-warm/FedSlice"]
    assert then[1].given == {"target": 0.8, "budget_s": 120.0}
    others = {trial.label for trial in then} - {trial.label for trial in first}
    assert {label.split("/")[0] for label in others} == {"light-warm", "foretold-light-warm"}


# --- what a line keeps ----------------------------------------------------------------------


def history(*points, slow_s=10.0):
    """Make a run: wall seconds and accuracy of each line; two nodes answer, one reply is lost."""
    lines = []
    for number, (wall_s, accuracy) in enumerate(points):
        parts = {"wait": {"node-0": 1.0, "node-1": 2.0}, "start": {"node-1": 3.0}}
        parts["train"] = {"node-0": 4.0 + number, "node-1": slow_s}
        parts["steps"] = {"node-0": 3.0, "node-1": 9.0}
        one = {"round": number, "wall_s": wall_s, "global": {"accuracy": accuracy}}
        one |= {"bytes_down": 10, "bytes_up": 5 * number, "failures": [{}] if number == 2 else []}
        asked = {"selected": ["node-0", "node-1"], "seconds": parts} if number else {"selected": []}
        lines.append(one | asked)
    return lines


def test_target_is_a_point_below_the_end_and_between_two_points():
    run = history((1.0, 0.1), (11.0, 0.5), (21.0, 0.9), (31.0, 0.8))
    found = race.found_in(run, None)
    assert found["metrics"]["target"] == 0.79
    assert found["metrics"]["target_s"] == pytest.approx(11.0 + 10 * 0.29 / 0.3, abs=0.06)
    assert found["curve"]["seconds"] == [1.0, 11.0, 21.0, 31.0]
    assert found["curve"]["bytes"] == [10, 25, 45, 70]
    assert (found["metrics"]["replies"], found["metrics"]["failures"]) == (5, 1)


def test_one_point_at_the_target_may_be_luck():
    run = history((1.0, 0.1), (11.0, 0.9), (21.0, 0.3), (31.0, 0.9), (41.0, 0.9))
    assert race.found_in(run, 0.6)["metrics"]["target_s"] == 26.0
    assert race.found_in(run[:4], 0.6)["metrics"]["target_s"] is None
    # FedAvg has what its last point has
    assert race.found_in(run[:4], None)["metrics"]["target_s"] == pytest.approx(30.8, abs=0.06)
