"""How the Mercury benchmark reads gains from its runs."""

import numpy as np
import pytest

from benchmarks.mercury import curves


def run(rise, round_s=1.0, rounds=100):
    """Rise by so much a round up to 0.8, and stay there."""
    numbers = range(rounds + 1)
    curve = {
        "round": list(numbers),
        "virtual_s": [n * round_s for n in numbers],
        "accuracy": [min(0.8, rise * n) for n in numbers],
    }
    return {"curve": curve, "seed": 0}


def test_a_target_is_reached_between_two_measurements():
    line = run(rise=0.02, round_s=3.0)
    assert curves.reached(line, 0.41, "round") == pytest.approx(20.5)
    assert curves.reached(line, 0.41, "virtual_s") == pytest.approx(61.5)
    assert np.isnan(curves.reached(line, 0.81, "round"))


def test_a_gain_is_a_ratio_of_times_to_what_uniform_holds():
    uniform, faster = run(rise=0.01), run(rise=0.02)
    assert curves.end_accuracy(uniform) == pytest.approx(0.8)
    assert curves.gain(uniform, uniform, 0.04) == 1.0
    assert curves.gain(faster, uniform, 0.1) == pytest.approx(2.0)
    assert curves.gain(run(rise=0.02, round_s=4.0), uniform, 0.1) == pytest.approx(0.5)
    assert curves.pooled_gain(faster, uniform) == pytest.approx(2.0, rel=0.1)


def test_a_target_never_reached_counts_as_reached_at_the_end():
    never = run(rise=0.001)
    assert curves.gain(never, run(rise=0.01), 0.04) == pytest.approx(0.76, rel=0.01)


def test_runs_are_compared_within_cell_and_seed():
    common = {"partition": "dirichlet", "alpha": 1.0, "nodes": 4, "data": "d", "rows": 1}
    common |= {"model": "m", "batch-size": 1, "learning-rate": 0.1, "method": "uniform"}
    slow, fast = common | {"fleet": "wifi-10", "seed": 1}, common | {"fleet": "wifi-50", "seed": 1}
    found = curves.cells([slow, fast, fast | {"seed": 0, "method": "bacc"}])
    assert [len(methods["uniform"]) for methods in found.values()] == [1, 1]
    (methods,) = (m for cell, m in found.items() if cell[0] == 50)
    assert curves.compared(methods["bacc"], methods["uniform"]) == []
    assert curves.compared([slow], methods["uniform"]) == [(slow, fast)]
