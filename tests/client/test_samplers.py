"""Samplers on a node: kept from message to message, led by the server, missed if not helped."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from node_toy import Node
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.client.handler import _said
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import (
    StepLoader,
    emulated_device,
    follow,
    keep,
    load_state,
    restore,
    save_state,
    timing,
)
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    TopLossSampler,
    UniformSampler,
    WeightedLoss,
)
from flwr_hetero.strategy import CDGraB

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


def test_state_of_another_sampler_is_logged(context, caplog):
    save_state(context, "mine", {"n": 3})
    with caplog.at_level(logging.WARNING):
        assert not restore(UniformSampler(7, 2), context, "mine")
    assert "mine of earlier rounds not used" in caplog.text


def mercury():
    return MercurySampler(20, 5, seed=1, scores="loss")


def train(sampler, context=None, *, workers=0, batches=99, loss=True):
    """Run a training loop, and keep the iterator as a Trainer may do."""
    if context is not None:
        keep(sampler, context)
    criterion = WeightedLoss(sampler) if loss else None
    batches_of = iter(DataLoader(DATA, batch_sampler=sampler, num_workers=workers))
    for _, (inputs, targets) in zip(range(batches), batches_of, strict=False):
        if criterion:
            criterion(inputs, targets)
    return batches_of


@pytest.mark.parametrize("mod", [timing, emulated_device])
@pytest.mark.parametrize(("workers", "batches"), [(0, 2), (0, 99), (2, 2), (2, 99)])
def test_the_state_at_the_return_is_kept(mod, workers, batches):
    samplers, held = [], []

    def function(msg, context):
        samplers.append(mercury())
        held.append(train(samplers[-1], context, workers=workers, batches=batches))

    node = Node(function, mods=[mod])
    for _ in range(3):
        node.ask()
    held.clear()  # closes what is still open: this saves no more
    kept = node.state()
    for key, value in samplers[-1].state_dict().items():
        np.testing.assert_array_equal(kept[key], value)
    assert (kept["importance"] > 0).any()
    assert kept["steps"] >= 3 * min(batches, 4)


@pytest.mark.parametrize("wrong", [DataLoader(DATA), DataLoader(DATA).batch_sampler])
def test_keep_refuses_what_has_no_state(context, wrong):
    with pytest.raises(ValueError, match=r"sampler must be a sampler of .*pass loader\.b"):
        keep(wrong, context)


def test_nothing_is_kept_without_a_mod(context):
    with pytest.raises(RuntimeError, match=r"ClientApp\(mods=\[hetero\]\)"):
        keep(mercury(), context)


# --- a training loop that leaves out its part ----------------------------------------------


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (mercury, "criterion = WeightedLoss"),
        (lambda: TopLossSampler(20, 5), "criterion = WeightedLoss"),
        (lambda: PGDSampler(20, 5), "PriorityFeed"),
    ],
)
def test_untaken_batches_are_an_error(make, hint):
    node = Node(lambda msg, context: train(make(), context, loss=False))
    assert "learns nothing: no batch was taken" in (reason := node.reason())
    assert hint in reason
    Node(lambda msg, context: train(UniformSampler(20, 5), context, loss=False)).ask()
    Node(lambda msg, context: train(make(), loss=False)).ask(kind="evaluate")


def test_looks_and_updates_by_hand_are_no_error():
    def by_hand(msg, context):
        sampler = mercury()
        next(iter(sampler))
        for batch in sampler:
            sampler.update(np.array(batch), np.ones(len(batch)))

    Node(by_hand).ask()


def test_what_is_not_kept_is_said_once(caplog):
    def by_hand(msg, context):
        train(sampler := mercury())
        save_state(context, "mine", sampler.state_dict())

    _said.clear()
    Node(lambda msg, context: train(mercury(), context)).ask()
    Node(lambda msg, context: train(UniformSampler(20, 5))).ask()
    Node(by_hand).ask()
    assert not caplog.records
    node = Node(lambda msg, context: train(mercury()))
    node.ask(), node.ask()
    (record,) = caplog.records
    assert "keep(loader.batch_sampler, context)" in record.message


# --- the server's instructions -------------------------------------------------------------

NUM, BATCH = 24, 3


def order_app(*, workers=0, loss=WeightedLoss, orders=None):
    """Make a ClientApp with CD-GraB's node half, in a loop over epochs."""
    app = ClientApp(mods=[timing])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = nn.Linear(4, 3)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        follow(sampler := OrderedSampler(NUM, BATCH), msg, context, model)
        if orders is not None:
            orders.setdefault(context.node_id, []).append(sampler.node_order.next_order.tolist())
        seed = torch.Generator().manual_seed(context.node_config["partition-id"])
        data = TensorDataset(torch.randn(NUM, 4, generator=seed), torch.arange(NUM) % 3)
        loader = StepLoader(DataLoader(data, batch_sampler=sampler, num_workers=workers), msg)
        criterion = loss(sampler)
        for _ in range(2):
            for inputs, targets in loader:
                criterion(model(inputs), targets).backward()
        metrics = MetricRecord({"num-examples": NUM, **loader.metrics})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=msg)

    return app


def run_orders(rounds, num_steps=8, **how):
    """Run some rounds; return what failed, and the pairs that were balanced."""
    strategy, lines = CDGraB(FedAvg(fraction_evaluate=0.0), sketch_size=64), []
    strategy.on_round_end = lambda *found: lines.append(found[-1])
    grid = LocalGrid(order_app(**how), [DeviceProfile()] * 3)
    torch.manual_seed(0)
    arrays, config = ArrayRecord(nn.Linear(4, 3).state_dict()), {"num-steps": num_steps}
    strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord(config))
    failures = [failure["reason"] for line in lines for failure in line["failures"]]
    return failures, sum(line["cd_grab"]["pairs"] for line in lines if line["round"])


@pytest.mark.parametrize("steps", [8, 3])
def test_orders_follow_the_gradients(steps):
    orders = [{}, {}]
    for workers, found in zip((0, 2), orders, strict=True):
        failures, balanced = run_orders(32 // steps, steps, workers=workers, orders=found)
        assert not failures
        assert balanced >= 3 * 4
    assert orders[0] == orders[1]
    for changes in orders[0].values():
        assert len({tuple(order) for order in changes}) > 1
        assert all(sorted(order) == list(range(NUM // BATCH)) for order in changes)


def test_gradients_that_do_not_come_are_an_error():
    failures, _ = run_orders(1, loss=lambda sampler: nn.CrossEntropyLoss())
    assert len(failures) == 3
    for reason in failures:
        assert "OrderedSampler learns nothing: no gradient was observed" in reason
        assert "follow(loader.batch_sampler, msg, context, model)" in reason


def test_top_loss_takes_its_role():
    sampler = TopLossSampler(20, 5)
    node = Node(lambda msg, context: follow(sampler, msg, context))
    role = {keys.FAST: True, keys.FAST_SHARE: 0.25, keys.HIGH_LOSS_FRACTION: 0.75}
    node.ask(lr=0.1, records={"more": ConfigRecord(role)})
    assert (sampler.fast, sampler.share, sampler.high_loss_fraction) == (True, 0.25, 0.75)
    assert len(sampler) == 1
    node.ask(lr=0.1)
    assert not sampler.fast


@pytest.mark.parametrize(
    ("sampler", "config", "reason"),
    [
        *[(OrderedSampler(12, 2, method=m), {}, "model must be") for m in ("cd-grab", "id-grab")],
        (TopLossSampler(20, 5), {keys.FAST: True, keys.FAST_SHARE: 2.0}, "share must be a number"),
        (OrderedSampler(12, 2), None, "msg must be the message"),
    ],
)
def test_what_cannot_follow_is_refused(sampler, config, reason):
    node = Node(lambda msg, context: follow(sampler, msg if config is not None else {}, context))
    assert reason in node.ask(good=False, **(config or {})).error.reason
    baseline = OrderedSampler(12, 2, method="d-rr")  # it needs no model
    Node(lambda msg, context: follow(baseline, msg, context)).ask()
