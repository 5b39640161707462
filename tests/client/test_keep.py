import logging

import numpy as np
import pytest
from flwr.app import Array, Context, RecordDict

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.mod import keep, load_state, restore, save_state

STATE = {"order": np.arange(4), "cache": np.ones(3, np.float32), "n": 3, "rng": "{}", "on": True}


@pytest.fixture
def context():
    return Context(1, 1, {}, RecordDict(), {})


def test_state_is_read_as_it_was_saved(context):
    save_state(context, "sampler", STATE)
    state = load_state(context, "sampler")
    assert state.keys() == STATE.keys()
    assert all(np.array_equal(state[key], STATE[key]) for key in STATE)
    assert state["cache"].dtype == np.float32
    assert load_state(context, "other") is None


def test_damaged_state_is_none(context):
    save_state(context, "sampler", STATE)
    record = context.state.array_records["flwr-hetero.sampler.arrays"]
    record["order"] = Array("int64", (4,), "numpy.ndarray", b"torn")
    assert load_state(context, "sampler") is None


def test_state_of_another_sampler_is_logged(context, caplog):
    save_state(context, "mine", {"n": 3})
    with caplog.at_level(logging.WARNING):
        assert not restore(UniformSampler(7, 2), context, "mine")
    assert "mine of earlier rounds not used" in caplog.text


def test_keep_continues_after_each_pass(context):
    whole = UniformSampler(20, 5, seed=1)
    for number in range(3):
        kept = UniformSampler(20, 5, seed=1)
        assert keep(kept, context, "mine") == (number > 0)
        assert list(kept) == list(whole)


def test_keep_ignores_an_unfinished_pass(context):
    sampler = UniformSampler(20, 5)
    keep(sampler, context)
    next(iter(sampler))
    assert not keep(UniformSampler(20, 5), context)
