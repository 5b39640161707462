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
    "BiasedLocalSGD": {
        "fast_steps": 6,
        "budget": "deadline",
        "deadline_s": 3.0,
        "step_correction": 0.25,
        "high_loss_fraction": 0.25,
        "share": 0.5,
        "batch_size": 4,
    },
    "CDGraB": {"mode": "exact", "sketch_size": 7, "num_units": 6, "seed": 5},
    "Compressed": {"bits_up": 8, "bits_down": 2, "error_feedback": False},
    "FedBuff": {
        "concurrency": 5,
        "buffer_size": 4,
        "staleness": 0.5,
        "weighting": "examples",
        "rate_correction": 0.5,
        "seed": 5,
    },
    "FedNova": {"fast_steps": 6, "gamma": 0.5},
    "FedSlice": {
        "concurrency": 5,
        "slice_steps": 6,
        "rate_correction": 0.5,
        "window": 8,
        "keep_optimizer": False,
        "total_rounds": 9,
        "seed": 5,
    },
    "LocalSteps": {"fast_steps": 6, "budget": "deadline", "step_correction": 0.25},
    "ModelAverage": {"window": 5},
    "OverSelect": {"take": 3},
    "RandomSelection": {"clients_per_round": 3, "seed": 5},
    "Recorded": {"run_dir": FOLDER, "resume": False, "trackers": []},
    "Resharding": {"share": 0.5, "budget_bytes": 16, "by_importance": False, "seed": 5},
    "SamplerMetrics": {},
    "Selection": {"clients_per_round": 3},
    "TiFL": {
        "clients_per_round": 3,
        "num_tiers": 2,
        "policy": "fast1",
        "profiling": "phase",
        "sync_rounds": 2,
        "warmup_rounds": 2,
        "profile_interval": 7,
        "interval": 6,
        "credits": [4, 5],
        "seed": 5,
    },
    "Wrapper": {},
    "AdaComm": {"first_steps": 6, "interval_s": 5.0},
    "DeadlineSelection": {"clients_per_round": 3, "deadline_s": 5.0, "seed": 5},
    "FedAT": {"clients_per_round": 3, "num_tiers": 2, "seed": 5},
    "FedAsync": {"concurrency": 5, "mixing": 0.5, "staleness": "none", "seed": 5},
    "FedCompass": {"min_steps": 2, "max_steps": 5, "concurrency": 5, "seed": 5},
    "Oort": {"clients_per_round": 3, "pace": 0.5, "penalty": 1.0, "profiling": True, "seed": 5},
    "PowerOfChoice": {"clients_per_round": 3, "candidates": 5, "seed": 5},
    "RescaledASGD": {"num_steps": 4, "server_rate": 0.5, "concurrency": 5, "seed": 5},
    "RingleaderASGD": {"num_steps": 4, "server_rate": 0.5, "concurrency": 5, "seed": 5},
    "WithoutSlowest": {"clients_per_round": 3, "left_out": 0.25, "seed": 5},
}
"""Settings by strategy, most of them other than the default ones."""


def kind_of(name):
    return getattr(ours if name in ours.__all__ else rivals, name)


def test_every_strategy_is_in_the_table():
    assert GIVEN.keys() == {*ours.__all__, *rivals.__all__}
    assert all(given.keys() <= kind_of(name).setting_names for name, given in GIVEN.items())


# --- settings --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", GIVEN)
def test_every_setting_can_be_read_and_not_set(name):
    given, kind = GIVEN[name], kind_of(name)
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


class Fixed(ours.FedSlice):
    """Hides a setting of FedSlice."""

    def __init__(self, strategy=None, size=3):
        super().__init__(strategy, window=5)
        self.size = size


def test_settings_of_a_subclass_and_its_base_are_fixed():
    strategy = Fixed()
    for name in ("size", "window", "slice_steps"):
        with pytest.raises(AttributeError, match=f"Fixed.{name} is a setting"):
            setattr(strategy, name, 4)
    with pytest.raises(AttributeError, match=r"FedSlice.slice_steps is a setting"):
        strategy.steps.slice_steps = 4


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


def test_hooks_may_add_attributes_and_change_all_but_settings():
    class Adds(ours.Wrapper):
        def __init__(self, strategy=None, limit=3):
            super().__init__(strategy)
            self.limit = limit

        def on_replies(self, context, replies):
            self.seen = getattr(self, "seen", 0) + len(replies)
            with pytest.raises(AttributeError, match="limit is a setting"):
                self.limit = 4
            return replies

    strategy = Adds(leaf())
    run(strategy)
    assert (strategy.seen, strategy.limit) == (12, 3)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        strategy.other = 1


def test_limits_may_be_set_before_start():
    strategy = ours.FedSlice()
    strategy.update_limit, strategy.late_limit, strategy.node_limit = 2, None, 3.0
    assert strategy.rule.update_limit == 2
    assert strategy.rule.late_limit is None
    assert strategy.rule.node_limit == 3.0


# --- the strategy of the user ----------------------------------------------------------------
def private(name, **settings):
    return getattr(flower, f"DifferentialPrivacy{name}")(leaf(), 0.1, **settings)


FIXED = {"clipping_norm": 1.0, "num_sampled_clients": 6}
ADAPTIVE = {"num_sampled_clients": 6}
LEAVES = {
    **{n: lambda n=n: leaf(n) for n in ("FedAvg", "FedAdam", "FedProx", "FedAvgM", "Krum")},
    "QFedAvg": lambda: leaf("QFedAvg"),
    "server, fixed": lambda: private("ServerSideFixedClipping", **FIXED),
    "server, adaptive": lambda: private("ServerSideAdaptiveClipping", **ADAPTIVE),
    "client, fixed": lambda: private("ClientSideFixedClipping", **FIXED),
    "client, adaptive": lambda: private("ClientSideAdaptiveClipping", **ADAPTIVE),
}
NESTS = {
    "Wrapper": ours.Wrapper,
    "TiFL": lambda inner: ours.TiFL(inner, 6, 1, interval=1),
    "FedSlice": lambda inner: ours.FedSlice(inner, rate_correction=0.0),
    "FedBuff": lambda inner: ours.FedBuff(inner, weighting="examples"),
    "RandomSelection": lambda inner: ours.RandomSelection(inner, 6),
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
    before, seen = parts_of(own), []
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


def test_a_privacy_accountant_is_shared():
    own = private("ServerSideFixedClipping", **FIXED)
    own.accountant = object()
    wrapper = ours.Wrapper(own)
    assert wrapper.leaf.__class__ is wrapper.inner.strategy.__class__ is flower.FedAvg
    assert wrapper.inner.strategy is not own.strategy
    assert wrapper.inner.accountant is own.accountant


# --- hooks -----------------------------------------------------------------------------------
MISSPELT = {
    "befor_train": "before_train",
    "before_training": "before_train",
    "before_evalute": "before_evaluate",
    "on_instruction": "on_instructions",
    "on_relies": "on_replies",
    "on_train_ended": "on_train_end",
    "on_evaluation_replies": "on_evaluate_replies",
    "on_rounds_end": "on_round_end",
    "on_finished": "on_finish",
    "rounds_info": "round_info",
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


def test_hooks_of_selections_are_known_too():
    with pytest.raises(TypeError, match=r"did you mean on_outcome\?"):
        made(ours.Selection, on_outcomes=lambda self, *_: None)


@pytest.mark.parametrize(
    "name",
    [
        "train_order",
        "after_train",
        "on_epoch",
        "on_train_start",
        "weight",
        "_on_starts",
        "replies",
    ],
)
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


def test_a_hook_may_take_what_comes():
    assert made(before_train=lambda self, *_: 0, on_replies=lambda self, c, r, more=1: r)


# --- state that is in no checkpoint ----------------------------------------------------------
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


def test_a_rule_of_selection_without_state_is_fine(tmp_path, caplog):
    class First(ours.Selection):
        def select(self, context, grid, online):
            return sorted(online)[:3]

    assert not warnings_of(caplog, First(leaf()), tmp_path)
