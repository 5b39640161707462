"""Settings are fixed, hooks are checked, and the strategy of the user never changes."""

import copy
import inspect
import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from attacker import FLEET, leaf, start
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from recording import Folder

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


def test_limits_may_be_set_before_start():
    strategy = ours.FedSlice()
    strategy.update_limit = 2
    strategy.late_limit = None
    strategy.node_limit = 3.0
    assert strategy.rule.update_limit == 2
    assert strategy.rule.late_limit is None
    assert strategy.rule.node_limit == 3.0


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


MISSPELT = {
    "befor_train": "before_train",
    "on_relies": "on_replies",
    "on_train_ended": "on_train_end",
    "statedict": "state_dict",
    "load_statedict": "load_state_dict",
    "agregate_train": "aggregate_train",
}


def made(base=ours.Wrapper, **methods):
    return type("Mine", (base,), methods)


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_hook_is_refused(name):
    with pytest.raises(TypeError, match=rf"Mine\.{name} is not a hook .* {MISSPELT[name]}\?"):
        made(**{name: lambda self, *_: None})


@pytest.mark.parametrize("name", ["train_order", "on_epoch", "weight", "_on_starts"])
def test_methods_of_ones_own_are_accepted(name):
    assert made(**{name: lambda self: name})().__getattribute__(name)() == name


def before_train(self, context):
    return context


def on_replies(self, context, replies, times):
    return replies


def aggregate_train(self, server_round, replies):
    return None, None


@pytest.mark.parametrize("hook", [before_train, on_replies, aggregate_train])
def test_a_hook_that_cannot_be_called_is_refused(hook):
    with pytest.raises(TypeError, match=rf"Mine\.{hook.__name__} is called with \(\w+, .*\): "):
        made(**{hook.__name__: hook})


class Counts(ours.Wrapper):
    def __init__(self, strategy=None):
        super().__init__(strategy)
        self.rng = np.random.default_rng(1)
        self.by_node = {}
        self._seen = 0
        self.constant = [1]

    def on_replies(self, context, replies):
        self.rng.random()
        self._seen += len(replies)
        self.by_node[self.identity(replies[0].metadata.src_node_id)] = 1
        return replies


class Saves(Counts):
    def state_dict(self):
        return {}


def warnings_of(caplog, inner, folder, rounds=4):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        run(ours.Recorded(inner, run_dir=Folder(folder)), rounds)
    return [text for text in caplog.messages if "state_dict" in text]


def test_state_in_no_checkpoint_is_warned_of_once(tmp_path, caplog):
    (text,) = warnings_of(caplog, Counts(leaf()), tmp_path / "counts")
    assert text.startswith("Counts: rng, by_node, _seen changed in a round, but Counts has no")
    assert not warnings_of(caplog, Saves(leaf()), tmp_path / "saves")


@pytest.mark.parametrize("name", [name for name in ours.__all__ if name != "Selection"])
def test_our_own_strategies_lose_no_state(name, tmp_path, caplog):
    if name != "Recorded":
        assert not warnings_of(caplog, getattr(ours, name)(leaf()), tmp_path)
