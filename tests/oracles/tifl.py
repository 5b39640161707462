"""A naive twin of TiFL's estimate, in plain Python."""

from itertools import combinations


def mean_of_all_draws(latency, num_selected):
    """Expected slowest of a draw, over all draws."""
    draws = list(combinations(latency, min(num_selected, len(latency))))
    return sum(max(draw) for draw in draws) / len(draws)
