import math

import pytest

from flwr_hetero.report.style import duration, figure, size, time_unit


@pytest.mark.parametrize(
    ("write", "values"),
    [
        (duration, {0: "0 s", 0.0004: "0.4 ms", 59.4: "59.4 s", 59.6: "1 min 00 s"}),
        (duration, {119.7: "2 min 00 s", 3599.7: "1 h 00 min", 86399: "1 d 0 h", math.inf: "?"}),
        (time_unit, {0: "s", 200: "min", 20_000: "h", 1e6: "d"}),
        (size, {0: "0 B", 999: "999 B", 1000: "1 kB", math.nan: "?"}),
        (lambda value: figure("accuracy", value), {87.5: "87.5", 1.0: "100.0 %", math.nan: "?"}),
    ],
)
def test_figures_have_units(write, values):
    assert {value: write(value) for value in values} == values
