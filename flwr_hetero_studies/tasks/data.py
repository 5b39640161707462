"""The examples of a node and of the server as tensors, kept in memory between rounds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_hetero.errors import invalid
from flwr_hetero_studies.tasks.kinds import AUTO, CLASSIFICATION, Outputs, Task
from flwr_hetero_studies.tasks.partitions import partition_rows
from flwr_hetero_studies.tasks.sources import DataSource, Split, open_source

HELD_OUT_SHARE = 0.1
"""Share of a node's examples that it evaluates on and never trains on."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, which calls share and so must not change, and their task."""

    inputs: Tensor
    targets: Tensor
    task: Task = CLASSIFICATION

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(indices).to(self.targets.device)
        return self.inputs[index], self.targets[index]

    def to(self, device: torch.device | str) -> "Examples":
        return Examples(self.inputs.to(device), self.targets.to(device), self.task)


def load_partition(
    dataset: str,
    partition_id: int,
    num_partitions: int,
    *,
    task: str = AUTO,
    partition: str = "iid",
    alpha: float = 0.5,
    classes_per_node: int = 2,
    seed: int = 0,
) -> Examples:
    if not 0 <= partition_id < num_partitions:
        raise invalid("partition_id", partition_id, f"lie in 0..{num_partitions - 1}")
    # 1 and 1.0 must be the same key of the cache.
    division = (num_partitions, partition, float(alpha), classes_per_node, seed)
    return _load_part(dataset, task, partition_id, *division)


@lru_cache(maxsize=4)
def load_test(dataset: str, task: str = AUTO) -> Examples:
    source = open_source(dataset, task)
    return _examples(source, source.test, np.arange(len(source.test.rows)))


def data_shape(dataset: str, task: str = AUTO) -> tuple[tuple[int, ...], Outputs]:
    """Return what a model must fit: the shape of an input, and the outputs."""
    source = open_source(dataset, task)
    return source.shape, source.outputs


def hold_out(examples: Examples) -> tuple[Examples, Examples]:
    """Return what a node trains on and what it evaluates on, as views."""
    cut = len(examples) - max(1, round(len(examples) * HELD_OUT_SHARE))
    trained = Examples(examples.inputs[:cut], examples.targets[:cut], examples.task)
    held_out = Examples(examples.inputs[cut:], examples.targets[cut:], examples.task)
    return trained, held_out


@lru_cache(maxsize=16)
def _rows(dataset: str, task: str, *division: Any) -> list[NDArray[np.int64]]:
    return partition_rows(open_source(dataset, task).train.labels, *division)


@lru_cache(maxsize=128)
def _load_part(dataset: str, task: str, partition_id: int, *division: Any) -> Examples:
    source = open_source(dataset, task)
    return _examples(source, source.train, _rows(dataset, task, *division)[partition_id])


def _examples(source: DataSource, split: Split, positions: NDArray[np.int64]) -> Examples:
    values = split.inputs.take(split.rows[positions])
    if source.scale is not None:
        # The part is a copy, so it can be changed in place.
        values -= source.scale.mean
        values /= source.scale.std
    inputs, targets = source.task.divide(values, split.labels[positions])
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets), source.task)
