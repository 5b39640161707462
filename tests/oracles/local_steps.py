"""Naive twins: the samples of highest loss, and a round of FedNova."""

import numpy as np


def high_loss_samples(losses, count):
    """Sort all samples of known loss, the lower index first at ties."""
    known = [index for index, loss in enumerate(losses) if not np.isnan(loss)]
    return sorted(known, key=lambda index: (-losses[index], index))[:count]


def fednova(before, models, steps, weights):
    """Average the updates per step and take as many steps as the nodes on average."""
    shares = np.array(weights) / sum(weights)
    mean_steps = sum(share * count for share, count in zip(shares, steps, strict=True))
    after = np.array(before, dtype=np.float64)
    for share, count, model in zip(shares, steps, models, strict=True):
        after += mean_steps * share * (np.asarray(model, np.float64) - before) / count
    return after
