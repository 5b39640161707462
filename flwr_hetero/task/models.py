"""Small models for small images, one that is not so small, and two for texts."""

import copy
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib import import_module
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.task.texts import VOCABULARY

Shape = tuple[int, ...]
"""Of an input: (C, H, W) of an image, (columns, 1, 1) of a row of numbers, (LENGTH,) of a text."""
Builder = Callable[[Shape, int], nn.Module]
SMALL = 16
"""Images smaller than this are pooled once by ``cnn``, larger ones twice."""
LARGE = 64
"""Images from this size on get ``resnet18`` by ``auto``, and its original stem."""


def make_model(name: str, input_shape: Shape, num_classes: int, seed: int = 0) -> nn.Module:
    """Build a model; the caller's random state is left as it was."""
    if min(*input_shape, num_classes) < 1:
        raise invalid("input_shape", (*input_shape, num_classes), "be positive")
    build = _builder(name, input_shape)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return channels_last(build(input_shape, num_classes))


def _builder(name: str, shape: Shape) -> Builder:
    """Choose by the kind of input, or refuse a model for another kind."""
    if is_path(name):
        return partial(_build_own, name)
    if name == "auto":
        if len(shape) == 1:
            return bag
        smallest = min(shape[1:])
        return mlp if smallest == 1 else resnet18 if smallest >= LARGE else cnn
    check_choice("model", name, MODELS)
    if (name in TEXT_MODELS) != (len(shape) == 1):
        kind, known = ("texts", TEXT_MODELS) if len(shape) == 1 else ("numbers", IMAGE_MODELS)
        raise invalid("model", name, f"fit inputs that are {kind}: auto, {', '.join(known)}")
    if name in TEXT_MODELS:
        return TEXT_MODELS[name]
    build, smallest = IMAGE_MODELS[name]
    if min(shape[1:]) < smallest:
        rule = f"fit images of {shape[1]}x{shape[2]} (it needs {smallest} pixels)"
        raise invalid("model", name, rule, "softmax and mlp take any size")
    return build


def is_path(name: str) -> bool:
    """Tell whether a model is given as ``package.module:function``."""
    return ":" in name


def check_model(name: str) -> None:
    """Refuse a name that no model has, and an import path that leads to no function."""
    if is_path(name):
        own_builder(name)
    else:
        check_choice("model", name, ("auto", *MODELS))


def own_builder(path: str) -> Callable[[Shape, int], object]:
    """Import a function that takes an input's shape and the number of classes."""
    module, _, function = path.partition(":")
    try:
        build = getattr(import_module(module), function, None)
    except (ImportError, TypeError, ValueError) as error:
        raise invalid("model", path, f"be package.module:function ({error})") from error
    if not callable(build):
        raise invalid("model", path, f"name a function of the module {module}")
    return cast(Callable[[Shape, int], object], build)


def _build_own(path: str, shape: Shape, num_classes: int) -> nn.Module:
    """Build a user's model, and try it on inputs of zeros."""
    model = own_builder(path)(shape, num_classes)
    if not isinstance(model, nn.Module):
        rule = f"return a torch.nn.Module (it returned {type(model).__name__})"
        raise invalid("model", path, rule)
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if len(shape) == 1 else torch.float32)
    with torch.no_grad():
        logits = model.eval()(inputs)
    if (found := tuple(logits.shape)) != (2, num_classes):
        rule = f"map inputs {tuple(inputs.shape)} to logits (2, {num_classes}), not {found}"
        raise invalid("model", path, rule)
    return model.train()


def model_from(
    state: Mapping[str, Tensor], name: str, input_shape: Shape, num_classes: int
) -> nn.Module:
    """Build a model around given parameters; none are drawn, which is the slow part."""
    model = copy.deepcopy(_skeleton(name, input_shape, num_classes))
    model.load_state_dict(state, assign=not is_path(name))  # which would untie shared parameters
    return channels_last(model)


def channels_last(model: nn.Module) -> nn.Module:
    """Lay out kernels with channels last; names, shapes and values stay."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def softmax(shape: Shape, num_classes: int) -> nn.Module:
    """Multinomial logistic regression: a convex problem."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), num_classes))


def mlp(shape: Shape, num_classes: int) -> nn.Module:
    """One hidden layer of 300 units (PGD, section 6)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), 300), nn.ReLU(), nn.Linear(300, num_classes)
    )


def cnn(shape: Shape, num_classes: int) -> nn.Module:
    """Two convolutions of 16 and 32 channels and one linear layer."""
    pool = nn.Identity() if min(shape[1:]) < SMALL else nn.MaxPool2d(2)
    body = nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1), pool, nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(*body, nn.Linear(_features(body, shape), num_classes))


def lenet(shape: Shape, num_classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling; 28x28 images are padded to 32x32."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2 if shape[1] < 32 else 0), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        *body, nn.Linear(_features(body, shape), 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
    )  # fmt: skip


def cnn4(shape: Shape, num_classes: int) -> nn.Module:
    """Four convolutions and two linear layers (TiFL, section 5.1, for CIFAR-10)."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(
        *body, nn.Linear(_features(body, shape), 128), nn.ReLU(), nn.Linear(128, num_classes)
    )


def resnet18(shape: Shape, num_classes: int) -> nn.Module:
    """Torchvision's ResNet-18 with GroupNorm; small images get a 3x3 stem without pooling."""
    from torchvision import models  # takes seconds, and is needed here only

    model: nn.Module = models.resnet18(
        weights=None, num_classes=num_classes, norm_layer=lambda width: nn.GroupNorm(32, width)
    )
    if min(shape[1:]) < LARGE:
        model.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif shape[0] != 3:
        model.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    return model


class Bag(nn.Module):
    """Linear in the sum of the tokens' embeddings, over the square root of their number."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = embedding(width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map token numbers (batch, length) to logits."""
        count = (numbers != 0).sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.output(self.embedding(numbers).sum(1) / count.sqrt())
        return logits


class TextCNN(nn.Module):
    """Convolution over three tokens and its maximum over the text (Kim, 2014)."""

    def __init__(self, num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = embedding(width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.output = nn.Linear(width, num_classes)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map token numbers (batch, length) to logits."""
        found = self.convolution(self.embedding(numbers).transpose(1, 2)).relu()
        logits: Tensor = self.output(found.amax(2))
        return logits


def embedding(width: int) -> nn.Embedding:
    """Make an embedding of tokens; that of padding is 0 and stays so."""
    layer = nn.Embedding(VOCABULARY, width, padding_idx=0)
    with torch.no_grad():
        layer.weight *= 0.2  # from N(0, 1), with which a linear model learns slowly
    return layer


def bag(shape: Shape, num_classes: int) -> nn.Module:
    """Bag of words: embeddings of 32 numbers and one linear layer."""
    return Bag(num_classes)


def textcnn(shape: Shape, num_classes: int) -> nn.Module:
    """One convolution over the order of the words: 64 embeddings, 64 channels."""
    return TextCNN(num_classes)


IMAGE_MODELS: dict[str, tuple[Builder, int]] = {
    "softmax": (softmax, 1),
    "mlp": (mlp, 1),
    "cnn": (cnn, 2),
    "lenet": (lenet, 12),
    "cnn4": (cnn4, 4),
    "resnet18": (resnet18, 8),
}
"""Name to builder and the smallest height and width it can take; 1 fits rows of numbers too."""
TEXT_MODELS: dict[str, Builder] = {"bag": bag, "textcnn": textcnn}
MODELS = (*IMAGE_MODELS, *TEXT_MODELS)


@lru_cache(maxsize=8)
def _skeleton(name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    """Build a model without storage for its parameters, unless it is a user's own."""
    with torch.device("cpu" if is_path(name) else "meta"):
        return make_model(name, input_shape, num_classes)


def _features(body: nn.Module, shape: Shape) -> int:
    with torch.no_grad():
        flat: Tensor = body(torch.zeros(1, *shape))
    return flat.shape[1]
