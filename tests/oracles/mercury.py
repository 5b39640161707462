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
        left, product = 1.0, 1.0
        for group in path:
            product *= probs[group] / left
            left -= probs[group]
        total += product
    return total


def flat_probs(importance, mixing):
    """Eq. 7 over all samples with a share of uniform draws, sample by sample."""
    total, num = sum(importance), len(importance)
    if total == 0:
        return np.full(num, 1 / num)
    return np.array([(1 - mixing) * x / total + mixing / num for x in importance])


def match_naively(offers, rng):
    """Look through all nodes for each swap of :func:`flwr_hetero.mercury.resharding.match`."""

    def pick(nodes):
        return nodes[int(rng.integers(len(nodes)))]

    left = {node: rng.permutation(slots).tolist() for node, slots in sorted(offers.items())}
    swaps = []
    while len(left := {node: slots for node, slots in left.items() if slots}) > 1:
        most = max(len(slots) for slots in left.values())
        first = pick([n for n, slots in left.items() if len(slots) == most])
        others = {node: slots for node, slots in left.items() if node != first}
        most = max(len(slots) for slots in others.values())
        second = pick([n for n, slots in others.items() if len(slots) == most])
        swaps.append(((first, left[first].pop()), (second, left[second].pop())))
    return swaps
