import math

import pytest

from flwr_hetero.report.style import duration, figure, size, time_unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0004, "0.4 ms"),
        (59.4, "59.4 s"),
        (59.6, "1 min 00 s"),
        (119.7, "2 min 00 s"),
        (3599.7, "1 h 00 min"),
        (86399, "1 d 0 h"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "symbol"), [(0, "s"), (200, "min"), (20_000, "h"), (1e6, "d")])
def test_time_unit(seconds, symbol):
    assert time_unit(seconds).symbol == symbol


def test_figure_of_accuracies():
    assert figure("accuracy", 87.5) == "87.5"
    assert figure("accuracy", 1.0) == "100.0 %"


def test_size():
    assert [size(n) for n in (0, 999, 1000, math.nan)] == ["0 B", "999 B", "1 kB", "?"]
