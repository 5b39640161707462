"""Settings are fixed, hooks are checked, and the strategy of the user never changes."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from attacker import FLEET, leaf, start
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import LocalGrid
from flwr_hetero_studies import rivals

FOLDER = SimpleNamespace(append_round=0)
GIVEN = {
    "BiasedLocalSGD": {"fast_steps": 6, "budget": "deadline", "deadline_s": 3.0},
    "FedBuff": {"concurrency": 5, "buffer_size": 4, "weighting": "examples", "seed": 5},
    "FedSlice": {"concurrency": 5, "slice_steps": 6, "window": 8, "keep_optimizer": False},
    "Recorded": {"run_dir": FOLDER, "trackers": []},
    "TiFL": {"clients_per_round": 3, "num_tiers": 2, "policy": "fast1", "credits": [4, 5]},
}
"""Settings other than the default ones."""
NAMES = [*ours.__all__, *rivals.__all__]


def kind_of(name):
    return getattr(ours if name in ours.__all__ else rivals, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_read_and_not_set(name):
    given = GIVEN.get(name, {})
    kind = kind_of(name)
    strategy = kind(flower.FedAvg(), **given)
    assert {key: getattr(strategy, key) for key in given} == given
    assert {*inspect.signature(kind.__init__).parameters} - {"self", "budget", "settings"} <= {
        *kind.setting_names
    }
    for setting in kind.setting_names:
        before = getattr(strategy, setting)
        text = rf"^{name}\.{setting} is a setting, .* Make a new strategy .*: {name}\({setting}=1\)"
        with pytest.raises(AttributeError, match=text):
            setattr(strategy, setting, 1)
        assert getattr(strategy, setting) is before


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))]
)
def test_settings_of_a_copy_are_fixed_too(way):
    strategy = way(ours.FedSlice(window=8))
    assert strategy.window == strategy.parts[0].window == 8
    with pytest.raises(AttributeError, match="window is a setting"):
        strategy.window = 4


@pytest.mark.parametrize(
    ("build", "name", "text"),
    [
        (ours.FedSlice, "windw", "FedSlice has no attribute 'windw' .* Did you mean window?"),
        (lambda: ours.Compressed(ours.FedSlice()), "window", "It belongs to FedSlice: set it"),
        (ours.TiFL, "fraction_evaluate", "It belongs to FedAvg: set it there, before that is"),
        (ours.Wrapper, "colour", "An attribute of your own must be set in __init__ first"),
    ],
)
def test_an_unknown_attribute_cannot_be_set(build, name, text):
    with pytest.raises(AttributeError, match=text):
        setattr(build(), name, 1)


def run(strategy, rounds=2, **settings):
    grid = LocalGrid(composition_app(), profiles=FLEET, seed=1)
    return strategy.start(grid, start(), rounds, **settings)


def test_limits_may_be_set_before_start_and_hold_for_all():
    strategy = ours.FedSlice()
    limits = {"update_limit": 2, "late_limit": None, "node_limit": 3.0}
    for name, limit in limits.items():
        setattr(strategy, name, limit)
    assert {name: getattr(strategy.rule, name) for name in limits} == limits
    assert ours.Wrapper(strategy).update_limit == 2
    with pytest.raises(ValueError, match="update_limit"):
        strategy.update_limit = 0.5


def private(name, **settings):
    return getattr(flower, f"DifferentialPrivacy{name}")(leaf(), 0.1, **settings)


FIXED = {"clipping_norm": 1.0, "num_sampled_clients": 6}
ADAPTIVE = {"num_sampled_clients": 6}
LEAVES = {
    "FedAdam": lambda: leaf("FedAdam"),
    "QFedAvg": lambda: leaf("QFedAvg"),
    "server, adaptive": lambda: private("ServerSideAdaptiveClipping", **ADAPTIVE),
    "client, fixed": lambda: private("ClientSideFixedClipping", **FIXED),
}
NESTS = {
    "TiFL": lambda inner: ours.TiFL(inner, 6, 1, interval=1),
    "FedSlice": lambda inner: ours.FedSlice(inner, rate_correction=0.0),
}


def parts_of(strategy):
    """Return what a strategy of Flower's holds, and what the one inside it holds."""
    held = copy.deepcopy(vars(strategy))
    inner = held.pop("strategy", None)
    return [held, *([] if inner is None else parts_of(inner))]


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", LEAVES)
def test_the_users_strategy_never_changes(name, nest):
    own = LEAVES[name]()
    before = parts_of(own)
    seen = []
    wrapper = NESTS[nest](own)
    seen.append(parts_of(own))
    arrays = ArrayRecord({"w": Array(start()["w"].numpy())}) if name == "QFedAvg" else start()
    grid = LocalGrid(composition_app(), profiles=[*FLEET, *FLEET], seed=1)
    if "client" not in name:
        wrapper.start(grid, arrays, 2, evaluate_fn=lambda *_: seen.append(parts_of(own)))
        assert len(seen) == 4
    assert all(each == before for each in seen)


def test_it_is_another_object_that_aggregates():
    used = []

    class Own(flower.FedAdam):
        def __init__(self, **settings):
            super().__init__(train_metrics_aggr_fn=self.weigh, **settings)
            self.rounds = []

        def weigh(self, contents, key):
            used.append(self)
            return flower.strategy_utils.aggregate_metricrecords(contents, key)

        def aggregate_train(self, server_round, replies):
            used.append(self)
            self.rounds.append((server_round, self.eta))
            return super().aggregate_train(server_round, replies)

    own = Own(eta=0.1)
    wrapper = ours.FedSlice(own)
    run(wrapper)
    assert {id(each) for each in used} == {id(wrapper.leaf)}
    assert own is not wrapper.leaf
    assert (own.rounds, own.m_t, own.eta) == ([], None, 0.1)
    assert wrapper.rounds[-1][1] < wrapper.eta == 0.1
    assert np.abs(wrapper.m_t["w"]).max() > 0
    # the next run with it does not know of the first one
    assert ours.FedSlice(own).m_t is None


MISSPELT = {"on_relies": "on_replies", "statedict": "state_dict"}


@pytest.mark.parametrize("name", [*MISSPELT, "train_order", "on_epoch", "weight", "_on_starts"])
def test_a_misspelt_hook_is_refused_and_a_method_of_ones_own_is_not(name):
    methods = {name: lambda self: name}
    if name in MISSPELT:
        with pytest.raises(TypeError, match=rf"Mine\.{name} is not a hook .* {MISSPELT[name]}\?"):
            type("Mine", (ours.Wrapper,), methods)
    else:
        assert getattr(type("Mine", (ours.Wrapper,), methods)(), name)() == name
