"""Data, small models and the training loop that the apps and studies share."""

from flwr_hetero_studies.tasks.data import Examples, data_shape, hold_out, load_partition, load_test
from flwr_hetero_studies.tasks.kinds import Task
from flwr_hetero_studies.tasks.models import make_model, model_from
from flwr_hetero_studies.tasks.node import (
    NodeTask,
    evaluate_node,
    open_node,
    profile_node,
    train_node,
)
from flwr_hetero_studies.tasks.run import central_evaluate, initial_arrays
from flwr_hetero_studies.tasks.settings import Settings
from flwr_hetero_studies.tasks.training import TrainResult, batch_losses, evaluate, train

__all__ = [
    "Examples", "NodeTask", "Settings", "Task", "TrainResult", "batch_losses", "central_evaluate",
    "data_shape", "evaluate", "evaluate_node", "hold_out", "initial_arrays", "load_partition",
    "load_test", "make_model", "model_from", "open_node", "profile_node", "train", "train_node",
]  # fmt: skip
