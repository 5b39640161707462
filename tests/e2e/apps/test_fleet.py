import random
import sys
from pathlib import Path

import pytest
from recording import History

from flwr_hetero import keys
from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "fleet"))
from fleet_app.client_app import STATE, app
from fleet_app.task import FleetSettings

PLAIN = {
    "engine": "rounds",
    "selection": "all",
    "steps": "epochs",
    "weighting": "examples",
    "order": "reshuffle",
    "sampler": "uniform",
    "model": "softmax",
}


def run(num_rounds=3, num_nodes=5, **settings):
    """Train on emulated nodes; return the history, and the loss before and after."""
    settings = FleetSettings(**PLAIN | settings)
    config = {key.replace("_", "-"): value for key, value in vars(settings).items()}
    random.seed(settings.seed)
    grid = LocalGrid(app, named_fleet(settings.fleet, num_nodes), run_config=config)
    history = History(settings.strategy(num_nodes))
    evaluate, arrays = central_evaluate(settings), initial_arrays(settings)
    losses = [evaluate(0, arrays)["loss"]]
    arrays = history.start(grid, arrays, num_rounds).arrays
    losses.append(evaluate(0, arrays)["loss"])
    return history, losses, grid


STEPPED = {"steps": "equal", "weighting": "examples", "fast_steps": 6}


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "tifl", "clients_per_round": 1},
        {"selection": "random", "clients_per_round": 2},
        {"selection": "over-select", "clients_per_round": 2, "spare_clients": 1},
        STEPPED,
        {**STEPPED, "steps": "by-speed", "weighting": "steps"},
        {**STEPPED, "steps": "deadline", "weighting": "fednova"},
        {**STEPPED, "steps": "slice", "weighting": "normalised"},
        {"order": "cd-grab", "num_units": 6},
        {"order": "id-grab"},
        {"sampler": "mercury"},
        {"sampler": "pgd"},
        {**STEPPED, "sampler": "top-loss"},
        {"inner": "fedavgm"},
        {"inner": "fedprox"},
        {"selection": "oort", "sync_rounds": 1},
        {"selection": "power-of-choice"},
        {"selection": "deadline"},
        {"engine": "fedat", "num_server_rounds": 12},
        {"engine": "fedasync", "num_server_rounds": 12},
        {"engine": "fedcompass", "num_server_rounds": 12},
    ],
)
def test_every_part_alone_learns(settings):
    history, (before, after), _ = run(settings.get("num_server_rounds", 4), **settings)
    assert not [failure for record in history.records for failure in record["failures"]]
    assert after < 0.8 * before


def test_default_is_fedslice_in_rounds():
    settings = FleetSettings(model="softmax")
    names = [type(part).__name__ for part in settings.strategy(10).chain()]
    assert names == [
        "SamplerMetrics",
        "FedSlice",
        "RecentAverage",
        "SliceBuffer",
        "Slices",
        "FedAvg",
    ]
    history, (before, after), _ = run(4, 6, **vars(settings))
    assert after < 0.8 * before
    facts = [record["fedslice"] for record in history.records[1:]]
    assert [fact["updates"] > 1 for fact in facts] == [True] * 4
    done, wanted = (sum(fact[name] for fact in facts) for name in ("examples", "examples_wanted"))
    assert done == pytest.approx(wanted, rel=0.3)


def test_fedslice_takes_its_settings():
    config = {"selection": "random", "concurrency": 3, "fast-steps": 4, "average-rounds": 5}
    config |= {"rate-correction": 1.0, "step-correction": 0.25, "sampler": "mercury"}
    strategy = FleetSettings.from_run_config(config).strategy(10).inner
    assert (strategy.engine.concurrency, strategy.slices.fast_steps) == (3, 4)
    assert (strategy.inner.rounds, strategy.engine.powers[1]) == (5, 1.0)
    assert strategy.slices.correction == 0.25


def test_all_parts_together_say_what_they_do():
    parts = {"engine": "rounds", "selection": "tifl", "order": "cd-grab", "clients_per_round": 2}
    everything = FleetSettings(model="softmax", **parts)
    names = [type(part).__name__ for part in everything.strategy(10).chain()]
    assert names == ["SamplerMetrics", "TiFL", "BiasedLocalSGD", "CDGraB", "FedAvg"]
    history, (before, after), _ = run(8, 10, **vars(everything))
    assert after < before
    last = history.records[-1]
    assert not last["failures"]
    assert {"tifl", "biased_local_sgd", "cd_grab"} <= set(last)
    assert sum(record["cd_grab"]["pairs"] for record in history.records[1:]) > 0


@pytest.mark.parametrize("sampler", ["mercury", "pgd"])
def test_samplers_say_what_they_do(sampler):
    history, _, _ = run(2, sampler=sampler)
    stats = history.records[-1]["sampler"]
    assert {f"{sampler}-coverage", f"{sampler}-mean-age"} <= set(stats)
    if sampler == "mercury":  # a plot of what is of one kind
        parts = {"10 % are below", "50 % are below", "90 % are below"}
        assert set(stats["mercury-importance-with-mean-1"]) == parts


@pytest.mark.parametrize(
    "parts",
    [
        {"order": "cd-grab", "num_units": 6},
        {"engine": "buffered", "sampler": "mercury"},
    ],
)
def test_parts_learn_texts(parts):
    """Two packages are on the slowest node alone."""
    texts = {"dataset": "stdlib", "model": "auto", "partition": "classes-by-speed"}
    steps = {"steps": "slice", "weighting": "auto", "fast_steps": 20, "learning_rate": 0.5}
    history, (before, after), _ = run(12, **texts, **steps, **parts)
    assert not [failure for record in history.records for failure in record["failures"]]
    assert after < 0.95 * before


BUFFERED = {"engine": "buffered", "steps": "slice", "weighting": "normalised"}


@pytest.mark.parametrize(
    ("settings", "weighted"),
    [
        (BUFFERED, "fair"),
        ({**BUFFERED, "steps": "epochs", "weighting": "examples"}, "sqrt"),
        ({**BUFFERED, "weighting": "steps"}, "examples"),
        ({**BUFFERED, "weighting": "sqrt"}, "sqrt"),
        ({**BUFFERED, "weighting": "fednova", "steps": "deadline"}, "fair"),
        ({**BUFFERED, "order": "id-grab"}, "fair"),
        ({**BUFFERED, "selection": "random", "concurrency": 3, "buffer_size": 2}, "fair"),
    ],
)
def test_buffered_engine_learns_with_every_part(settings, weighted):
    history, (before, after), _ = run(12, **settings)
    assert not [failure for record in history.records for failure in record["failures"]]
    assert after < 0.8 * before
    assert history.chain()[2].weighting == weighted  # History > SamplerMetrics > FedBuff
    merged = [len(record["fedbuff"]["nodes"]) for record in history.records[1:]]
    assert merged == [settings.get("buffer_size", 3)] * 12


def test_weighting_is_by_default_that_of_the_steps():
    strategy = FleetSettings(**PLAIN | {"steps": "deadline", "weighting": "auto"}).strategy(5)
    assert strategy.step_correction == 0.5
    assert FleetSettings(**PLAIN | {"weighting": "auto"}).steps == "epochs"


def test_concurrency_bounds_the_nodes_at_work():
    history, _, _ = run(8, 6, **BUFFERED, selection="random", concurrency=2)
    last = history.records[-1]
    device_s = sum(record["device_s"] for record in history.records[1:])
    assert device_s == pytest.approx(2 * last["virtual_s"])


def test_nodes_evaluate_if_asked():
    history, _, _ = run(2, fraction_evaluate=1.0)
    assert history.records[-1]["evaluate"]["eval-acc"] > 0


def test_lost_state_costs_no_reply():
    name = f"{keys.PREFIX}{STATE}.scalars"
    _, _, grid = run(3, order="cd-grab", fleet="uniform")
    for node in grid.get_node_ids():
        del grid.context(node).state[name]
    again = History(FleetSettings(**PLAIN | {"order": "cd-grab"}).strategy(5))
    again.start(grid, initial_arrays(FleetSettings(**PLAIN)), 2)
    assert not [failure for record in again.records for failure in record["failures"]]


@pytest.mark.parametrize("settings", [{"selection": "random"}, {"selection": "tifl"}])
def test_same_seed_same_run(settings):
    parts = {"sampler": "mercury", "clients_per_round": 1, **settings}
    first, second = (run(3, **parts) for _ in range(2))
    assert first[1] == second[1]
    assert [r["virtual_s"] for r in first[0].records] == [r["virtual_s"] for r in second[0].records]


@pytest.mark.parametrize(
    ("num_nodes", "wanted", "drawn"), [(47, 3, 3), (5, 2, 2), (2, 3, 2), (1, 3, 1)]
)
def test_random_draws_as_many_as_wanted(num_nodes, wanted, drawn):
    settings = FleetSettings(**PLAIN | {"selection": "random", "clients_per_round": wanted})
    history = History(settings.strategy(num_nodes=1))
    config = {key.replace("_", "-"): value for key, value in vars(settings).items()}
    grid = LocalGrid(app, named_fleet("uniform", num_nodes), run_config=config)
    history.start(grid, initial_arrays(settings), 2)
    assert [len(record["selected"]) for record in history.records[1:]] == [drawn, drawn]


def test_over_select_asks_free_nodes():
    parts = {"selection": "over-select", "clients_per_round": 2, "spare_clients": 3}
    history, _, _ = run(4, 5, **parts)
    asked = [len(record["selected"]) for record in history.records[1:]]
    assert asked[0] == 5
    assert min(asked) >= 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"selection": "best"}, "selection must be one of all, random"),
        ({"steps": "many"}, "steps must be one of auto, epochs"),
        ({"weighting": "sum"}, "weighting must be one of auto, normalised, sqrt, examples"),
        ({"order": "sorted"}, "order must be one of reshuffle, cd-grab"),
        ({"sampler": "luck"}, "sampler must be one of uniform, top-loss"),
        ({"sampler": "pgd", "order": "id-grab"}, "sampler must be uniform with order=id-grab"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        (
            {"engine": "rounds", "steps": "epochs", "weighting": "steps"},
            "the server must know the steps",
        ),
        (
            {"engine": "rounds", "sampler": "top-loss", "weighting": "fednova"},
            "sampler must be without top-loss",
        ),
        ({"clients-per-round": 0}, "clients-per-round must be at least 1"),
        ({"num-tiers": 0}, "num-tiers must be at least 1"),
        ({"spare-clients": -1}, "spare-clients must be at least 0"),
        ({"num-units": -1}, "num-units must be at least 0"),
        ({"concurrency": -1}, "concurrency must be at least 0"),
        ({"buffer-size": -1}, "buffer-size must be at least 0"),
        ({"fraction-evaluate": 1.5}, "fraction-evaluate must be a number in"),
        ({"engine": "async"}, "engine must be one of fedslice, rounds"),
        ({"engine": "rounds", "concurrency": 3}, "concurrency must be 0 with engine=rounds"),
        ({"engine": "rounds", "buffer-size": 3}, "buffer-size must be 0 with engine=rounds"),
        ({"selection": "tifl"}, "selection must be random or all with engine=fedslice"),
        ({"engine": "buffered", "concurrency": 3}, "concurrency must be 0 with selection=all"),
        ({"order": "cd-grab"}, "order .*id-grab is the same"),
        ({"sampler": "top-loss"}, "sampler must be without top-loss with engine=fedslice"),
        ({"engine": "fedcompass", "steps": "slice"}, "steps must be epochs with engine=fedcompass"),
        ({"steps": "epochs"}, "steps must be auto with engine=fedslice.*fast-steps"),
        ({"weighting": "sqrt"}, "weighting must be auto with engine=fedslice.*rate-correction"),
        ({"buffer-size": 2}, "buffer-size must be 0 with engine=fedslice.*engine=buffered"),
        ({"rate-correction": 2.0}, "rate-correction must be a number in"),
        (
            {"engine": "rounds", "rate-correction": 1.0},
            "rate-correction must be 0.5 with engine=rounds.*weighting",
        ),
        (
            {"engine": "buffered", "step-correction": 1.0},
            "step-correction must be 0.0 with engine=buffered.*weighting",
        ),
    ],
)
def test_settings_refusals(config, named):
    with pytest.raises(ValueError, match=named):
        FleetSettings.from_run_config(config)
