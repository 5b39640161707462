import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.client.timing import Pace, smooth
from flwr_hetero.mercury.algorithm import group_size, speedup

SECONDS = st.floats(0, 1e6)


def test_the_group_follows_a_changing_link_within_three_rounds() -> None:
    idle_s, sizes = 10.0, []
    for _ in range(3):
        idle_s = smooth(idle_s, 1.0)
        sizes.append(group_size(Pace(idle_s, 0.01), 10_000))
    assert sizes == [495, 292, 191]  # from 900 towards 90


@given(SECONDS, st.floats(1e-6, 10), st.integers(1, 10**6))
def test_a_group_fits_into_the_idle_time(idle_s: float, score_s: float, samples: int) -> None:
    size = group_size(Pace(idle_s, score_s), samples)
    assert 0 <= size <= samples
    assert size * score_s <= idle_s
    if size < samples:
        assert (size + 1) * score_s > 0.9 * idle_s * (1 - 1e-9)


def test_without_a_link_nothing_is_scored_and_with_free_scores_everything() -> None:
    assert group_size(Pace(0.0, 0.0), 50) == 0
    assert group_size(Pace(1.0, 0.0), 50) == 50


def test_speedup_by_hand() -> None:
    assert speedup(1.0, 0.0, 1.0, 1.0) == 1.0
    assert speedup(0.4, 2.0, 1.0, 3.0) == pytest.approx(1 / (0.4 * 1.5))
