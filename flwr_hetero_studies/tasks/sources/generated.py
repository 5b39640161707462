"""Data that need no download: series of several kinds, and words as log-mel."""

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
    steps, shape = np.arange(length), (NUM_PER_KIND, 1)
    found = []
    for season, growth, jagged in kinds:
        # sizes differ by a factor of 100: forecasts have to scale
        level = 10 ** rng.uniform(1, 3, shape)
        amplitude, start = rng.uniform(0.2, 0.6, shape), rng.uniform(0, season, shape)
        phase = (steps + start) / season
        wave = 2 * (phase % 1) - 1 if jagged else np.sin(2 * np.pi * phase)
        noise = SERIES_NOISE * rng.standard_normal((NUM_PER_KIND, length))
        found.append(level * (1 + growth * steps / length + amplitude * wave + noise))
    labels = np.repeat(np.arange(len(kinds)), NUM_PER_KIND)
    return np.concatenate(found).astype(np.float32), labels


# --- speech --------------------------------------------------------------------------------

SPEECH = "speech"
FORMANTS = {
    "i": (270, 2290, 3010), "e": (530, 1840, 2480), "a": (730, 1090, 2440),
    "o": (570, 840, 2410), "u": (300, 870, 2240),
}  # fmt: skip
"""Hz, of American vowels: Peterson and Barney, "Control methods used in a study of the vowels"."""
WORDS = ("ia", "ai", "ua", "au", "ei", "ie", "oe", "eo", "ou", "uo")
LEVELS = (1.0, 0.6, 0.3)
"""Of the three formants."""
RATE, SAMPLES = 8000, 3200
"""Samples per second, and of a recording: 0.4 s."""
FRAME, HOP, BANDS = 256, 128, 24
NUM_PER_WORD, VOICES = 200, 20
NOISE = 0.4
"""Standard deviation of the noise, as a share of the loudest words."""


def generated_speech() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Generate words as (words, bands, frames) of log-mel; the label is the word."""
    rng = np.random.default_rng(0)
    tract, pitch = rng.uniform(0.85, 1.2, VOICES), rng.uniform(90, 250, VOICES)
    frames = []
    for word in WORDS:
        voice = rng.integers(VOICES, size=NUM_PER_WORD)
        frames.append(log_mel(spoken(word, tract[voice], pitch[voice], rng)))
    labels = np.repeat(np.arange(len(WORDS)), NUM_PER_WORD)
    return np.concatenate(frames), labels


def spoken(
    word: str, tract: NDArray[np.float64], pitch: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float32]:
    r"""Generate waveforms (len(tract), SAMPLES) of a word by voices of some tract and pitch.

    .. math:: x(t) = \cos^2(\pi p t) \sum_k A_k \sin\Big(2\pi \int_0^t F_k\Big) + \mathrm{noise}
    """
    # a word glides half-way from one vowel to another; a voice changes its formants' frequencies
    shape, time = (len(tract), 1), (np.arange(SAMPLES) / RATE).astype(np.float32)

    def drawn(low: float, high: float) -> NDArray[np.float32]:
        return rng.uniform(low, high, shape).astype(np.float32)

    begin, length, loudness = drawn(0, 0.15), drawn(0.15, 0.25), drawn(0.3, 1)
    share = 1 / (1 + np.exp((begin + length / 2 - time) / np.float32(0.02)))
    waves = np.zeros((len(tract), SAMPLES), dtype=np.float32)
    for start, end, level in zip(FORMANTS[word[0]], FORMANTS[word[1]], LEVELS, strict=True):
        factor = tract * (1 + 0.03 * rng.standard_normal(len(tract)))
        turns = factor[:, None].astype(np.float32) * (start + share * (end - start)) / RATE
        waves += level * np.sin(2 * np.pi * np.cumsum(turns, axis=1))
    waves *= np.cos(np.pi * pitch[:, None].astype(np.float32) * time) ** 2 / waves.std()
    # a word begins somewhere, and is silent before and after
    waves *= loudness * ((time >= begin) & (time < begin + length))
    waves += NOISE * rng.standard_normal(waves.shape, dtype=np.float32)
    return waves


def log_mel(waves: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn waveforms (count, samples) into the logarithm of their power by bands and frames."""
    # views: frames overlap by half
    frames = np.lib.stride_tricks.sliding_window_view(waves, FRAME, axis=1)[:, ::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(FRAME), axis=2)) ** 2
    bands = np.einsum("nfk,bk->nbf", power, mel_bands())
    levels: NDArray[np.float32] = np.log(bands + 1e-3).astype(np.float32)
    return levels


def mel_bands() -> NDArray[np.float64]:
    """Make triangular bands, equally wide in mel, as weights of frequencies: (BANDS, bins)."""
    highest = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, BANDS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(FRAME, 1 / RATE)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (hertz - low) / (mid - low), (high - hertz) / (high - mid)
    return np.clip(np.minimum(rise, fall), 0, None)
