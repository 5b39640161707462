"""How the TiFL benchmark reads "time to target" from its runs."""

import numpy as np
import pytest

from benchmarks.tifl import curves


def line(seed, clock_s, accuracy, profiling_s=0.0):
    return {"seed": seed, "clock_s": clock_s, "accuracy": accuracy, "profiling_s": profiling_s}


def test_accuracy_holds_until_the_next_round_ends():
    time, curve = curves.mean_curve([line(0, [0, 50, 100], [0.0, 0.6, 0.9])], {0: 100.0})
    at = dict(zip(np.round(time, 5).tolist(), curve.tolist(), strict=True))
    assert at[0.499] == 0.0
    assert at[0.5] == pytest.approx(0.3)  # mean of the two rounds so far
    assert at[0.999] == pytest.approx(0.3)
    assert at[1.0] == pytest.approx(0.5)


def test_each_seed_runs_in_its_own_time_and_ends_where_one_ends():
    lines = [line(0, [0, 50], [0.0, 1.0]), line(1, [0, 200], [0.0, 1.0])]
    time, curve = curves.mean_curve(lines, {0: 100.0, 1: 200.0})
    assert np.nanmax(curve) == pytest.approx(0.25)  # seed 0 at 0.5; seed 1 still at 0
    assert np.isnan(curve[time > 0.5]).all()


def test_profiling_delays_the_whole_curve():
    run, unit_s = [line(0, [0, 50], [0.9, 0.9], profiling_s=10)], {0: 100.0}
    assert curves.time_to(0.9, *curves.mean_curve(run, unit_s)) == 0.0
    assert curves.time_to(0.9, *curves.mean_curve(run, unit_s, profiling=True)) == 0.1


def test_a_target_out_of_reach_is_never():
    assert np.isnan(curves.time_to(0.95, np.array([0, 1]), np.array([0.5, 0.9])))


def test_final_accuracy_is_the_mean_of_the_last_rounds():
    lines = [line(0, [], [0.0, *[0.8] * 10]), line(1, [], [0.6] * 10)]
    assert curves.final_accuracy(lines) == pytest.approx(0.7)
