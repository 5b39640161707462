"""What each app's settings refuse, and the key of the run-config that they name."""

import tomllib

import pytest
from app_run import APPS, SETTINGS, settings_of

REFUSALS = {
    "biased-local-sgd": [
        ({"algorithm": "fednova", "shared-data": True}, "shared-data must be false with fednova"),
        ({"gamma": 2.0}, "gamma must be a number in"),
        ({"high-loss-fraction": 1.5}, "high-loss-fraction must be a number in"),
        ({"budget": "deadline", "gamma": 0.5}, "gamma must be left out with"),
    ],
    "cd-grab": [
        ({"mode": "exact", "method": "d-rr"}, "mode must be sketched without cd-grab"),
        ({"fraction-train": 0.0}, r"fraction-train must lie in \(0, 1\]"),
        ({"num-units": 1}, "num-units must be a whole number of at least 2"),
    ],
    "mercury": [
        ({"resharding": "importance", "sampling": "uniform"}, "resharding must go with a sampling"),
    ],
    "pgd": [
        ({"renewal-share": 0.0}, "renewal-share must be a number in"),
        ({"step-ratio": 1.5}, "step-ratio must be a number in"),
    ],
    "fleet": [
        ({"sampler": "pgd", "order": "id-grab"}, "sampler must be uniform with order=id-grab"),
        ({"fraction-evaluate": 1.5}, "fraction-evaluate must be a number in"),
        ({"rate-correction": 2.0}, "rate-correction must be a number in"),
        ({"selection": "tifl"}, "selection must be random or all with engine=fedslice"),
        ({"order": "cd-grab"}, "order .*id-grab is the same"),
        ({"sampler": "top-loss"}, "sampler must be without top-loss with engine=fedslice"),
        ({"steps": "epochs"}, "steps must be auto with engine=fedslice.*fast-steps"),
        ({"weighting": "sqrt"}, "weighting must be auto with engine=fedslice.*rate-correction"),
        ({"buffer-size": 2}, "buffer-size must be 0 with engine=fedslice.*engine=buffered"),
    ],
}
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
REFUSALS["fleet"] += [({"engine": engine, **more}, words) for engine, more, words in ENGINES]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_refusals(name):
    for config, words in REFUSALS[name]:
        with pytest.raises(ValueError, match=words):
            settings_of(name).from_run_config(config)


@pytest.mark.parametrize("name", ["cd-grab", "pgd", "fleet"])
def test_defaults_are_those_of_the_pyproject(name):
    text = (APPS / name / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert settings_of(name).from_run_config(config) == settings_of(name)()
