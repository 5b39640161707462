"""A naive twin: the samples of highest loss."""

import numpy as np


def high_loss_samples(losses, count):
    """Sort all samples of known loss, the lower index first at ties."""
    known = [index for index, loss in enumerate(losses) if not np.isnan(loss)]
    return sorted(known, key=lambda index: (-losses[index], index))[:count]
