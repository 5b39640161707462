"""Models of the apps by name, and users' own by import path."""

from flwr_hetero_studies.tasks.models.build import (
    IMAGE_MODELS,
    TEXT_MODELS,
    check_model,
    make_model,
    model_from,
)

__all__ = ["IMAGE_MODELS", "TEXT_MODELS", "check_model", "make_model", "model_from"]
