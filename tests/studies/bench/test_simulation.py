"""Pairs of runs in a plain simulation: their plan, how they are compared, one real run."""

import pytest

from flwr_hetero_studies.core.plan import DIGITS, Data, Options
from flwr_hetero_studies.simulation import cases


def planned(seed):
    return list(cases.plan(Options(cases.SETTINGS, "data", seeds=[seed]), []))


def test_runs_of_a_pair_follow_each_other_and_take_turns():
    names = {seed: [trial.case["name"] for trial in planned(seed)][:4] for seed in (0, 1)}
    assert names == {0: ["FedSlice", "FedAvg"] * 2, 1: ["FedAvg", "FedSlice"] * 2}
    pairs = planned(0)
    assert len(pairs) == 24
    for own, base in zip(pairs[::2], pairs[1::2], strict=True):
        assert own.case | {"name": "FedAvg"} == base.case
        assert own.alone


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases.NAMES)
def test_a_run(name, tmp_path):
    options = Options(cases.SETTINGS | cases.FAST, DIGITS, fast=True)
    trial = next(each for each in cases.plan(options, []) if each.case["name"] == name)
    found = cases.run(trial.case, 0, Data(DIGITS, str(tmp_path)))
    assert len(found["curve"]["accuracy"]) == 2
