import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.baselines.adacomm import adaptive_steps


@pytest.mark.parametrize(
    ("loss", "previous", "expected"),
    [
        (1.0, 20, 10),  # not less than before by the loss (20): halve
        (0.49, 20, 14),
        (0.25, 14, 10),
        (0.25, 10, 5),
        (4.0, 5, 3),
        (0.0, 3, 1),
        (float("nan"), 7, 7),
        (1e-9, 1, 1),
    ],
)
def test_by_hand(loss: float, previous: int, expected: int) -> None:
    assert adaptive_steps(loss, 1.0, previous, first_steps=20) == expected


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 100))
def test_steps_never_grow(losses: list[float], first: int) -> None:
    steps = first
    for loss in losses:
        after = adaptive_steps(loss, 2.3, steps, first)
        assert 1 <= after <= steps
        steps = after


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1.0, 0.0, 5, 5), "first_loss must be positive"),
        ((1.0, float("nan"), 5, 5), "first_loss must be positive"),
        ((1.0, 1.0, 0, 5), "steps must be at least 1"),
        ((1.0, 1.0, 5, 0), "steps must be at least 1"),
        ((1.0, 1.0, 5, 5, 1.0), "shrink must lie in"),
    ],
)
def test_refuses(arguments: tuple[float, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        adaptive_steps(*arguments)  # type: ignore[arg-type]
