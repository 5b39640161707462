"""The fleet app on emulated nodes in this process: its parts, and what its settings refuse."""

import tomllib

import pytest
from app_run import FLEET_APP, AppRun, settings_of

PLAIN = {"engine": "rounds", "selection": "all", "steps": "epochs", "weighting": "examples"}
PLAIN |= {"order": "reshuffle", "sampler": "uniform", "model": "softmax"}
STEPPED = {"steps": "equal", "fast_steps": 6}
BUFFERED = {"engine": "buffered", "steps": "deadline", "weighting": "normalised"}
TEXTS = {"dataset": "stdlib", "model": "auto", "partition": "classes-by-speed", "fast_steps": 20}
TEXTS |= {"steps": "deadline", "weighting": "auto", "learning_rate": 0.5}
"""Two packages are on the slowest node alone."""
TOGETHER = {"engine": "rounds", "selection": "tifl", "order": "cd-grab", "clients_per_round": 2}


def parts_of(**settings):
    """Name the parts of the strategy that some settings make."""
    strategy = settings_of("fleet")(**PLAIN | settings).strategy(5)
    return [type(part).__name__ for part in strategy.chain()]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"selection": "tifl"}, ["TiFL", "FedAvg"]),
        ({"selection": "random"}, ["RandomSelection", "FedAvg"]),
        ({"selection": "over-select"}, ["OverSelect", "RandomSelection", "FedAvg"]),
        ({"selection": "oort", "sync_rounds": 1}, ["Oort", "FedAvg"]),
        ({"selection": "power-of-choice"}, ["PowerOfChoice", "FedAvg"]),
        ({"selection": "deadline"}, ["DeadlineSelection", "FedAvg"]),
        (STEPPED, ["RandomSelection", "BiasedLocalSGD", "FedAvg"]),
        (STEPPED | {"weighting": "fednova"}, ["RandomSelection", "FedNova", "FedAvg"]),
        ({"order": "cd-grab"}, ["RandomSelection", "CDGraB", "FedAvg"]),
        ({"order": "id-grab"}, ["RandomSelection", "FedAvg"]),
        ({"inner": "fedavgm"}, ["RandomSelection", "FedAvgM"]),
        ({"inner": "fedprox"}, ["RandomSelection", "FedProx"]),
        ({"engine": "fedat"}, ["FedAT", "FedAvg"]),
        ({"engine": "fedasync"}, ["FedAsync", "FedAvg"]),
        ({"engine": "fedcompass"}, ["FedCompass", "FedAvg"]),
        ({"bits_up": 4}, ["Compressed", "RandomSelection", "FedAvg"]),
        ({"average_rounds": 3}, ["ModelAverage", "RandomSelection", "FedAvg"]),
    ],
)
def test_parts_of_the_strategy_follow_the_settings(settings, parts):
    assert parts_of(**settings) == ["SamplerMetrics", *parts]


@pytest.mark.parametrize(
    ("settings", "num_nodes", "rounds", "left"),
    [
        (PLAIN | STEPPED | {"steps": "by-speed", "weighting": "steps"}, 5, 4, 0.8),
        (PLAIN | STEPPED | {"sampler": "top-loss"}, 5, 4, 0.8),
        (PLAIN | TEXTS | {"order": "cd-grab", "num_units": 6}, 5, 6, 0.97),
        (PLAIN | BUFFERED | {"selection": "random", "concurrency": 3}, 5, 12, 0.8),
        (PLAIN | {"sampler": "mercury"}, 5, 4, 0.8),
        (PLAIN | {"sampler": "pgd"}, 5, 4, 0.8),
        ({"model": "softmax"}, 6, 4, 0.8),
        ({"model": "softmax", **TOGETHER}, 10, 8, 1.0),
    ],
)
def test_nodes_learn(settings, num_nodes, rounds, left):
    assert AppRun("fleet", num_nodes, **settings).loss_ratio(rounds) < left


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ["FedSlice", "RecentAverage", "SliceRule", "SliceSteps", "FedAvg"]),
        (TOGETHER, ["TiFL", "BiasedLocalSGD", "CDGraB", "FedAvg"]),
    ],
)
def test_parts_by_default_and_all_together(settings, parts):
    strategy = settings_of("fleet")(**settings).strategy(10)
    assert [type(part).__name__ for part in strategy.chain()] == ["SamplerMetrics", *parts]


def test_settings_reach_the_strategy():
    config = {"selection": "random", "concurrency": 3, "fast-steps": 4, "average-rounds": 5}
    config |= {"rate-correction": 1.0, "sampler": "mercury"}
    strategy = settings_of("fleet").from_run_config(config).strategy(10).inner
    assert (strategy.rule.concurrency, strategy.steps.slice_steps) == (3, 4)
    assert (strategy.inner.window, strategy.rule.rates.powers[1]) == (5, 1.0)
    deadline = settings_of("fleet")(**PLAIN | {"steps": "deadline", "weighting": "auto"})
    assert deadline.strategy(5).step_correction == 0.5
    assert settings_of("fleet")(**PLAIN | {"weighting": "auto"}).steps == "epochs"


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
    ("fedcompass", {"steps": "deadline"}, "steps must be epochs with engine=fedcompass"),
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
