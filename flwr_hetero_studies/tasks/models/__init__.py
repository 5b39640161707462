"""Models by name, and which inputs and outputs they fit; and models of users."""

import copy
from collections.abc import Callable, Mapping
from functools import lru_cache
from pkgutil import resolve_name
from typing import cast

import torch
from torch import Tensor, nn

from flwr_hetero.errors import check_choice, invalid
from flwr_hetero_studies.tasks.kinds import Outputs
from flwr_hetero_studies.tasks.models import images
from flwr_hetero_studies.tasks.models.texts import bag, gpt, lstm_lm

Shape = tuple[int, ...]
"""Of an input: (C, H, W) of an image, (columns, 1, 1) of a row of numbers, (1, steps) of a series,
(length,) of a text."""
Builder = Callable[..., nn.Module]
"""Takes the shape of an input and the outputs."""
IMAGES = (3, 0)
TEXTS = (1, 0)
LANGUAGE = (1, 2)
FORECASTS = (2, 1)
"""Number of an input's dimensions and of an output's; 0 stands for logits of classes."""
IMAGE_MODELS: dict[str, tuple[Builder, int]] = {
    "softmax": (images.softmax, 1), "mlp": (images.mlp, 1), "cnn": (images.cnn, 2),
    "lenet": (images.lenet, 12), "resnet18": (images.resnet18, 8),
}  # fmt: skip
"""Name to builder and the smallest height and width it can take; 1 fits rows of numbers too."""
FITTING: dict[tuple[int, int], dict[str, Builder]] = {
    IMAGES: {name: build for name, (build, _) in IMAGE_MODELS.items()},
    TEXTS: {"bag": bag},
    LANGUAGE: {"lstm-lm": lstm_lm, "gpt": gpt},
    FORECASTS: {"ar-mlp": images.ar_mlp},
}
"""Models that fit a kind. ``auto`` takes the first, and for images goes by their size."""
MODELS = tuple(dict.fromkeys(name for models in FITTING.values() for name in models))


def make_model(name: str, input_shape: Shape, outputs: Outputs, seed: int = 0) -> nn.Module:
    build = _builder(name, input_shape, outputs)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return channels_last(build(input_shape, outputs))


def _builder(name: str, shape: Shape, outputs: Outputs) -> Builder:
    if is_path(name):
        return imported(name)
    # Only the numbers of dimensions decide whether a model fits.
    kind = (len(shape), 0 if isinstance(outputs, int) else len(outputs))
    known = FITTING.get(kind, {})
    if name == "auto" and kind == IMAGES:
        if min(shape[1:]) == 1:
            return images.mlp
        return images.resnet18 if min(shape[1:]) >= images.LARGE else images.cnn
    if name == "auto" and known:
        return next(iter(known.values()))
    if name not in known:
        rule = f"fit inputs {shape} and outputs {outputs}: {', '.join([*known, 'your own'])}"
        raise invalid("model", name, rule, "give its import path, package.module:function")
    if kind == IMAGES and min(shape[1:]) < IMAGE_MODELS[name][1]:
        rule = f"fit images of {shape[1]}x{shape[2]} (it needs {IMAGE_MODELS[name][1]} pixels)"
        raise invalid("model", name, rule, "softmax and mlp take any size")
    return known[name]


def check_model(name: str) -> None:
    if is_path(name):
        imported(name)
    else:
        check_choice("model", name, ("auto", *MODELS))


def is_path(name: str) -> bool:
    return ":" in name


def imported(path: str) -> Builder:
    try:
        return cast(Builder, resolve_name(path))
    except (ImportError, AttributeError, ValueError) as error:
        raise invalid("model", path, f"be package.module:function ({error})") from error


def model_from(
    state: Mapping[str, Tensor], name: str, input_shape: Shape, outputs: Outputs
) -> nn.Module:
    """Build a model with given parameters, which is fast because none are drawn."""
    # The skeleton is shared, so fill in a copy.
    model = copy.deepcopy(_skeleton(name, input_shape, outputs))
    # A user's model may share parameters between layers, and assigning would untie them.
    model.load_state_dict(state, assign=not is_path(name))
    return channels_last(model)


def channels_last(model: nn.Module) -> nn.Module:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


@lru_cache(maxsize=8)
def _skeleton(name: str, input_shape: Shape, outputs: Outputs) -> nn.Module:
    # Buffers of a user's model need their values, and meta tensors have none.
    with torch.device("cpu" if is_path(name) else "meta"):
        return make_model(name, input_shape, outputs)
