"""Data that need no download: series of several kinds."""

import numpy as np
from numpy.typing import NDArray

SERIES = "series"
SEASONS = (4, 7, 12, 24)
"""Steps of a season."""
TRENDS = (0.0, 0.5)
"""Growth over a window, as a share of the level."""
NUM_PER_KIND = 500
SERIES_NOISE = 0.1
"""Standard deviation of the noise, as a share of the level."""


def generated_series(length: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    r"""Generate windows of series; the label is the kind: season, growth, sine or saw-tooth.

    .. math:: x_t = L \left(1 + G t / T + A\, w((t + s) / P) + 0.1\, \epsilon_t \right)
    """
    rng = np.random.default_rng(0)
    kinds = [(p, g, jagged) for p in SEASONS for g in TRENDS for jagged in (False, True)]
    steps = np.arange(length)
    shape = (NUM_PER_KIND, 1)
    found = []
    for season, growth, jagged in kinds:
        # Levels differ by a factor of 100.
        level = 10 ** rng.uniform(1, 3, shape)
        amplitude = rng.uniform(0.2, 0.6, shape)
        start = rng.uniform(0, season, shape)
        phase = (steps + start) / season
        wave = 2 * (phase % 1) - 1 if jagged else np.sin(2 * np.pi * phase)
        noise = SERIES_NOISE * rng.standard_normal((NUM_PER_KIND, length))
        found.append(level * (1 + growth * steps / length + amplitude * wave + noise))
    labels = np.repeat(np.arange(len(kinds)), NUM_PER_KIND)
    return np.concatenate(found).astype(np.float32), labels
