"""FedSlice's own rules: slices, buffer, average."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_hetero.slices.algorithm import FIXED_SHARE, largest_step, new_part, slice_steps, spread_of

TIMES = st.floats(1e-3, 1e3)


@given(quick_s=TIMES, step_s=TIMES, fixed_s=TIMES)
def test_fixed_cost_is_at_most_a_fifth_of_a_slice_of_whole_steps(quick_s, step_s, fixed_s):
    (steps,) = slice_steps(quick_s, [step_s], [fixed_s], [np.inf])
    compute_s = (steps + 1) * step_s  # a step more would be too long
    assert fixed_s <= FIXED_SHARE * (fixed_s + compute_s) * (1 + 1e-6)
    assert compute_s >= quick_s * (1 - 1e-6)


@given(quick_s=TIMES, step_s=TIMES, most=st.integers(1, 50))
def test_a_slice_is_never_longer_than_the_job_in_fedavg(quick_s, step_s, most):
    (steps,) = slice_steps(quick_s, [step_s], [1e6], [most])
    assert steps == most


def test_nodes_of_unknown_speed_take_two_steps_and_no_more_than_their_job():
    found = slice_steps(np.inf, [np.nan, np.nan, 9.0], [np.nan, 3.0, 0.0], [np.inf, 1, 50])
    assert found.tolist() == [2, 1, 50]


@pytest.mark.parametrize("window", [1, 5, 32])
def test_average_is_of_the_root_of_few_models_and_of_the_window_of_many(window):
    count = 2000
    share = []
    for model in range(1, count + 1):
        part = new_part(model, window)
        share = [(1 - part) * each for each in share] + [part]
    ages = np.arange(count)[::-1]
    assert sum(share) == pytest.approx(1)
    assert ages @ share == pytest.approx(window - 1, rel=1e-3, abs=1e-9)
    parts = [new_part(model, 10**9) for model in range(1, 801)]
    early = [
        part * np.prod([1 - later for later in parts[i + 1 :]]) for i, part in enumerate(parts)
    ]
    assert np.arange(800)[::-1] @ early == pytest.approx(1600**0.5 - 1, rel=0.05)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_all_in_flight_together_move_the_model_by_a_slice_of_a_quick_node(
    steps, num_updates, momentum
):
    in_flight = max(len(steps), num_updates)
    times = in_flight / num_updates  # server updates until each node has replied once
    moved = (
        times * largest_step(spread_of(steps), num_updates, in_flight, momentum) * np.mean(steps)
    )
    # momentum repeats each update, 1 + 0.9 + 0.81 + ..., the later times on a model that has moved
    repeated = moved / (1 - momentum)
    assert repeated * (1 + momentum) == pytest.approx(np.quantile(steps, 0.9))


def test_before_any_node_was_timed_steps_count_as_equal():
    assert largest_step(spread_of([]), 2, 4) == 0.5
