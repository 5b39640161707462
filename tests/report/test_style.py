import math

import pytest

from flwr_hetero.report.style import TIER_RAMP, duration, figure, size, tier_colours, time_unit


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


def test_time_unit():
    assert [time_unit(s).symbol for s in (0, 200, 20_000, 1e6)] == ["s", "min", "h", "d"]


def test_figure_and_size():
    assert [figure("accuracy", n) for n in (87.5, 1.0)] == ["87.5", "100.0 %"]
    assert [size(n) for n in (0, 999, 1000, math.nan)] == ["0 B", "999 B", "1 kB", "?"]


def test_tier_colours_go_from_fast_to_slow():
    assert tier_colours(5) == list(TIER_RAMP)
    assert tier_colours(1) == [TIER_RAMP[0]]
    assert len(set(tier_colours(12))) == 12
