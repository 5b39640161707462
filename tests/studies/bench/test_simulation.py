"""Pairs of runs in a plain simulation: their plan, how they are compared, one real run."""

import pytest

from flwr_hetero_studies.core.plan import DIGITS, Data, Options
from flwr_hetero_studies.simulation import cases, report


def planned(seed):
    return list(cases.plan(Options(cases.SETTINGS, "data", seeds=[seed]), []))


def lines(seed, base, ours):
    """Make a pair of lines whose models have these accuracies, one second after the other."""
    found = []
    for name, accuracy, second_s in (("FedAvg", base, 1.0), ("FedSlice", ours, 0.8)):
        case = {"experiment": "SGD, IID, 2 workers", "name": name} | cases.SETTINGS
        case |= {"optimizer": "SGD", "rate": 0.3}
        seconds = [second_s * number for number in range(len(accuracy))]
        found.append({
            "case": case,
            "seed": seed,
            "metrics": {"load": 1.0},
            "curve": {"accuracy": accuracy, "seconds": seconds},
            "versions": {"flwr": "1"},
        })  # fmt: skip
    return found


def test_runs_of_a_pair_follow_each_other_and_take_turns():
    names = {seed: [trial.case["name"] for trial in planned(seed)][:4] for seed in (0, 1)}
    assert names == {0: ["FedSlice", "FedAvg"] * 2, 1: ["FedAvg", "FedSlice"] * 2}
    pairs = planned(0)
    assert len(pairs) == 24
    for own, base in zip(pairs[::2], pairs[1::2], strict=True):
        assert own.case | {"name": "FedAvg"} == base.case
        assert own.alone


def test_by_time_takes_the_last_model_that_was_there():
    base, ours = lines(0, [0.1, 0.2, 0.4, 0.6], [0.1, 0.3, 0.5, 0.7])
    assert report.by_round((ours, base), 2) == pytest.approx(10)
    # FedAvg ends round 3 after 3 s, and FedSlice's third round has ended after 2.4 s.
    assert report.by_time((ours, base), 3) == pytest.approx(10)
    # After 2 s FedSlice has ended two rounds.
    assert report.by_time((ours, base), 2) == pytest.approx(10)
    assert report.round_s((ours, base)) == pytest.approx(0.8)


def test_report_says_where_it_is_behind(tmp_path):
    ahead = [0.1, 0.3, 0.5, 0.7]
    every = lines(0, ahead, [0.1, 0.2, 0.4, 0.8]) + lines(1, ahead, [0.1, 0.2, 0.41, 0.8])
    parts = report.report(every, tmp_path)
    assert "SGD, IID, 2 workers, round 2 (-9.5, beyond chance)" in parts["verdicts"]
    assert "round 3" not in parts["verdicts"]
    assert parts["ahead"] == "2 of 4"
    # Two pairs, 10 and 9 points behind: Student's t makes 12.7 times half of a point of them.
    assert "-9.5 (-15.9 to -3.1)" in parts["by_round"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.NAMES)
def test_a_run(name, tmp_path):
    options = Options(cases.SETTINGS | cases.FAST, DIGITS, fast=True)
    trial = next(each for each in cases.plan(options, []) if each.case["name"] == name)
    found = cases.run(trial.case, 0, Data(DIGITS, str(tmp_path)))
    assert len(found["curve"]["accuracy"]) == 2
