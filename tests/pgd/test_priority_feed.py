"""Priorities and the aggregated gradient, taken from the training step itself."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flwr_hetero.client.batch_sampler import UniformSampler
from flwr_hetero.client.sampled_loss import importance
from flwr_hetero.pgd.algorithm import renew_sum
from flwr_hetero.pgd.priority_feed import AggregatedGradient, LayerPriorities
from flwr_hetero.sampler import PGDSampler, PriorityFeed, sample_priorities

LOSS = nn.CrossEntropyLoss(reduction="none")
NUM = 24


class Tied(nn.Module):
    """Embedding and head share one parameter; the embedding is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words[:, :2]).sum(1) + 2 * self.embed(words[:, 2:]).sum(1))


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2, bias=False),
        nn.LayerNorm(9),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(243, 7),
        nn.RMSNorm(7),
        nn.Tanh(),
        nn.Linear(7, 5),
    )


def data(model: nn.Module) -> tuple[Tensor, Tensor]:
    targets = torch.arange(NUM) % 5
    if isinstance(model, Tied):
        return torch.randint(5, (NUM, 4)), targets
    return torch.randn(NUM, 1, 8, 8), targets


@pytest.mark.parametrize(
    ("make", "layers"), [(image_net, "last"), (image_net, "all"), (Tied, "all")]
)
def test_layer_priorities_equal_forward_mode(make: type[nn.Module], layers: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    inputs, targets = data(model)
    everything = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    listener = LayerPriorities(model, layers)
    direction = {name: everything[name] for name in listener.parameters}
    listener.direction = direction
    LOSS(model(inputs), targets).sum().backward()
    found = listener.collect()
    expected = sample_priorities(model, LOSS, inputs, targets, direction)
    torch.testing.assert_close(found.priorities, expected, rtol=1e-4, atol=1e-4)
    outputs = model(inputs).detach().requires_grad_()
    LOSS(outputs, targets).sum().backward()
    torch.testing.assert_close(found.norms, outputs.grad.norm(dim=1))
    assert (len(direction) == 2) == (layers == "last")
    assert listener.collect() is None


def test_listening_changes_neither_gradients_nor_running_statistics() -> None:
    results = []
    for listens in (True, False):
        torch.manual_seed(0)
        model = image_net()
        inputs, targets = data(model)
        if listens:
            listener = LayerPriorities(model, "all")
            listener.direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        LOSS(model(inputs), targets).mean().backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_hook_stays_and_nothing_is_heard_without_gradients() -> None:
    model = image_net()
    inputs, targets = data(model)
    listener = LayerPriorities(model)
    listener.direction = {n: torch.ones_like(p) for n, p in listener.parameters.items()}
    with torch.no_grad():
        model(inputs)
    assert listener.collect() is None
    listener.close()
    LOSS(model(inputs), targets).mean().backward()
    assert listener.collect() is None


# --- the aggregated gradient -----------------------------------------------------------


def test_aggregate_follows_eq_9_and_corrects_its_start() -> None:
    weight = nn.Parameter(torch.zeros(3))
    gradient = AggregatedGradient({"w": weight}, num_samples=10)
    assert not gradient.is_known
    rng, total, covered = np.random.default_rng(0), np.zeros(3), 0.0
    for size in (4, 2, 10, 3, 25):
        weight.grad = torch.from_numpy(rng.normal(size=3).astype(np.float32))
        gradient.absorb(size)
        size = min(size, 10)
        total = renew_sum(total, size * weight.grad.numpy(), size, 10)
        covered = renew_sum(np.array(covered), np.array(float(size)), size, 10)
        expected = total * 10 / covered
        np.testing.assert_allclose(gradient.direction["w"].numpy(), expected, rtol=1e-5)


def test_a_constant_gradient_has_its_full_length_at_once() -> None:
    weight = nn.Parameter(torch.zeros(1))
    gradient = AggregatedGradient({"w": weight}, num_samples=1000)
    weight.grad = torch.ones(1)
    for _ in range(5):
        gradient.absorb(7)
        assert gradient.direction["w"].item() == pytest.approx(1000)


def test_the_server_s_update_sets_the_direction_and_keeps_the_length() -> None:
    weight = nn.Parameter(torch.zeros(2))
    gradient = AggregatedGradient({"w": weight}, num_samples=10)
    weight.grad = torch.tensor([0.3, 0.4])
    gradient.absorb(10)
    start, end = (
        {"w": torch.tensor([1.0, 1.0]), "b": torch.ones(1)},
        {"w": torch.tensor([1.0, -1.0])},
    )
    gradient.follow(start, end)
    np.testing.assert_allclose(gradient.direction["w"].numpy(), [0.0, 5.0], rtol=1e-6)
    gradient.follow(start, start)
    np.testing.assert_allclose(gradient.direction["w"].numpy(), [0.0, 5.0], rtol=1e-6)
    fresh = AggregatedGradient({"w": weight}, num_samples=10)
    fresh.follow(start, end)
    assert fresh.is_known
    assert fresh.direction["w"][1] > 0 == fresh.direction["w"][0]


# --- the feed --------------------------------------------------------------------------


def loop(
    model: nn.Module, feed: PriorityFeed, inputs: Tensor, targets: Tensor, steps: int
) -> list[list[int]]:
    """Train as a user would; returns the batches."""
    optimizer, batches = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(steps):
        indices, weights = feed.next_batch()
        optimizer.zero_grad()
        losses = LOSS(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights).to(losses)).mean().backward()
        feed.on_batch(model, indices, losses)
        optimizer.step()
        feed.update(indices, losses.detach().numpy())
        batches.append(indices.tolist())
    return batches


@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("rule", ["stochastic", "topk", "topk-normalised"])
def test_the_sampler_hears_the_priorities_of_the_step(
    rule: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))
    inputs, targets = data(model)
    sampler = PGDSampler(NUM, 8, rule=rule, gate=0, seed=1)
    feed = PriorityFeed(sampler, model, layers=layers, stride=1)
    heard: list[tuple[np.ndarray, ...]] = []
    teach = sampler.update
    monkeypatch.setattr(
        sampler,
        "update",
        lambda *told: (heard.append(told), teach(*told)),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    total = torch.zeros(5, 9)
    for step in range(9):
        indices, weights = feed.next_batch()
        direction = feed.gradient.direction
        expected = sample_priorities(model, LOSS, inputs[indices], targets[indices], direction)
        optimizer.zero_grad()
        losses = LOSS(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights).to(losses)).mean().backward()
        upper = importance(model(inputs[indices]), targets[indices])
        extra = feed.on_batch(model, indices, losses)
        assert extra == (8 if layers == "all" and step else 0)
        total = (1 - 8 / NUM) * total + 8 * model[3].weight.grad
        torch.testing.assert_close(feed.gradient.total["3.weight"], total)
        optimizer.step()
        assert len(heard) == step  # the first batch has no direction
        if heard:
            index, scores, norms = heard[-1]
            np.testing.assert_array_equal(index, indices)
            np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(norms / norms[0], upper / upper[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("rule", "gate", "heard"),
    [
        ("stochastic", 1.2, [6, 11]),
        ("stochastic", 0.0, [3, 5, 7, 9, 11, 13]),
        ("topk", 1.2, list(range(2, 14))),
    ],
)
def test_few_batches_are_measured_and_fewer_while_the_gate_is_closed(
    rule: str, gate: float, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    inputs, targets = data(model)
    sampler, steps = PGDSampler(NUM, 4, rule=rule, gate=gate), []
    feed = PriorityFeed(sampler, model, stride=2, idle_stride=5)
    monkeypatch.setattr(sampler, "update", lambda *_: steps.append(feed._batches))
    loop(model, feed, inputs, targets, 13)
    assert steps == heard


@pytest.mark.parametrize("rule", ["stochastic", "topk"])
def test_losses_that_are_not_numbers_stop_the_step_and_teach_nothing(rule: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    inputs, targets = data(model)
    feed = PriorityFeed(PGDSampler(NUM, 4, rule=rule, gate=0), model, stride=1)
    loop(model, feed, inputs, targets, 9)
    before = feed.sampler.summary() | feed.gradient.state_dict()
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"scores must be finite, got .nan.*has diverged"):
        loop(model, feed, inputs, targets, 1)
    after = feed.sampler.summary() | feed.gradient.state_dict()
    np.testing.assert_equal(after | {"mean-age": 0}, before | {"mean-age": 0})


def test_full_pass_is_the_paper_s_initial_pass() -> None:
    torch.manual_seed(2)
    model = image_net()
    model(torch.randn(4, 1, 8, 8))
    inputs, targets = data(model)
    buffers = [b.clone() for b in model.buffers()]
    feed = PriorityFeed(PGDSampler(NUM, 4, rule="topk"), model, layers="all")
    for _ in range(2):  # the second one in the middle of training
        feed.full_pass(model, LOSS, inputs, targets, batch_size=7)
        assert feed.listener.collect() is None
        feed.next_batch()
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    LOSS(model(inputs), targets).sum().backward()
    gradient = {n: p.grad for n, p in model.named_parameters()}
    for name, part in feed.gradient.direction.items():
        torch.testing.assert_close(part, gradient[name], rtol=1e-4, atol=1e-4)
    expected = sample_priorities(model, LOSS, inputs, targets, gradient)
    found = feed.sampler.draw.trend.priority
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3)
    assert not feed.sampler.draw.is_warming_up


@pytest.mark.parametrize("rule", ["stochastic", "topk"])
def test_a_round_ends_and_the_next_begins_as_if_nothing_happened(rule: str) -> None:
    def begin(seed: int) -> tuple[nn.Module, PriorityFeed]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        return model, PriorityFeed(PGDSampler(NUM, 4, seed=seed, rule=rule, gate=0), model)

    model, feed = begin(7)
    inputs, targets = data(model)
    whole = loop(model, feed, inputs, targets, 20)
    model, feed = begin(7)
    batches = loop(model, feed, inputs, targets, 9)
    second, second_feed = begin(8)
    second.load_state_dict(model.state_dict())
    second_feed.load_state_dict(feed.state_dict())
    assert batches + loop(second, second_feed, inputs, targets, 11) == whole


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("gradient.1.weight", np.zeros((5, 3), dtype=np.float32), "no gradient of 1.weight"),
        ("gradient.1.bias", np.full(5, np.nan, dtype=np.float32), "no gradient of 1.bias"),
        ("gradient.1.bias", None, "no gradient of 1.bias"),
        ("gradient_covered", -1.0, "impossible cover"),
        ("rule", "topk", "has rule='topk'"),
        ("batches", None, "counts no batches"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    key: str, value: object, match: str
) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    inputs, targets = data(model)
    feed = PriorityFeed(PGDSampler(NUM, 4, gate=0), model)
    state = feed.state_dict()
    loop(model, feed, inputs, targets, 5)
    before = feed.state_dict()
    with pytest.raises(ValueError, match=match):
        feed.load_state_dict({**state, key: value})  # type: ignore[dict-item]
    after = feed.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("sampler", "model", "layers", "match"),
    [
        (PGDSampler(4, 2, rule="topk", aggressive=False), nn.Linear(2, 2), "last", "aggressive"),
        (PGDSampler(4, 2), nn.ReLU(), "last", "model must have parameters, got 'ReLU'"),
        (PGDSampler(4, 2), nn.Linear(2, 2), "first", "layers must be one of"),
        (PGDSampler(4, 2), nn.LSTM(2, 2), "last", "must be linear in its parameters"),
        (
            PGDSampler(4, 2),
            nn.Sequential(nn.GRU(2, 2), nn.Linear(2, 2)),
            "all",
            "layer '0' must be linear in its parameters .* got 'GRU': listen to the last layer",
        ),
    ],
)
def test_refuses(sampler: PGDSampler, model: nn.Module, layers: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PriorityFeed(sampler, model, layers=layers)


@pytest.mark.parametrize("name", ["stride", "idle_stride"])
def test_refuses_a_stride_of_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        PriorityFeed(PGDSampler(4, 2), nn.Linear(2, 2), **{name: 0})


def test_with_the_gate_closed_training_is_training_with_uniform_sampling() -> None:
    results = []
    for draws in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
        inputs, targets = data(model)
        feed = PriorityFeed(PGDSampler(NUM, 4, seed=2, gate=1e9), model, idle_stride=3)
        uniform = UniformSampler(NUM, 4, seed=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(25):
            indices, weights = feed.next_batch() if draws else uniform.next_batch()
            optimizer.zero_grad()
            losses = LOSS(model(inputs[indices]), targets[indices])
            (losses * torch.from_numpy(weights).to(losses)).mean().backward()
            if draws:
                feed.on_batch(model, indices, losses)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
