import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero.client.handler import _said
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import emulated_device, keep, load_state, restore, save_state, timing
from flwr_hetero.sampler import (
    MercurySampler,
    PGDSampler,
    TopLossSampler,
    UniformSampler,
    WeightedLoss,
)

DATA = TensorDataset(torch.randn(20, 3, generator=torch.manual_seed(0)), torch.arange(20) % 3)

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


def test_keep_saves_a_pass_that_stops_early(context):
    whole = iter(UniformSampler(20, 5, seed=1))
    for number in range(4):
        kept = UniformSampler(20, 5, seed=1)
        assert keep(kept, context) == (number > 0)
        for batch in kept:
            assert batch == next(whole)
            break


def test_what_ends_late_is_not_saved(context):
    old = UniformSampler(20, 5, seed=1)
    keep(old, context)
    held = iter(old)
    next(held)
    new = UniformSampler(20, 5, seed=1)
    keep(new, context)
    list(new)
    held.close()  # as garbage collection does with a Trainer's iterator
    assert np.array_equal(load_state(context, "sampler")["order"], new.order)
    assert load_state(context, "sampler")["position"] == 20


def mercury():
    return MercurySampler(20, 5, seed=1, scores="loss")


def train(sampler, context=None, *, workers=0, batches=99, passes=1, loss=True):
    """Run a training loop, and keep the iterator as a Trainer may do."""
    if context is not None:
        keep(sampler, context)
    criterion = WeightedLoss(sampler) if loss else None
    loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
    for _ in range(passes):
        batches_of = iter(loader)
        for _, (inputs, targets) in zip(range(batches), batches_of, strict=False):
            if criterion:
                criterion(inputs, targets)
    return batches_of


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_mod_what_workers_drew_ahead_is_learnt_first(context, workers):
    sampler = mercury()
    train(sampler, context, workers=workers)
    kept, wanted = load_state(context, "sampler"), sampler.state_dict()
    assert np.ptp(wanted["importance"]) > 0
    assert all(np.array_equal(kept[key], wanted[key]) for key in wanted)


def run_app(function, *, kind="train", mods=(timing,), rounds=1):
    """Let one node answer messages with a function of its context; return the last reply."""
    app = ClientApp(mods=list(mods))

    @app.train()
    @app.evaluate()
    def answer(message: Message, context: Context) -> Message:
        function(context)
        return Message(RecordDict(), reply_to=message)

    grid = LocalGrid(app, [DeviceProfile()])
    (node,) = grid.get_node_ids()
    for _ in range(rounds):
        (reply,) = grid.send_and_receive([Message(RecordDict(), node, kind)])
    return reply, grid.context(node)


@pytest.mark.parametrize("mod", [timing, emulated_device])
@pytest.mark.parametrize(("workers", "batches"), [(0, 2), (0, 99), (2, 2), (2, 99)])
def test_with_a_mod_the_state_at_the_return_is_kept(mod, workers, batches):
    samplers, held = [], []

    def function(context):
        samplers.append(mercury())
        held.append(train(samplers[-1], context, workers=workers, batches=batches))

    reply, context = run_app(function, mods=[mod], rounds=3)
    held.clear()  # closes what is still open: this saves no more
    assert not reply.has_error()
    kept, wanted = load_state(context, "sampler"), samplers[-1].state_dict()
    assert all(np.array_equal(kept[key], wanted[key]) for key in wanted)
    assert (wanted["importance"] > 0).any()
    assert wanted["steps"] >= 3 * min(batches, 4)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: DataLoader(DATA, batch_sampler=mercury()), "pass loader.batch_sampler"),
        (lambda: DataLoader(DATA), "make the DataLoader with batch_sampler=Mercury"),
        (lambda: DataLoader(DATA).batch_sampler, "torch.*BatchSampler.*make the DataLoader"),
    ],
)
def test_keep_refuses_what_has_no_state(context, wrong, match):
    with pytest.raises(ValueError, match=f"sampler must be a sampler of flwr_hetero.*{match}"):
        keep(wrong(), context)


# --- a training loop that leaves out its part ----------------------------------------------

LEARNERS = {
    "mercury": (mercury, "criterion = WeightedLoss"),
    "top loss": (lambda: TopLossSampler(20, 5), "criterion = WeightedLoss"),
    "pgd": (lambda: PGDSampler(20, 5), "PriorityFeed"),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_untaken_batches_are_an_error_at_the_return(name):
    make, cure = LEARNERS[name]
    reply, _ = run_app(lambda context: train(make(), context, loss=False))
    assert "learns nothing: no batch was taken" in reply.error.reason
    assert cure in reply.error.reason
    for good in (
        lambda context: train(make(), context, loss=False, batches=0),
        lambda context: train(UniformSampler(20, 5), context, loss=False),
    ):
        assert not run_app(good)[0].has_error()
    assert not run_app(lambda _: train(make(), loss=False), kind="evaluate")[0].has_error()


@pytest.mark.parametrize("name", LEARNERS)
def test_untaken_batches_are_an_error_in_the_third_pass(name, context):
    sampler = LEARNERS[name][0]()
    train(sampler, passes=2, loss=False)
    with pytest.raises(RuntimeError, match="learns nothing"):
        train(sampler, loss=False)
    for _ in range(2):
        train(LEARNERS[name][0](), context, loss=False)
    with pytest.raises(RuntimeError, match="learns nothing"):
        train(LEARNERS[name][0](), context, loss=False)


def test_passes_that_only_look_are_no_error(context):
    for _ in range(3):
        sampler = mercury()
        train(sampler, context, loss=False)
        train(sampler, passes=3)


def test_update_by_hand_is_help_enough(context):
    sampler = mercury()
    keep(sampler, context)
    for _ in range(4):
        for batch in sampler:
            sampler.update(np.array(batch), np.ones(len(batch)))


def test_what_is_not_kept_is_said_once(caplog):
    _said.clear()
    run_app(lambda context: train(mercury(), context), rounds=2)
    run_app(lambda context: train(UniformSampler(20, 5)))
    run_app(lambda context: save_state(context, "mine", (train(s := mercury()), s.state_dict())[1]))
    assert not caplog.records
    run_app(lambda _: train(mercury()), rounds=3)
    assert len(caplog.records) == 1
    assert "keep(loader.batch_sampler, context)" in caplog.text
