import numpy as np
import pytest
import torch

from flwr_hetero.client.batch_sampler import BatchSampler, UniformSampler
from flwr_hetero_studies.tasks import Examples, make_model, train

RNG = np.random.default_rng(0)
EXAMPLES = Examples(
    torch.from_numpy(RNG.normal(size=(12, 1, 2, 2)).astype(np.float32)),
    torch.from_numpy(RNG.integers(0, 3, 12)),
)
X, Y = EXAMPLES.inputs.numpy().reshape(12, 4).astype(np.float64), EXAMPLES.targets.numpy()
BATCHES = [
    (np.array([0, 3, 3]), np.array([0.5, 2.0, 1.0])),
    (np.array([7]), np.array([3.0])),
    (np.array([1, 2]), np.array([1.0, 0.0])),
]


class Script(BatchSampler):
    """Draws given batches and notes what it is told."""

    def __init__(self):
        super().__init__(len(EXAMPLES), 1)
        self.batches = list(BATCHES)
        self.told = []

    def next_batch(self):
        return self.batches.pop(0)

    def update(self, indices, scores):
        self.told.append(self.check_scores(indices, scores))


def softmax(seed=0):
    return make_model("softmax", (1, 2, 2), 3, seed=seed)


def by_hand(lr, proximal=0.0, weight_decay=0.0):
    """Run BATCHES with NumPy: softmax regression, gradient written out."""
    w, b = (p.detach().numpy().astype(np.float64) for p in softmax().parameters())
    w0 = w.copy()
    b0 = b.copy()
    seen = []
    for indices, weights in BATCHES:
        x = X[indices]
        y = Y[indices]
        logits = x @ w.T + b
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        seen.append(-np.log(p[np.arange(len(y)), y]))
        error = (p - np.eye(3)[y]) * weights[:, None] / len(y)
        slope_w = error.T @ x + proximal * (w - w0) + weight_decay * w
        slope_b = error.sum(0) + proximal * (b - b0) + weight_decay * b
        w = w - lr * slope_w
        b = b - lr * slope_b
    return w, b, seen


@pytest.mark.parametrize(
    "settings", [{"lr": 0.5}, {"lr": 0.5, "proximal": 0.8}, {"lr": 0.2, "weight_decay": 0.3}]
)
def test_steps_equal_numpy(settings):
    model = softmax()
    sampler = Script()
    result = train(model, EXAMPLES, sampler, num_steps=3, **settings)
    w, b, seen = by_hand(**settings)
    np.testing.assert_allclose(model[1].weight.detach(), w, atol=1e-6)
    np.testing.assert_allclose(model[1].bias.detach(), b, atol=1e-6)
    every = np.concatenate(seen)
    assert result[:3] == (3, 6, 0)
    assert result[3:5] == pytest.approx((every.mean(), np.sqrt((every**2).mean())), rel=1e-5)
    for (indices, _), (told, scores), losses in zip(BATCHES, sampler.told, seen, strict=True):
        np.testing.assert_array_equal(told, indices)
        np.testing.assert_allclose(scores, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0.0}, "lr must"),
        ({"proximal": -0.1}, "proximal must"),
        ({"sampler": UniformSampler(11, 4)}, r"sampler\.num_samples must be the number of .* 12"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, rmsprop, adam, adamw"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum must be 0 with adam"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda"),
        ({"device": "cuda"}, "device must be visible here, got 'cuda': in a simulation"),
    ],
)
def test_bad_knobs_are_refused(given, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    how = {"sampler": Script(), "num_steps": 1, "lr": 0.1} | given
    with pytest.raises(ValueError, match=words):
        train(softmax(), EXAMPLES, **how)
