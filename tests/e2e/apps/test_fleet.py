import random
import sys
from pathlib import Path

import pytest
from recording import History

from flwr_hetero import keys
from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.task.run import central_evaluate, initial_arrays

sys.path.insert(0, str(Path(__file__).parents[3] / "apps" / "fleet"))
from fleet_app.client_app import STATE, app
from fleet_app.task import FleetSettings

PLAIN = {
    "selection": "all",
    "steps": "epochs",
    "aggregation": "examples",
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


STEPPED = {"steps": "equal", "aggregation": "examples", "fast_steps": 6}


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "tifl", "clients_per_round": 1},
        {"selection": "random", "clients_per_round": 2},
        {"selection": "over-select", "clients_per_round": 2, "spare_clients": 1},
        STEPPED,
        {**STEPPED, "steps": "by-speed", "aggregation": "steps"},
        {**STEPPED, "steps": "deadline", "aggregation": "fednova"},
        {"order": "cd-grab", "num_units": 6},
        {"order": "id-grab"},
        {"sampler": "mercury"},
        {"sampler": "pgd"},
        {**STEPPED, "sampler": "top-loss"},
        {"order": "cd-grab", "sampler": "mercury+pgd"},
        {"inner": "fedavgm"},
        {"inner": "fedprox"},
    ],
)
def test_every_part_alone_learns(settings):
    history, (before, after), _ = run(4, **settings)
    assert not [failure for record in history.records for failure in record["failures"]]
    assert after < 0.8 * before


def test_all_parts_together_say_what_they_do():
    everything = FleetSettings(model="softmax", sampler="top-loss+mercury+pgd", clients_per_round=2)
    names = [type(part).__name__ for part in everything.strategy(10).chain()]
    assert names == ["SamplerFacts", "TiFL", "BiasedLocalSGD", "CDGraB", "FedAvg"]
    history, (before, after), _ = run(8, 10, **vars(everything))
    assert after < before
    last = history.records[-1]
    assert not last["failures"]
    assert {"tifl", "biased-local-sgd", "cd-grab", "sampler"} <= set(last)
    stats = last["sampler"]
    assert {"mercury-coverage", "mercury-mean-age", "pgd-coverage"} <= set(stats)
    assert set(stats["mercury-importance-with-mean-1"]) == {  # a plot of what is of one kind
        *("10 % are below", "50 % are below", "90 % are below")
    }
    assert sum(record["cd-grab"]["pairs"] for record in history.records[1:]) > 0


def test_order_server_sees_batches_of_the_order_only():
    """In turn with another sampler an order sees as many pairs as it has batches, no more."""
    alone, _, _ = run(2, order="cd-grab", num_units=6, partition="iid")
    both, _, _ = run(2, order="cd-grab", num_units=6, partition="iid", sampler="mercury")
    pairs = [h.records[1]["cd-grab"]["pairs"] for h in (alone, both)]
    assert pairs == [5 * 3, 5 * 1]  # nodes times pairs in 6 and in 3 batches


def test_lost_state_costs_no_reply():
    _, _, grid = run(2, sampler="mercury", order="cd-grab")
    name = f"{keys.PREFIX}{STATE}.scalars"
    state = grid.context(1000).state.config_records[name]
    assert state["1.steps"] > 0
    _, _, grid = run(3, sampler="mercury", order="cd-grab", fleet="uniform")
    for node in grid.get_node_ids():
        del grid.context(node).state[name]
    again = History(FleetSettings(**PLAIN | {"order": "cd-grab"}).strategy(5))
    again.start(grid, initial_arrays(FleetSettings(**PLAIN)), 2)
    assert not [failure for record in again.records for failure in record["failures"]]


@pytest.mark.parametrize("settings", [{"selection": "random"}, {"selection": "tifl"}])
def test_same_seed_same_run(settings):
    parts = {"sampler": "mercury+pgd", "order": "cd-grab", "clients_per_round": 1, **settings}
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
        ({"selection": "best"}, "selection must be one of tifl, random"),
        ({"steps": "many"}, "steps must be one of epochs"),
        ({"aggregation": "sum"}, "aggregation must be one of examples"),
        ({"order": "sorted"}, "order must be one of reshuffle, cd-grab"),
        ({"sampler": "luck"}, "sampler must be of uniform, top-loss"),
        ({"sampler": "pgd+pgd"}, "sampler must name each once"),
        ({"inner": "sgd"}, "inner must be one of fedavg"),
        ({"steps": "epochs"}, "the server must know the steps"),
        ({"sampler": "top-loss", "aggregation": "fednova"}, "sampler must be without top-loss"),
        ({"clients-per-round": 0}, "clients-per-round must be at least 1"),
        ({"num-tiers": 0}, "num-tiers must be at least 1"),
        ({"spare-clients": -1}, "spare-clients must be at least 0"),
        ({"num-units": -1}, "num-units must be at least 0"),
    ],
)
def test_settings_refusals(config, named):
    with pytest.raises(ValueError, match=named):
        FleetSettings.from_run_config(config)
