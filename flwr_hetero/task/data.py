"""The examples of a node and of the server, ready for torch, kept in memory between rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_hetero.errors import invalid
from flwr_hetero.task.partitions import partition_rows
from flwr_hetero.task.sources import Source, Split, open_source

HELD_OUT_SHARE = 0.1
"""Share of a node's examples that it evaluates on and never trains on."""


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, to be read only: they are shared between calls.

    Parameters
    ----------
    inputs : Tensor of float32, shape (n, C, H, W)
        Images, normalised by channel.
    targets : Tensor of int64, shape (n,)
        Classes, from 0.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a batch.

        Parameters
        ----------
        indices : ndarray of int64, shape (batch,)
            Which examples.

        Returns
        -------
        tuple of Tensor
            Copies.
        """
        index = torch.from_numpy(indices).to(self.targets.device)
        return self.inputs[index], self.targets[index]

    def to(self, device: torch.device | str) -> "Examples":
        """Return the examples on a device.

        Parameters
        ----------
        device : torch.device or str
            Where.

        Returns
        -------
        moved : Examples
            The same tensors if they are there already.
        """
        return Examples(self.inputs.to(device), self.targets.to(device))


def load_partition(
    dataset: str,
    partition_id: int,
    num_partitions: int,
    *,
    partition: str = "iid",
    alpha: float = 0.5,
    classes_per_node: int = 2,
    seed: int = 0,
) -> Examples:
    """Load a node's part of the training examples; a second call costs next to nothing.

    Parameters
    ----------
    dataset : str
        ``digits``, a folder or file of Parquet, or a name on the Hub: see
        :func:`~flwr_hetero.task.sources.open_source`.
    partition_id : int
        Which part, from 0.
    num_partitions : int
        Number of parts.
    partition, alpha, classes_per_node, seed
        How examples are dealt: see :func:`~flwr_hetero.task.partitions.partition_rows`.

    Returns
    -------
    part : Examples
        In random order, the same at each call.

    Raises
    ------
    ValueError
        If an argument is out of range or the data set cannot be read.

    Examples
    --------
    >>> examples = load_partition("digits", 0, 10)
    >>> tuple(examples.inputs.shape), len(examples)
    ((144, 1, 8, 8), 144)
    """
    if not 0 <= partition_id < num_partitions:
        rule = f"lie in 0..{num_partitions - 1} for {num_partitions} partitions"
        raise invalid("partition_id", partition_id, rule, "check the node's config")
    deal = (dataset, num_partitions, partition, float(alpha), classes_per_node, seed)
    return _load_part(partition_id, *deal)


def load_test(dataset: str) -> Examples:
    """Load the test examples; a second call costs next to nothing.

    Parameters
    ----------
    dataset : str
        As for :func:`load_partition`.

    Returns
    -------
    test : Examples
        Normalised by the figures of the training images.

    Raises
    ------
    ValueError
        If the data set cannot be read.

    Examples
    --------
    >>> len(load_test("digits"))
    359
    """
    return _load_test(dataset)


def data_shape(dataset: str) -> tuple[tuple[int, int, int], int]:
    """Return what a model for a data set must fit.

    Parameters
    ----------
    dataset : str
        As for :func:`load_partition`.

    Returns
    -------
    input_shape : tuple of int
        (C, H, W).
    num_classes : int
        Number of classes.

    Raises
    ------
    ValueError
        If the data set cannot be read.

    Examples
    --------
    >>> data_shape("digits")
    ((1, 8, 8), 10)
    """
    source = open_source(dataset)
    return source.shape, source.num_classes


def partition_labels(
    dataset: str,
    num_partitions: int,
    *,
    partition: str = "iid",
    alpha: float = 0.5,
    classes_per_node: int = 2,
    seed: int = 0,
) -> list[NDArray[np.int64]]:
    """Return the labels that each node holds, for a check before training or for a plot.

    Parameters
    ----------
    dataset, num_partitions, partition, alpha, classes_per_node, seed
        As for :func:`load_partition`.

    Returns
    -------
    list of ndarray of int64
        Class of each example of each node.

    Raises
    ------
    ValueError
        If an argument is out of range or the data set cannot be read.

    Examples
    --------
    >>> [len(labels) for labels in partition_labels("digits", 5, partition="quantity")]
    [144, 216, 287, 360, 431]
    """
    labels = open_source(dataset).train.labels
    parts = _deal(dataset, num_partitions, partition, float(alpha), classes_per_node, seed)
    return [labels[part] for part in parts]


def hold_out(examples: Examples) -> tuple[Examples, Examples]:
    """Divide a node's examples into those to train on and those to evaluate on.

    Parameters
    ----------
    examples : Examples
        At least 2.

    Returns
    -------
    train, held_out : Examples
        Views; the last tenth, at least one example, is held out.

    Examples
    --------
    >>> [len(part) for part in hold_out(load_partition("digits", 0, 10))]
    [130, 14]
    """
    cut = len(examples) - max(1, round(len(examples) * HELD_OUT_SHARE))
    return (
        Examples(examples.inputs[:cut], examples.targets[:cut]),
        Examples(examples.inputs[cut:], examples.targets[cut:]),
    )


@lru_cache(maxsize=16)
def _deal(
    dataset: str,
    num_partitions: int,
    partition: str,
    alpha: float,
    classes_per_node: int,
    seed: int,
) -> Sequence[NDArray[np.int64]]:
    return partition_rows(
        open_source(dataset).train.labels,
        num_partitions,
        partition,
        alpha=alpha,
        classes_per_node=classes_per_node,
        seed=seed,
    )


@lru_cache(maxsize=128)
def _load_part(partition_id: int, dataset: str, *deal: Any) -> Examples:
    rows = _deal(dataset, *deal)[partition_id]
    source = open_source(dataset)
    return _examples(source, source.train, rows)


@lru_cache(maxsize=4)
def _load_test(dataset: str) -> Examples:
    source = open_source(dataset)
    return _examples(source, source.test, np.arange(len(source.test.rows)))


def _examples(source: Source, split: Split, positions: NDArray[np.int64]) -> Examples:
    pixels = split.images.take(split.rows[positions])
    pixels -= source.mean
    pixels /= source.std
    return Examples(torch.from_numpy(pixels), torch.from_numpy(split.labels[positions]))
