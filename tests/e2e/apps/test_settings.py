"""What each app's settings refuse, and the key of the run-config that they name."""

import tomllib

import pytest
from app_run import APPS, SETTINGS, settings_of

REFUSALS = {
    "biased-local-sgd": [
        ({"algorithm": "best"}, "algorithm must be one of biased"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"algorithm": "fednova", "shared-data": True}, "shared-data must be false with fednova"),
        ({"gamma": 2.0}, "gamma must be a number in"),
        ({"fast-steps": 0}, "fast-steps must be a whole number of at least 1"),
        ({"high-loss-fraction": 1.5}, "high-loss-fraction must be a number in"),
        ({"budget": "deadline", "gamma": 0.5}, "gamma must be left out with"),
    ],
    "cd-grab": [
        ({"method": "best"}, "method must be one of cd-grab"),
        ({"unit": "pixel"}, "unit must be one of batch, example"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"mode": "exact", "method": "d-rr"}, "mode must be sketched without cd-grab"),
        ({"fraction-train": 0.0}, r"fraction-train must lie in \(0, 1\]"),
        ({"mode": "fast"}, "mode must be one of sketched, exact"),
        ({"sketch-size": 0}, "sketch-size must be a whole number of at least 1"),
        ({"num-units": 1}, "num-units must be a whole number of at least 2"),
    ],
    "mercury": [
        ({"sampling": "best"}, "sampling must be one of"),
        ({"estimator": "best"}, "estimator must be one of"),
        ({"communication": "none"}, "communication must be one of"),
        ({"resharding": "yes"}, "resharding must be one of"),
        ({"resharding": "importance", "sampling": "uniform"}, "resharding must go with a sampling"),
        ({"local-steps": -1}, "local-steps must be a whole number"),
    ],
    "pgd": [
        ({"rule": "best"}, "rule must be one of"),
        ({"layers": "first"}, "layers must be one of"),
        ({"renewal-share": 0.0}, "renewal-share must be a number in"),
        ({"step-ratio": 1.5}, "step-ratio must be a number in"),
        ({"local-steps": -1}, "local-steps must be a whole number of at least 0"),
        ({"look-every": -1}, "look-every must be a whole number of at least 0"),
    ],
    "fleet": [
        ({"selection": "best"}, "selection must be one of all, random"),
        ({"steps": "many"}, "steps must be one of auto, epochs"),
        ({"weighting": "sum"}, "weighting must be one of auto, normalised, sqrt, examples"),
        ({"order": "sorted"}, "order must be one of reshuffle, cd-grab"),
        ({"sampler": "luck"}, "sampler must be one of uniform, top-loss"),
        ({"sampler": "pgd", "order": "id-grab"}, "sampler must be uniform with order=id-grab"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"clients-per-round": 0}, "clients-per-round must be at least 1"),
        ({"num-tiers": 0}, "num-tiers must be at least 1"),
        ({"spare-clients": -1}, "spare-clients must be at least 0"),
        ({"num-units": -1}, "num-units must be at least 0"),
        ({"concurrency": -1}, "concurrency must be at least 0"),
        ({"buffer-size": -1}, "buffer-size must be at least 0"),
        ({"fraction-evaluate": 1.5}, "fraction-evaluate must be a number in"),
        ({"rate-correction": 2.0}, "rate-correction must be a number in"),
        ({"engine": "async"}, "engine must be one of fedslice, rounds"),
        ({"selection": "tifl"}, "selection must be random or all with engine=fedslice"),
        ({"order": "cd-grab"}, "order .*id-grab is the same"),
        ({"sampler": "top-loss"}, "sampler must be without top-loss with engine=fedslice"),
        ({"steps": "epochs"}, "steps must be auto with engine=fedslice.*fast-steps"),
        ({"weighting": "sqrt"}, "weighting must be auto with engine=fedslice.*rate-correction"),
        ({"buffer-size": 2}, "buffer-size must be 0 with engine=fedslice.*engine=buffered"),
    ],
}
ENGINES = [
    ("rounds", {"steps": "epochs", "weighting": "steps"}, "the server must know the steps"),
    ("rounds", {"sampler": "top-loss", "weighting": "fednova"}, "sampler must be without top-loss"),
    ("rounds", {"concurrency": 3}, "concurrency must be 0 with engine=rounds"),
    ("rounds", {"buffer-size": 3}, "buffer-size must be 0 with engine=rounds"),
    ("rounds", {"rate-correction": 1.0}, "rate-correction must be 0.5 with .*weighting"),
    ("buffered", {"step-correction": 1.0}, "step-correction must be 0.0 with .*weighting"),
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
