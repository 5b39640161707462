import numpy as np
import pytest

from flwr_hetero_studies.tasks.sources import generated as speech
from flwr_hetero_studies.tasks.sources import open_source
from flwr_hetero_studies.tasks.sources.generated import BANDS, FRAME, HOP, RATE, SAMPLES, WORDS


@pytest.mark.parametrize("hertz", [300, 1000, 3000])
def test_a_tone_lies_in_its_band(hertz):
    tone = np.sin(2 * np.pi * hertz * np.arange(SAMPLES) / RATE)[None].astype(np.float32)
    [levels] = speech.log_mel(tone)
    assert levels.shape == (BANDS, 1 + (SAMPLES - FRAME) // HOP)
    mel = 2595 * np.log10(1 + np.array([hertz, RATE / 2]) / 700)
    centre = mel[0] / mel[1] * (BANDS + 1) - 1
    assert (abs(levels.argmax(axis=0) - centre) <= 1).all()


def test_words_are_balanced_and_the_same_each_time():
    source = open_source("speech")
    counts = [np.bincount(split.labels).tolist() for split in (source.train, source.test)]
    assert counts == [[160] * len(WORDS), [40] * len(WORDS)]
    how = np.ones(2), np.full(2, 9.0)
    twice = [speech.spoken("ia", *how, np.random.default_rng(1)) for _ in range(2)]
    np.testing.assert_array_equal(*twice)
