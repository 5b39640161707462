"""Claims of examples and of time: what a node says of itself buys it little, in every wrapper."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from attacker import FLEET, NESTS, attack, leaf, names_of, reasons, trained
from flwr.app import ConfigRecord
from quadratics import app, fedavg, models
from steps_toy import steps_app, steps_arrays
from toy import rewriting

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.biased_local_sgd.strategy import NodeSpeeds
from flwr_hetero.fleet import DeviceProfile, LocalGrid, named_fleet

SLOWEST = 5
ALIKE = [DeviceProfile(speed) for speed in (1.0, 1.02, 1.04, 1.06, 1.08, 1.1)]


def examples(number):
    """Claim so many examples, and send a model of 100."""
    return lambda _, reply: reply.content["metrics"].update({"num-examples": number})


def at_once(message, reply):
    """Claim to have taken no time, and to be an emulated device."""
    timing = reply.content[keys.TIMING]
    timing[keys.TRAIN_TIME] = timing[keys.TRANSFER_TIME] = 0.0


def untimed(message, reply):
    """Leave out how long it took."""
    reply.content.pop(keys.TIMING)


def for_ever(message, reply):
    reply.content[keys.TIMING][keys.TRAIN_TIME] = 1e6


@pytest.mark.parametrize(
    ("nest", "first", "most"),
    [
        ("none", 1, 10 / 15),
        ("none", 2, 2 / 7),
        ("TiFL", 1, 10 / 15),
        ("TiFL", 2, 2 / 7),
        # steps and time count too
        ("everything", 1, None),
        ("merged", 1, None),
    ],
)
def test_examples_are_capped(nest, first, most):
    """All nodes have as many; a claim counts 10 times the median, or 2 times the first claim."""
    usual = trained(examples(40))
    claim = trained(examples(2**53), range(first, 99))
    lies = dict.fromkeys(range(6), usual) | {SLOWEST: lambda m, r: usual(m, r) or claim(m, r)}
    records, models = attack(NESTS[nest](leaf()), lies, rounds=6)
    shares = [record["weights"].get("node-5", 0.0) for record in records]
    assert max(shares) == pytest.approx(most) if most else 0.0 < max(shares) < 0.95
    assert any("claims 9.0072e+15 num-examples" in text for text in reasons(records, SLOWEST))
    assert np.isfinite(models).all()


def test_examples_of_honest_nodes_are_not_cut():
    records, _ = attack(ours.Wrapper(leaf()), {})  # 10 to 60 of them
    assert records[-1]["failures"] == []
    assert records[-1]["weights"]["node-5"] == pytest.approx(60 / 210)


def steps_of(strategy, lies, profiles):
    """Return the steps of the last round."""
    fleet = {"profiles": profiles, "app": steps_app(), "arrays": steps_arrays()}
    records, _ = attack(strategy, lies, rounds=6, **fleet)
    steps = {}
    for record, name in product(records, ("local_steps", "biased_local_sgd")):
        steps |= record.get(name, {}).get("num_steps", {})
    names = [sorted(names_of(i)) for i in range(len(profiles))]
    return np.array([next(steps[name] for name in both if name in steps) for both in names])


BUDGETS = {
    "two-class": lambda: ours.BiasedLocalSGD(leaf(), 32),
    "deadline": lambda: ours.LocalSteps(leaf(), 32, budget="deadline"),
    "merged": lambda: ours.FedBuff(BUDGETS["deadline"](), buffer_size=6),
}


FLEETS = {"alike": ALIKE, "two kinds": FLEET}


@cache
def honest_steps(budget, fleet):
    return steps_of(BUDGETS[budget](), {}, FLEETS[fleet])


@pytest.mark.parametrize("lie", [at_once, for_ever, untimed])
@pytest.mark.parametrize("fleet", [pytest.param("alike", marks=pytest.mark.nightly), "two kinds"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_claim_of_time_moves_nobody_elses_steps(budget, fleet, lie):
    honest = honest_steps(budget, fleet)[:5]
    among = steps_of(BUDGETS[budget](), {SLOWEST: lie}, FLEETS[fleet])[:5]
    assert ((honest / 2 <= among) & (among <= honest * 2)).all(), (honest, among)


@pytest.mark.parametrize("num_liars", [1, 6])
def test_fewer_than_a_third_cannot_set_the_pace(num_liars):
    def speeds(liars):
        book = NodeSpeeds()
        for i in range(20):
            book.observe(f"{i}", 1, 0.0 if i < liars else 1.0 if i < 14 else 4.0, 0.0)
        return book

    honest = speeds(0)
    among = speeds(num_liars)
    assert among.quick_round_s(10) >= honest.quick_round_s(10) / 2
    assert among.classes()[1] == honest.classes()[1] == 0.25


@pytest.mark.parametrize("profiling", ["training", "phase"])
@pytest.mark.parametrize("lie", [at_once, untimed])
def test_a_claim_of_time_buys_no_tier(profiling, lie):
    profiles = [DeviceProfile(speed) for speed in (10.0, 5.0, 1.0) for _ in range(4)]
    strategy = ours.TiFL(leaf(), 2, 3, policy="fast", profiling=profiling)
    records, _ = attack(strategy, {11: lie}, rounds=15, profiles=profiles)
    assert strategy.tiers.tier.get("node-11", 2) == 2
    assert not any("node-11" in record["selected"] for record in records[2:])


def test_a_fleet_of_two():
    """Either node is half of it, but the round trip is seen: what it does not claim is its link."""
    honest = steps_of(BUDGETS["deadline"](), {}, ALIKE[:2])
    among = steps_of(BUDGETS["deadline"](), {1: at_once}, ALIKE[:2])
    assert honest[0] / 2 <= among[0] <= honest[0]


def test_several_replies_of_a_node_are_all_capped():
    """The quickest node is in a server update more than once, as published."""
    lie = trained(examples(2**53))
    strategy = ours.FedBuff(leaf(), buffer_size=8)
    strategy.node_limit = None
    records, _ = attack(strategy, {0: lie}, rounds=4)
    assert max(record["fedbuff"]["nodes"].count("node-0") for record in records) > 1
    assert all(record["fedbuff"]["step"] > 1e-3 for record in records)


# --- what a node says of its job in FedAvg ----------------------------------------------------
NODES = 10
JOB = 24


def saying(claims, liar=0):
    """Make a mod that reports a node's work; one says something else of it."""

    def change(partition, message, reply):
        steps = message.content["config"][keys.NUM_STEPS]
        work = {keys.NUM_STEPS: steps, keys.EXAMPLES_PROCESSED: steps, keys.PASSES: 1}
        work |= {keys.JOB_STEPS: JOB} | (claims if partition == liar else {})
        reply.content[keys.WORK] = ConfigRecord(work)

    return rewriting(change)


class Ended(Exception):
    """The run takes too long."""


def steps_taken(claims, rounds=2, most=None):
    """Return the steps of all nodes in some rounds."""
    mods = [saying(claims)]
    grid = LocalGrid(
        app(1 + np.arange(NODES) / NODES, [JOB] * NODES, 0.05, mods=mods),
        named_fleet("paper-5", NODES),
    )
    strategy = ours.FedSlice(fedavg())
    steps = []

    def arrived(update):
        (metrics,) = update.reply.content.metric_records.values()
        steps.append(metrics[keys.NUM_STEPS])
        if most is not None and sum(steps) > most:
            raise Ended

    strategy.rule.arrived = arrived
    models(strategy, grid, rounds)
    return sum(steps)


LIES = [{keys.PASSES: 1000, keys.JOB_STEPS: 1}, {keys.JOB_STEPS: 0}, {keys.JOB_STEPS: 10**9}]


def test_one_node_does_not_set_how_long_a_run_is():
    honest = steps_taken({})
    assert honest == pytest.approx(2 * NODES * JOB, rel=0.1)
    for claims in LIES:
        assert 0.7 * honest < steps_taken(claims, most=1.4 * honest) < 1.4 * honest, claims
