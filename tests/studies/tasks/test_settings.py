import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from flwr_hetero_studies.tasks import Settings
from flwr_hetero_studies.tasks.settings import key_of

APPS = Path(__file__).parents[3] / "apps"


@dataclass(frozen=True)
class AppSettings(Settings):
    policy: str = "adaptive"
    num_tiers: int = 5
    shuffle: bool = False


def test_all_keys_arrive():
    run_config = {
        **{"num-server-rounds": 7, "dataset": "digits", "task": "auto", "alpha": 2},
        **{"partition": "classes", "classes-per-node": 3, "model": "mlp", "seed": 4},
        **{"output-dir": "/data/run", "resume": True, "local-epochs": 2, "batch-size": 8},
        **{"learning-rate": 0.5, "lr-schedule": "cosine", "lr-decay": 1, "optimizer": "rmsprop"},
        **{"momentum": 0.5, "weight-decay": 1, "proximal-mu": 2, "amp": True, "device": "cpu"},
        **{"evaluate-every": 3, "target-accuracy": 1, "time-budget-s": 60},
        **{"trackers": "mlflow+wandb", "fleet": "uniform"},
    }
    settings = Settings.from_run_config(run_config)
    assert {name.replace("_", "-"): value for name, value in vars(settings).items()} == run_config
    assert isinstance(settings.alpha, float)
    assert Settings.from_run_config({}) == Settings()


@pytest.mark.parametrize(
    ("run_config", "message"),
    [
        ({"resume": True}, "output-dir must be given to resume, got ''"),
        ({"polici": "fast"}, "got 'polici': did you mean 'policy'[?] Known are alpha, "),
        ({"num-server-rounds": "3"}, "num-server-rounds must be a whole number, got '3'"),
        ({"model": 3}, "model must be a text, got 3"),
        ({"resume": 1}, "resume must be true or false, got 1"),
        ({"num-server-rounds": 0}, "num-server-rounds must .* at least 1, got 0"),
        ({"alpha": 0}, r"alpha must .* got 0\.0"),
        ({"model": "vgg"}, "model must be one of auto, softmax.* got 'vgg'"),
        ({"fleet": "paper-6"}, "fleet must be a known name"),
        ({"lr-schedule": "step"}, "lr-schedule must be one of exponential, cosine"),
        ({"lr-decay": 0.9, "lr-schedule": "cosine"}, "lr-decay must be 1 with lr-s"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum must be 0 with adamw"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
        ({"trackers": "wandb,mlflow"}, "trackers must be one of .* join several with"),
        ({"output-dir": "runs/1"}, "output-dir must be absolute .* got 'runs/1'"),
    ],
)
def test_settings_refusals(run_config, message):
    with pytest.raises(ValueError, match=message):
        AppSettings.from_run_config(run_config)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({}, [0.1, 0.1, 0.1]),
        ({"lr_decay": 0.5}, [0.1, 0.05, 0.1 / 16]),
        ({"lr_schedule": "cosine", "num_server_rounds": 4}, [0.1, 0.05 * (1 + 0.5**0.5), 0.0]),
    ],
)
def test_learning_rate_of_rounds_1_2_5(given, rates):
    settings = Settings(learning_rate=0.1, **given)
    assert [settings.lr_in(number) for number in (1, 2, 5)] == pytest.approx(rates)
    assert settings.lr_in(0) == 0.1  # profiling


def test_the_app_of_all_methods_has_every_shared_key():
    path = APPS / "fleet" / "pyproject.toml"
    config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    shared = {key_of(field.name): type(field.default) for field in fields(Settings)}
    found = {key: type(value) for key, value in config.items()}
    assert {key: found.get(key) for key in shared} == shared
