"""What the settings of the fleet app refuse, and the key of the run-config that they name."""

import tomllib

import pytest
from app_run import FLEET_APP, settings_of

REFUSALS = [
    ({"sampler": "pgd", "order": "id-grab"}, "sampler must be uniform with order=id-grab"),
    ({"fraction-evaluate": 1.5}, "fraction-evaluate must be a number in"),
    ({"rate-correction": 2.0}, "rate-correction must be a number in"),
    ({"selection": "tifl"}, "selection must be random or all with engine=fedslice"),
    ({"order": "cd-grab"}, "order .*id-grab is the same"),
    ({"sampler": "top-loss"}, "sampler must be without top-loss with engine=fedslice"),
    ({"steps": "epochs"}, "steps must be auto with engine=fedslice.*fast-steps"),
    ({"weighting": "sqrt"}, "weighting must be auto with engine=fedslice.*rate-correction"),
    ({"buffer-size": 2}, "buffer-size must be 0 with engine=fedslice.*engine=buffered"),
]
"""Beside what tests/cli/test_run_config tries of every key: a negative number, nonsense."""
ENGINES = [
    ("rounds", {"steps": "epochs", "weighting": "steps"}, "the server must know the steps"),
    ("rounds", {"sampler": "top-loss", "weighting": "fednova"}, "sampler must be without top-loss"),
    ("rounds", {"concurrency": 3}, "concurrency must be 0 with engine=rounds"),
    ("rounds", {"buffer-size": 3}, "buffer-size must be 0 with engine=rounds"),
    ("rounds", {"rate-correction": 0.5}, "rate-correction must be 1.0 with .*weighting"),
    ("buffered", {"rate-correction": 0.5}, "rate-correction must be 1.0 with .*weighting"),
    ("buffered", {"concurrency": 3}, "concurrency must be 0 with selection=all"),
    ("fedcompass", {"steps": "slice"}, "steps must be epochs with engine=fedcompass"),
]
REFUSALS += [({"engine": engine, **more}, words) for engine, more, words in ENGINES]


def test_settings_refusals():
    for config, words in REFUSALS:
        with pytest.raises(ValueError, match=words):
            settings_of("fleet").from_run_config(config)


def test_defaults_are_those_of_the_pyproject():
    text = (FLEET_APP / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert settings_of("fleet").from_run_config(config) == settings_of("fleet")()
