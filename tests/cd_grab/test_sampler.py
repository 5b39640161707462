"""OrderedSampler: units, weights, orders, what it says to the server, state."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import batch_gradient
from flwr_hetero.cd_grab.order_server import OrderServer
from flwr_hetero.cd_grab.sampler import METHODS, OrderedSampler
from flwr_hetero.cd_grab.wire import Answer, Terms, read_report, write_instruction
from flwr_hetero.sampler import WeightedLoss


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("num_samples", "batch_size", "options", "num_units", "num_batches"),
    [
        (40, 8, {}, 5, 5),
        (43, 8, {}, 5, 5),
        (47, 8, {}, 6, 6),
        (3, 8, {}, 1, 1),
        (40, 8, {"num_units": 7}, 7, 7),
        (20, 8, {"unit": "example"}, 20, 3),
    ],
)
def test_pass_is_the_mean_over_all_examples(
    method, num_samples, batch_size, options, num_units, num_batches
):
    sampler = OrderedSampler(num_samples, batch_size, seed=3, method=method, **options)
    assert len(sampler.units) == num_units
    assert len(sampler) == num_batches
    total, seen = np.zeros(num_samples), []
    for _ in range(num_batches):
        before = sampler.node_order.position
        indices, weights = sampler.next_batch()
        units = sampler.node_order.position - before
        total[indices] += units * weights / len(indices)  # in a step's mean, times its units
        seen += indices.tolist()
    assert sorted(seen) == list(range(num_samples))
    np.testing.assert_allclose(total, num_units / num_samples)


def test_units_depend_on_the_seed_alone():
    kinds = ({"seed": 3}, {"seed": 3, "method": "d-rr"}, {"seed": 4})
    units = [[unit.tolist() for unit in OrderedSampler(43, 8, **kind).units] for kind in kinds]
    assert {len(unit) for unit in units[0]} == {8, 9}
    assert units[0] == units[1] != units[2]


def run_pass(sampler, gradients):
    """Visit every batch; each unit's gradient is the mean of its examples'."""
    visited = []
    for _ in range(len(sampler)):
        indices, _ = sampler.next_batch()
        visited += indices.tolist()
        rows = gradients[indices]
        sampler.observe(rows if sampler.unit == "example" else rows.mean(dim=0, keepdim=True))
    return visited


@pytest.mark.parametrize("unit", ["example", "batch"])
def test_own_orders_follow_gradients(unit):
    gradients = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    sampler = OrderedSampler(20, 3, method="id-grab", unit=unit)
    order = METHODS["id-grab"](len(sampler.units))
    for _ in range(4):
        expected = order.next_units(len(sampler.units))
        examples = [sampler.units[unit] for unit in expected]
        order.observe(np.stack([gradients[each].mean(dim=0).numpy() for each in examples]))
        assert run_pass(sampler, gradients) == np.concatenate(examples).tolist()


def test_without_a_server_the_order_stays():
    sampler, gradients = OrderedSampler(12, 2), torch.randn(12, 3)
    sampler.follow({})
    first = run_pass(sampler, gradients)
    assert sampler.report()[keys.VERSION] == 0
    assert run_pass(sampler, gradients) == first
    assert OrderedSampler(12, 2, method="d-rr").report() == {}
    baseline = OrderedSampler(12, 2, method="id-grab")
    baseline.follow(write_instruction(Terms(num_units=3), Answer()))
    assert len(baseline.units) == 6


def test_server_may_set_the_number_of_units():
    sampler = OrderedSampler(12, 2)
    sampler.follow(write_instruction(Terms(num_units=4), Answer()))
    assert [len(unit) for unit in sampler.units] == [3, 3, 3, 3]
    sampler.follow(write_instruction(Terms(num_units=50), Answer()))
    assert len(sampler.units) == 12
    run_pass(sampler, torch.randn(12, 3))
    assert sampler.report()[keys.NUM_UNITS] == 12
    each = OrderedSampler(12, 2, unit="example")
    each.follow(write_instruction(Terms(num_units=4), Answer()))
    assert len(each.units) == 12


@pytest.mark.parametrize("other", [{"sketch_size": 6}, {"sketch_size": 4, "sketch_seed": 1}])
def test_another_sketch_restarts_the_watch(other):
    sampler, gradients = OrderedSampler(8, 1), torch.randn(8, 30)
    sampler.follow(write_instruction(Terms(sketch_size=4), Answer()))
    for unit in range(3):
        sampler.next_batch()
        sampler.observe(gradients[unit : unit + 1])
    sampler.follow(write_instruction(Terms(**other), Answer()))
    assert not sampler.watching
    run_pass(sampler, gradients)
    sampler.follow(write_instruction(Terms(**other), Answer()))
    run_pass(sampler, gradients)
    assert sampler.report()[keys.SKETCH_SIZE] == other["sketch_size"]


DATA = TensorDataset(torch.randn(22, 4, generator=torch.manual_seed(0)), torch.arange(22) % 3)


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def by_hand(method, passes):
    """Train with observe() after each backward pass."""
    model, sampler = small_model(), OrderedSampler(22, 3, method=method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(passes * len(sampler)):
        indices, weights = sampler.next_batch()
        inputs, targets = DATA[indices]
        optimizer.zero_grad()
        losses = cross_entropy(model(inputs), targets, reduction="none")
        (torch.from_numpy(weights).float() * losses).mean().backward()
        sampler.observe(batch_gradient(model))
        optimizer.step()
    return sampler


@pytest.mark.parametrize("method", ["cd-grab", "id-grab"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_a_loss_shows_what_observe_is_told(method, workers, factor):
    model, sampler = small_model(), OrderedSampler(22, 3, method=method)
    sampler.train_model(model)
    criterion = WeightedLoss(sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / factor)
    for _ in range(3):
        for inputs, targets in DataLoader(DATA, batch_sampler=sampler, num_workers=workers):
            optimizer.zero_grad()
            (criterion(model(inputs), targets) * factor).backward()
            optimizer.step()
    told, wanted = sampler.node_order.state_dict(), by_hand(method, 3).node_order.state_dict()
    for name, value in wanted.items():
        np.testing.assert_allclose(told[name], value, atol=1e-5)


def observed(sampler, kind):
    """Visit a pass in one of the ways of a training loop; return the gradients observed."""
    model, seen = small_model(), []
    sampler.train_model(model)
    criterion = WeightedLoss(sampler)
    sampler.node_order.observe = lambda vectors: seen.extend(vectors)
    loader = DataLoader(DATA, batch_sampler=sampler)
    for number, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets)
        if kind == "accumulates":
            (loss / 4).backward()
        elif kind == "overflows" and number == 2:
            (loss * 1e38 * 1e38).backward()
        elif not (kind == "drops" and number == 2):
            model.zero_grad()
            loss.backward()
        if kind == "stops" and number == 4:
            break
    return np.array(seen)


@pytest.mark.parametrize("kind", ["accumulates", "drops", "overflows", "stops"])
def test_each_batch_has_its_gradient_or_counts_as_zero(kind):
    sampler, lost = OrderedSampler(22, 3, method="id-grab"), [2] * (kind in ("drops", "overflows"))
    plain = observed(OrderedSampler(22, 3, method="id-grab"), "plain")
    seen = observed(sampler, kind)
    assert len(plain) == 7
    if kind == "stops":  # and goes on in the next loop
        assert len(seen) == 5
        seen = np.concatenate([seen, observed(sampler, "plain")])
    assert not seen[lost].any()
    expected = np.delete(plain, lost, 0)
    np.testing.assert_allclose(np.delete(seen, lost, 0), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["id-grab", "shuffle-once"])
def test_what_workers_drew_ahead_of_a_stop_is_visited_later(method):
    sampler, seen = OrderedSampler(22, 3, method=method), []
    sampler.train_model(model := small_model())
    criterion = WeightedLoss(sampler)
    for _ in range(7):
        batches = iter(DataLoader(DATA, batch_sampler=sampler, num_workers=2))
        for _, (inputs, targets) in zip(range(3), batches, strict=False):
            criterion(model(inputs), targets).backward()
            seen += [DATA.tensors[0].tolist().index(row) for row in inputs.tolist()]
        sampler.settle()
        del batches
    assert sorted(seen[:22]) == list(range(22))


def test_saved_between_instructions_is_uninterrupted():
    """The table over all samplers proves the rest; here with terms and a server."""
    gradients, server = torch.randn(20, 5), OrderServer()
    whole, broken = OrderedSampler(20, 3, seed=1), OrderedSampler(20, 3, seed=1)
    for number in range(9):
        terms = Terms(number, 4, 2, 6)
        instruction = write_instruction(terms, server.answer("n"))
        for sampler in (whole, broken):
            sampler.follow(instruction)
        for _ in range(5):
            drawn = [sampler.next_batch()[0] for sampler in (whole, broken)]
            assert drawn[0].tolist() == drawn[1].tolist()
            for sampler in (whole, broken):
                sampler.observe(gradients[drawn[0]].mean(dim=0, keepdim=True))
        assert whole.report() == broken.report()
        server.receive({"n": read_report(whole.report(), terms)})
        state = broken.state_dict()
        broken = OrderedSampler(20, 3, seed=1)
        broken.load_state_dict(state)
    assert server.states["n"].version > 3


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"method": "d-rr"},
        {"unit": "example"},
        {"num_samples": 21},
        {"num_units": 50},
        {"order.order": np.zeros(6, int)},
        {"terms.sketch_size": None},
        {"terms.sketch_seed": -1},
        {"order.diffs": "nothing"},
    ],
)
def test_state_that_does_not_fit_is_refused(change):
    sampler = OrderedSampler(20, 3, seed=1)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=r"state of|order must"):
        sampler.load_state_dict(before | change)
    assert repr(sampler.state_dict()) == repr(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method must be one of cd-grab"),
        ({"unit": "pixel"}, "unit must be one of batch, example"),
        ({"num_units": 21}, r"num_units must lie in 1\.\.20"),
        ({"num_units": 5, "unit": "example"}, "num_units must .* unit='batch'"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OrderedSampler(20, **({"batch_size": 4} | options))


def test_bad_gradients_are_refused():
    sampler = OrderedSampler(10, 4, unit="example")
    for rows in (4, 4, 2):
        sampler.next_batch()
        with pytest.raises(ValueError, match=rf"gradients must have shape \({rows}, dim\)"):
            sampler.observe(torch.zeros(rows + 1, 3))
        with pytest.raises(ValueError, match="gradients must have shape"):
            sampler.observe(torch.zeros(rows))
        with pytest.raises(ValueError, match="gradients must be finite"):
            sampler.observe(torch.full((rows, 3), float("nan")))
        sampler.observe(torch.zeros(rows, 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_whose_end_is_not_trained_gives_an_order(workers):
    sampler, orders = OrderedSampler(22, 3, method="id-grab"), []
    sampler.train_model(model := small_model())
    criterion = WeightedLoss(sampler)
    for _ in range(3):
        loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
        for number, (inputs, targets) in enumerate(loader):
            loss = criterion(model(inputs), targets)
            if number < 6:
                loss.backward()
        orders.append(sampler.node_order.order.tolist())
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert orders[0] != orders[1]


def test_batches_fetched_before_the_end_and_trained_after_it_count():
    """As Hugging Face's Trainer does to accumulate gradients."""
    plain = observed(OrderedSampler(22, 3, method="id-grab"), "plain")
    sampler, model, seen = OrderedSampler(22, 3, method="id-grab"), small_model(), []
    sampler.train_model(model)
    criterion = WeightedLoss(sampler)
    sampler.node_order.observe = lambda vectors: seen.extend(vectors)
    for fetched in (3, 4):
        batches = iter(sampler)
        drawn = [next(batches) for _ in range(fetched)]
        batches.close()
        for indices in drawn[: fetched - 1] if fetched == 3 else drawn:
            inputs, targets = DATA[indices]
            criterion(model(inputs), targets).backward()
        sampler.settle()
        assert sampler.node_order.position == len(seen)
    np.testing.assert_allclose(seen, plain[:6], rtol=1e-4, atol=1e-6)


def test_sparse_gradients():
    sampler, words = OrderedSampler(22, 3, method="id-grab"), torch.randint(9, (22, 4))
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3))
    sampler.train_model(model)
    criterion = WeightedLoss(sampler)
    for indices in sampler:
        criterion(model(words[indices]), DATA.tensors[1][indices]).backward()
    assert len(sampler.node_order.signs) == 3
