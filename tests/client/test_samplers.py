"""Samplers on a node: kept from message to message, led by the server, missed if not helped."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from node_toy import BATCH, DATA, FULL, NUM, Node, plain, report
from torch import nn
from torch.utils.data import DataLoader

from flwr_hetero import keys
from flwr_hetero.client import _warned
from flwr_hetero.mod import (
    StepLoader,
    emulated_device,
    follow,
    hetero,
    keep,
    load_state,
    save_state,
    timing,
)
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    TopLossSampler,
    UniformSampler,
    WeightedLoss,
)


def test_uniform_epochs_are_permutations():
    sampler = UniformSampler(10, 4, seed=0)
    epochs = [[sampler.next_batch()[0] for _ in range(3)] for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    orders = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.fixture
def context():
    return Context(1, 1, {}, RecordDict(), {})


def test_state_is_read_as_it_was_saved(context):
    arrays = {"order": np.arange(4), "cache": np.ones(3, np.float32)}
    saved = arrays | {"n": 3, "rng": "{}", "on": True}
    save_state(context, "sampler", saved)
    state = load_state(context, "sampler")
    assert state.keys() == saved.keys()
    assert all(np.array_equal(state[key], saved[key]) for key in saved)
    assert state["cache"].dtype == np.float32
    assert load_state(context, "other") is None


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


@pytest.mark.parametrize(
    ("mod", "workers", "batches"), [(timing, 0, 99), (emulated_device, 0, 2), (timing, 2, 2)]
)
def test_the_state_at_the_return_is_kept(mod, workers, batches):
    samplers = []
    held = []

    def function(msg, context):
        samplers.append(mercury())
        held.append(train(samplers[-1], context, workers=workers, batches=batches))

    node = Node(function, mods=[mod])
    for _ in range(2):
        node.ask()
    held.clear()  # closes what is still open: this saves no more
    kept = node.state()
    for key, value in samplers[-1].state_dict().items():
        np.testing.assert_array_equal(kept[key], value)
    assert (kept["importance"] > 0).any()
    assert kept["steps"] >= 2 * min(batches, 4)


def test_nothing_is_kept_without_a_state_or_a_mod(context):
    for wrong in (DataLoader(DATA), DataLoader(DATA).batch_sampler):
        with pytest.raises(ValueError, match=r"sampler must be a sampler of .*pass loader\.b"):
            keep(wrong, context)
    with pytest.raises(RuntimeError, match=r"ClientApp\(mods=\[hetero\]\)"):
        keep(mercury(), context)


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
    Node(lambda msg, context: train(make(), loss=False)).ask(kind="evaluate")


def test_what_is_not_kept_is_said_once(caplog):
    def by_hand(msg, context):
        sampler = mercury()
        next(iter(sampler))
        for batch in sampler:
            sampler.update(np.array(batch), np.ones(len(batch)))
        save_state(context, "mine", sampler.state_dict())

    _warned.clear()
    Node(lambda msg, context: train(mercury(), context)).ask()
    Node(lambda msg, context: train(UniformSampler(20, 5), loss=False)).ask()
    Node(by_hand).ask()
    assert not caplog.records
    node = Node(lambda msg, context: train(mercury()))
    node.ask(), node.ask()
    (record,) = caplog.records
    assert "keep(loader.batch_sampler, context)" in record.message


def orders_of(steps, workers=0, loss=WeightedLoss):
    """Let a node with an ordered sampler answer messages; return the orders that it learnt."""
    orders = []

    def train(msg, context):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        sampler = OrderedSampler(NUM, BATCH, method="id-grab")
        follow(sampler, msg, context, model)
        orders.append(sampler.node_order.order.tolist())
        loader = StepLoader(DataLoader(DATA, batch_sampler=sampler, num_workers=workers), msg)
        criterion = loss(sampler)
        for _ in range(2):
            for inputs, targets in loader:
                criterion(model(inputs), targets).backward()

    node = Node(train)
    for _ in range(24 // steps):
        node.ask(steps)
    return orders


@pytest.mark.parametrize("steps", [8, 3])
def test_orders_follow_the_gradients(steps):
    orders = orders_of(steps)
    if steps == 8:
        assert orders == orders_of(steps, workers=2)
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == list(range(FULL)) for order in orders)


def test_gradients_that_do_not_come_are_an_error():
    with pytest.raises(AssertionError, match=r"learns nothing: no gradient was observed.*follow\("):
        orders_of(8, loss=lambda sampler: nn.CrossEntropyLoss())


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
    ("method", "sent", "reason"),
    [
        *[(method, True, "model must be") for method in ("cd-grab", "id-grab")],
        ("cd-grab", False, "msg must be the message"),
    ],
)
def test_what_cannot_follow_is_refused(method, sent, reason):
    sampler = OrderedSampler(12, 2, method=method)
    assert (
        reason in Node(lambda msg, context: follow(sampler, msg if sent else {}, context)).reason()
    )
    baseline = OrderedSampler(12, 2, method="d-rr")  # it needs no model
    Node(lambda msg, context: follow(baseline, msg, context)).ask()


def train_with(sampler=None, epochs=1, batches=hetero.batches, loader=plain, **how):
    """Make a training function whose batches a sampler draws; it returns sampler and loss."""

    def train(msg, context):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        more = {"model": model} if how.get("gives_model") else {}
        steps = batches(loader(), msg, **({"sampler": sampler} if sampler else {}), **more)
        criterion = steps.criterion(how.get("loss_fn"))
        for _ in range(epochs):
            for inputs, targets in steps:
                criterion(model(inputs), targets).backward()
        return steps.batch_sampler, criterion

    return train


SAMPLERS = {
    "mercury": (MercurySampler, {}),
    "top loss": (TopLossSampler, {}),
    "uniform": (UniformSampler, {}),
    "ordered": (OrderedSampler, {"gives_model": True}),
    "pgd": (PGDSampler, {"gives_model": True}),
    "made": (lambda n, b: MercurySampler(n, b, scores="loss"), {}),
}


@pytest.mark.parametrize(("steps", "epochs"), [(None, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_put_in_place_and_kept(name, steps, epochs):
    make, how = SAMPLERS[name]
    train = train_with(make, epochs, **how)
    node, fresh = (Node(train, **{"local-epochs": epochs}) for _ in range(2))
    for _ in range(2):
        assert node.work(steps) == report(steps or epochs * FULL, epochs, epochs * FULL)
    sampler = node.results[1][0]
    assert isinstance(sampler, PriorityFeed) == (name == "pgd")
    kept = node.state()
    now = sampler.state_dict()
    assert kept.keys() == now.keys()
    for key, value in now.items():
        np.testing.assert_array_equal(kept[key], value)
    fresh.ask(steps)
    if steps:  # else an order is where it began
        assert any(not np.array_equal(fresh.state()[key], kept[key]) for key in now)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"sampler": OrderedSampler}, "model must be the model whose gradients the sampler uses"),
        ({"sampler": PGDSampler}, "hetero.batches(loader, msg, sampler=PGDSampler, model=model)"),
        ({"sampler": lambda n, b: 3}, "sampler must be a sampler class of flwr_hetero.sampler"),
        ({"sampler": MercurySampler(NUM, BATCH)}, "sampler must be a sampler class of flwr_hetero"),
        ({"sampler": MercurySampler, "loader": lambda: [[1], [2]]}, "must be a DataLoader"),
    ],
)
def test_a_sampler_that_cannot_work_is_refused(how, reason):
    assert reason in Node(train_with(**how)).reason(3)


@pytest.mark.parametrize("reduction", [None, "mean", "none"])
def test_criterion_fits_the_sampler(reduction):
    loss_fn = reduction and nn.CrossEntropyLoss(reduction=reduction)
    own, sampled = (
        Node(train_with(sampler, loss_fn=loss_fn)) for sampler in (None, MercurySampler)
    )
    own.ask(2), sampled.ask(2)
    assert isinstance(sampled.results[0][1], WeightedLoss)
    outputs = torch.randn(5, 2)
    targets = torch.arange(5) % 2
    expected = nn.functional.cross_entropy(outputs, targets)
    assert own.results[0][1](outputs, targets).item() == pytest.approx(expected.item())
    assert reduction is None or loss_fn.reduction == reduction
