"""Naive twins of Mercury's draws."""

from itertools import permutations

import numpy as np


def group_probs(steps, beta):
    """Eq. 6, by its words."""
    powers = np.exp(beta * (steps - steps.max()))
    return powers / powers.sum()


def successive(probs, chosen):
    """Probability that successive draws without replacement give this set."""
    total = 0.0
    for path in permutations(chosen):
        left = 1.0
        product = 1.0
        for group in path:
            product *= probs[group] / left
            left -= probs[group]
        total += product
    return total


def flat_probs(importance, mixing):
    """Eq. 7 over all samples with a share of uniform draws, sample by sample."""
    total = sum(importance)
    num = len(importance)
    if total == 0:
        return np.full(num, 1 / num)
    return np.array([(1 - mixing) * x / total + mixing / num for x in importance])
