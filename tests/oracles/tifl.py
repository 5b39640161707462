"""Naive twins of TiFL's algorithms, in plain Python."""

from itertools import combinations

import numpy as np


def tie_averaged_rank(accuracy):
    """ChangeProbs in words: m less those lower, less half of the others tied."""
    m = len(accuracy)
    weights = []
    for mine in accuracy:
        lower = sum(other < mine for other in accuracy)
        higher = sum(other > mine for other in accuracy)
        weights.append(m - lower - (m - 1 - lower - higher) / 2)
    return np.array(weights) / (m * (m + 1) / 2)


def accumulated_dropouts(rounds, t_max):
    """Section 4.2 step by step: L_i >= sync_rounds * T_max."""
    accumulated = np.zeros(rounds.shape[1])
    for row in rounds:
        for node, seconds in enumerate(row):
            accumulated[node] += t_max if np.isnan(seconds) else min(seconds, t_max)
    return accumulated >= len(rounds) * t_max - 1e-9


def redraw_until_credits(probs, credits, rng):
    """Algorithm 2, l. 8-14 as printed, where it ends."""
    while True:
        tier = rng.choice(len(probs), p=probs)
        if credits[tier] > 0:
            return tier


def mean_of_all_draws(latency, num_selected):
    """Expected slowest of a draw, over all draws."""
    draws = list(combinations(latency, min(num_selected, len(latency))))
    return sum(max(draw) for draw in draws) / len(draws)
