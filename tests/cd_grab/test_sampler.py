"""OrderedSampler: units, weights, dialogue, state; and gradients of units."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import (
    batch_gradient,
    example_gradients,
    sketch,
    sketch_gradients,
)
from flwr_hetero.cd_grab.order_server import Answer, OrderServer
from flwr_hetero.cd_grab.sampler import METHODS, OrderedSampler
from flwr_hetero.cd_grab.wire import Terms, read_report, write_instruction


def small_model(seed=0):
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4)]
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def some_data(num_examples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_examples, 1, 4, 4, generator=generator)
    return inputs, torch.randint(4, (num_examples,), generator=generator)


# --- gradients of units --------------------------------------------------------------------


def test_example_gradients_are_those_of_each_example_alone():
    model, (inputs, targets) = small_model(), some_data(5)
    model[3].bias.requires_grad_(False)
    each = example_gradients(model, cross_entropy, inputs, targets)
    for row, i in zip(each, range(5), strict=True):
        model.zero_grad()
        cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
        torch.testing.assert_close(row[None], batch_gradient(model))
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    torch.testing.assert_close(each.mean(dim=0, keepdim=True), batch_gradient(model))
    assert not each.requires_grad


@pytest.mark.parametrize("model", [small_model(), nn.Linear(16, 4, bias=False)], ids=str)
def test_batch_gradient_is_a_copy(model):
    """The published code kept a reference to the buffer that the next step wrote over."""
    inputs, targets = some_data(6)
    if isinstance(model, nn.Linear):
        inputs = inputs.flatten(1)
    cross_entropy(model(inputs[:3]), targets[:3]).backward()
    first = batch_gradient(model)
    before = first.clone()
    model.zero_grad(set_to_none=False)
    cross_entropy(model(inputs[3:]), targets[3:]).backward()
    assert torch.equal(first, before)
    assert not torch.equal(first, batch_gradient(model))


def test_parameters_without_gradient_count_as_zero():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(3, 1)])
    model[1](torch.ones(1, 3)).sum().backward()
    assert batch_gradient(model).tolist() == [[0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("size", [0, 1, 7, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sketches_of_gradients_are_cores(size, dtype):
    gradients = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = sketch_gradients(gradients, size, seed=5)
    kind = np.float64 if dtype == torch.float64 else np.float32
    whole = gradients.to(torch.float64).numpy().astype(kind)
    assert ours.dtype == kind
    expected = sketch(whole, size, seed=5) if size else whole
    np.testing.assert_allclose(ours, expected, atol=0.1 if dtype == torch.bfloat16 else 1e-5)


# --- units, batches, weights -----------------------------------------------------------------


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
def test_a_pass_is_the_mean_over_all_examples(
    method, num_samples, batch_size, options, num_units, num_batches
):
    sampler = OrderedSampler(num_samples, batch_size, seed=3, method=method, **options)
    assert len(sampler.units) == num_units
    assert len(sampler) == num_batches
    total, seen = np.zeros(num_samples), []
    for _ in range(num_batches):
        before = sampler.walk.position
        indices, weights = sampler.next_batch()
        units = sampler.walk.position - before
        total[indices] += units * weights / len(indices)  # in a step's mean, times its units
        seen += indices.tolist()
    assert sorted(seen) == list(range(num_samples))
    np.testing.assert_allclose(total, num_units / num_samples)


def test_units_differ_by_one_example_and_stay_what_they_are():
    sampler = OrderedSampler(43, 8, seed=3)
    assert {len(unit) for unit in sampler.units} == {8, 9}
    again = OrderedSampler(43, 8, seed=3, method="d-rr")
    assert all(np.array_equal(a, b) for a, b in zip(sampler.units, again.units, strict=True))
    other = OrderedSampler(43, 8, seed=4)
    assert not all(np.array_equal(a, b) for a, b in zip(sampler.units, other.units, strict=True))


def test_iterating_gives_a_pass_for_a_data_loader():
    sampler = OrderedSampler(10, 3, method="shuffle-once")
    assert sorted(index for batch in sampler for index in batch) == list(range(10))
    sampler.update(np.arange(3), np.zeros(3))


# --- orders ------------------------------------------------------------------------------------


def run_pass(sampler, gradients):
    """Visit every batch; each unit's gradient is the mean of its examples'."""
    visited = []
    for _ in range(len(sampler)):
        indices, _ = sampler.next_batch()
        visited += indices.tolist()
        rows = gradients[indices]
        sampler.observe(rows if sampler.unit == "example" else rows.mean(dim=0, keepdim=True))
    return visited


def bound_of(visited, gradients):
    prefix = torch.cumsum(gradients[visited] - gradients.mean(dim=0), dim=0)
    return float(prefix.abs().max())


@pytest.mark.parametrize("method", ["id-grab", "id-grab-mean"])
@pytest.mark.parametrize(("unit", "factor"), [("example", 0.3), ("batch", 0.6)])
def test_own_orders_get_better(method, unit, factor):
    gradients = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    sampler = OrderedSampler(256, 8 if unit == "example" else 1, method=method, unit=unit)
    bounds = [bound_of(run_pass(sampler, gradients), gradients) for _ in range(8)]
    assert bounds[-1] < factor * bounds[0]


def test_two_nodes_and_a_server_through_sketches():
    size, server = Terms(sketch_size=64, sketch_seed=9), OrderServer()
    gradients = torch.randn(2, 128, 500, generator=torch.Generator().manual_seed(0))
    gradients -= gradients.mean(dim=(0, 1))
    gradients[..., :4] *= 20  # most of it happens in few directions
    nodes = [OrderedSampler(128, 1, seed=s) for s in range(2)]
    bounds = []
    for number in range(8):
        terms, visited, reports = size._replace(server_round=number), [], []
        for i, node in enumerate(nodes):
            answer = server.answer(f"node-{i}")
            node.follow(write_instruction(terms, answer))
            visited.append(run_pass(node, gradients[i]))
            record = node.report()
            assert len(record[keys.VECTORS]) == 64 * 64 * 2
            reports.append(read_report(record, f"node-{i}", terms))
        server.receive(reports)
        both = sum(g[v] for g, v in zip(gradients, visited, strict=True))
        bounds.append(float(torch.cumsum(both, dim=0).abs().max()))
    assert bounds[-1] < 0.35 * bounds[0]
    assert nodes[0].walk.version == 7


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


def test_the_server_may_set_the_number_of_units():
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


def test_another_sketch_begins_a_new_watch():
    sampler, gradients = OrderedSampler(8, 1), torch.randn(8, 30)
    sampler.follow(write_instruction(Terms(sketch_size=4), Answer()))
    for unit in range(3):
        sampler.next_batch()
        sampler.observe(gradients[unit : unit + 1])
    sampler.follow(write_instruction(Terms(sketch_size=6), Answer()))
    run_pass(sampler, gradients)
    sampler.follow(write_instruction(Terms(sketch_size=6), Answer()))
    run_pass(sampler, gradients)
    assert sampler.report()[keys.SKETCH_SIZE] == 6


# --- state and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded_is_uninterrupted(method):
    gradients, server = torch.randn(20, 5), OrderServer()
    whole, broken = (OrderedSampler(20, 3, seed=1, method=method) for _ in range(2))
    for number in range(9):
        instruction = write_instruction(Terms(number, 4, 2, 6), server.answer("n"))
        for sampler in (whole, broken):
            sampler.follow(instruction)
        for _ in range(5):
            drawn = [sampler.next_batch() for sampler in (whole, broken)]
            assert drawn[0][0].tolist() == drawn[1][0].tolist()
            for sampler in (whole, broken):
                sampler.observe(gradients[drawn[0][0]].mean(dim=0, keepdim=True))
        record = whole.report()
        assert record == broken.report()
        if record:
            server.receive([read_report(record, "n", Terms(number, 4, 2, 6))])
        state = broken.state_dict()
        assert all(isinstance(v, (np.ndarray, int, float, str, bool)) for v in state.values())
        broken = OrderedSampler(20, 3, seed=1, method=method)
        broken.load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 2}, "seed=1, this sampler has 2"),
        ({"method": "d-rr"}, "method='cd-grab'"),
        ({"unit": "example"}, "unit='batch'"),
    ],
)
def test_state_of_another_sampler_is_refused(other, message):
    state = OrderedSampler(20, 3, seed=1).state_dict()
    sampler = OrderedSampler(20, 3, **({"seed": 1} | other))
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)


def test_damaged_state_is_refused_and_changes_nothing():
    sampler = OrderedSampler(20, 3, seed=1)
    before = sampler.state_dict()
    for change in (
        {"num_units": 50},
        {"num_units": "6"},
        {"walk.order": np.zeros(6, int)},
        {"terms.sketch_size": None},
        {"terms.sketch_seed": -1},
        {"walk.seen": "nothing"},
    ):
        with pytest.raises(ValueError, match=r"num_units|permutation|terms|seen"):
            sampler.load_state_dict(before | change)
    with pytest.raises(ValueError, match="num_samples"):
        OrderedSampler(21, 3, seed=1).load_state_dict(before)
    assert {k: str(v) for k, v in sampler.state_dict().items()} == {
        k: str(v) for k, v in before.items()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "method must be a known method, got 'best'"),
        ({"unit": "pixel"}, "unit must be batch or example, got 'pixel'"),
        ({"num_units": 0}, r"num_units must lie in 1\.\.20"),
        ({"num_units": 21}, r"num_units must lie in 1\.\.20"),
        ({"num_units": 5, "unit": "example"}, "go with unit='batch'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
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
