"""Models of the apps by name, and users' own by import path."""

from flwr_hetero.task.models.build import (
    FITTING,
    IMAGE_MODELS,
    MODELS,
    TEXT_MODELS,
    check_model,
    make_model,
    model_from,
)
from flwr_hetero.task.models.images import cnn, cnn4, lenet, mlp, resnet18, softmax
from flwr_hetero.task.models.language import gpt, lstm_lm
from flwr_hetero.task.models.signals import ar_mlp, speech_cnn
from flwr_hetero.task.models.texts import bag, lstm, textcnn

__all__ = [
    "FITTING",
    "IMAGE_MODELS",
    "MODELS",
    "TEXT_MODELS",
    "ar_mlp",
    "bag",
    "check_model",
    "cnn",
    "cnn4",
    "gpt",
    "lenet",
    "lstm",
    "lstm_lm",
    "make_model",
    "mlp",
    "model_from",
    "resnet18",
    "softmax",
    "speech_cnn",
    "textcnn",
]
