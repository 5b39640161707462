import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_hetero.client.weighted_loss import scoring
from flwr_hetero_studies.tasks import Settings, data_shape, load_test, make_model, model_from
from flwr_hetero_studies.tasks.models import FITTING, IMAGE_MODELS, TEXTS

TEXT_MODELS = FITTING[TEXTS]
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 80)]
FITS = [
    (name, shape)
    for name, (_, smallest) in IMAGE_MODELS.items()
    for shape in SHAPES
    if shape[1] >= smallest and (name != "resnet18" or shape[1] >= 32)
]


@pytest.mark.parametrize(("name", "shape"), FITS)
def test_models_map_shapes_to_logits(name, shape):
    assert make_model(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_models_ignore_padding(name):
    model = make_model(name, (9,), 7)
    long = torch.tensor([[5, 4095, 1, 0, 0, 0, 0, 0, 0]])
    logits = model(long)
    assert logits.shape == (1, 7)
    assert model(long[:, :5]).allclose(logits)
    assert not model(torch.tensor([[5, 4095, 2, 0, 0]])).allclose(logits)
    assert model(torch.zeros(2, 9, dtype=torch.int64)).isfinite().all()  # an empty text


@pytest.mark.parametrize("name", ["mlp", "cnn", "bag"])
def test_model_survives_a_message(name):
    shape = (64,) if name in TEXT_MODELS else (3, 32, 32)
    model = make_model(name, shape, 10, seed=3)
    state = ArrayRecord(model.state_dict()).to_torch_state_dict()
    twin = model_from(state, name, shape, 10)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32))
    x = x.abs().long() if name in TEXT_MODELS else x
    assert torch.equal(model(x), twin(x))
    assert all(p.requires_grad and not p.is_meta for p in twin.parameters())
    other = make_model(name, shape, 10, seed=4)
    model_from(other.state_dict(), name, shape, 10)  # the skeleton is not shared
    assert torch.equal(model(x), twin(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        model_from({}, name, shape, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vgg", (1, 8, 8), 10), r"fit inputs \(1, 8, 8\) and outputs 10: softmax, .* got 'vgg'"),
        (("lenet", (1, 8, 8), 10), r"model must fit images of 8x8 \(it needs 12 pixels\)"),
        (("cnn", (64,), 10), "model must fit inputs .*: bag, .*'cnn'"),
        (("bag", (64,), (64, 128)), "fit inputs .*: lstm-lm, gpt"),
        (("gpt", (1, 20), (6,)), "fit inputs .*: ar-mlp, your own, got"),
        (("cnn", (30, 1, 1), 10), "images of 1x1 .*softmax and mlp take any size"),
    ],
)
def test_model_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(*arguments)


class Tied(nn.Module):
    """A model of a user's own, whose layers share parameters."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.first = nn.Linear(shape[0], num_classes, bias=False)
        self.again = nn.Linear(shape[0], num_classes, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("twos", torch.full((num_classes,), 2.0), persistent=False)

    def forward(self, x):
        return (self.first(x.flatten(1)) + self.again(x.flatten(1))) * self.twos


def test_own_model_by_import_path():
    """Parameters that layers share stay shared; a buffer that is not sent keeps its value."""
    name = f"{__name__}:Tied"
    shape = (4, 1, 1)
    x = torch.arange(8.0).reshape(2, 4, 1, 1)
    assert Settings(model=name).model == name
    model = make_model(name, shape, 3, seed=5)
    twin = model_from(ArrayRecord(model.state_dict()).to_torch_state_dict(), name, shape, 3)
    assert torch.equal(twin(x), model(x))
    assert twin.again.weight is twin.first.weight
    assert twin.training
    expected = 4 * x.flatten(1) @ model.first.weight.T
    torch.testing.assert_close(twin(x), expected)


@pytest.mark.parametrize("name", ["no_such_package:build", f"{__name__}:build"])
def test_unknown_path_of_a_model_is_refused(name):
    with pytest.raises(ValueError, match=rf"model must be package.module:function \(.*{name}"):
        Settings(model=name)


def test_own_model_of_the_page(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "page_module.py").write_text(block, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = make_model("page_module:build", *data_shape("stdlib"))
    assert model(load_test("stdlib").inputs[:3]).shape == (3, 10)


def test_scoring_leaves_an_lstm_differentiable_by_cudnn():
    """In eval mode cuDNN has no backward pass; without dropout the mode says nothing else."""
    model = make_model("lstm-lm", (12,), (12, 128)).eval()
    with scoring(model):
        assert [name for name, module in model.named_modules() if module.training] == ["lstm"]
        model.lstm.dropout = 0.5
    with scoring(model.train()):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
