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


def test_a_word_glides_from_vowel_to_vowel(monkeypatch):
    monkeypatch.setattr(speech, "NOISE", 0.0)
    waves = speech.spoken("ua", np.ones(40), np.full(40, 120.0), np.random.default_rng(0))
    power = np.abs(np.fft.rfft(waves[:, : SAMPLES // 2])) ** 2  # mostly the first vowel
    later = np.abs(np.fft.rfft(waves[:, SAMPLES // 2 :])) ** 2
    hertz = np.fft.rfftfreq(SAMPLES // 2, 1 / RATE)
    low, high = ((hertz > a) & (hertz < b) for a, b in ((200, 450), (600, 900)))
    ratio = [p[:, low].sum() / p[:, high].sum() for p in (power, later)]
    assert ratio[0] > 2 * ratio[1]


def test_words_are_balanced_and_the_same_each_time():
    source = open_source("speech")
    counts = [np.bincount(split.labels).tolist() for split in (source.train, source.test)]
    assert counts == [[160] * len(WORDS), [40] * len(WORDS)]
    how = np.ones(2), np.full(2, 9.0)
    twice = [speech.spoken("ia", *how, np.random.default_rng(1)) for _ in range(2)]
    np.testing.assert_array_equal(*twice)
