"""The page of the samplers: chance gains nothing, half the time is a gain of two."""

import numpy as np
import pytest

from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.samplers import cases, report


def line(name, seed, averaged, **case):
    points = list(range(1, len(averaged) + 1))
    curve = {"cost": points, "accuracy": list(averaged), "averaged": list(averaged)}
    case = {"experiment": "race", "name": name, "task": "digits", "rate": 0.1, "epochs": 3} | case
    metrics = {"examples_a_step": 16.0, "took_s": 1.0}
    return {"case": case, "seed": seed, "metrics": metrics, "curve": curve, "versions": {}}


def noisy(name, seed, rng, slope=0.02):
    return line(name, seed, np.minimum(0.9, slope * np.arange(60)) + 0.004 * rng.normal(size=60))


def test_a_second_uniform_run_gains_nothing():
    rng = np.random.default_rng(0)
    both = [[noisy(name, s, rng) for s in range(40)] for name in (cases.BASE, cases.AGAIN)]
    found = report.gains(both[1], both[0], "averaged")
    assert np.exp(np.mean(np.log(found))) == pytest.approx(1.0, abs=0.02)


def test_half_the_time_is_a_gain_of_two():
    base = [line(cases.BASE, 0, np.minimum(0.8, 0.02 * np.arange(60)))]
    quick = [line("mercury", 0, np.minimum(0.8, 0.04 * np.arange(60)))]
    assert report.gains(quick, base, "averaged") == [pytest.approx(2.0, rel=0.1)]
    never = [line("mercury", 0, np.full(60, 0.1))]
    assert report.gains(never, base, "averaged")[0] == pytest.approx(40 / 60, rel=0.06)


def test_a_task_may_take_the_rates_of_another():
    lines = []
    options = Options(cases.SETTINGS, "fashion_mnist")
    for _ in range(3):
        for run in cases.plan(options, lines):
            times = {f"{n}_ms": 1.0 for n in ("step", "half_step", *cases.METHODS)}
            better = float(run.case.get("rate") == 0.3)
            lines.append(line("", run.seed, [better] * 3) | {"case": run.case, "metrics": times})
    large = [x["case"] for x in lines if x["case"].get("task") == "60,000 images, cnn"]
    assert {case["experiment"] for case in large} == {"race"}
    assert {case["rate"] for case in large} == {0.3}
    assert {case["rows"] for case in large} == {60000}


def test_averaging_is_held_against_the_last_model_at_its_own_rate():
    base = line(cases.BASE, 0, np.minimum(0.8, 0.04 * np.arange(60)), rate=0.3)
    base["curve"]["accuracy"] = [0.1] * 60
    own_rate = line(cases.LAST, 0, np.minimum(0.8, 0.01 * np.arange(60)))
    own_rate["curve"]["accuracy"] = list(np.minimum(0.8, 0.02 * np.arange(60)))
    found = report.averaging([base, own_rate])
    assert "| digits | 0.1 | 0.3 | 80.0 | 80.0 | 1.88 |" in found["table"]
    assert (found["enough"], found["least"]) == (1, 1)
