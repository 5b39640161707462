"""Which rows of a data set each node holds: drawn from the labels, NumPy only."""

from collections.abc import Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

PARTITIONS = ("iid", "dirichlet", "classes", "quantity", "quantity-classes")


MIN_EXAMPLES = 2
"""Fewest examples of a node: one to train on and one held out."""


QUANTITY_SHARES = (0.10, 0.15, 0.20, 0.25, 0.30)
"""TiFL, section 5.1: share of the data of each of five equal groups of nodes."""


Rows = NDArray[np.int64]


def partition_rows(
    labels: NDArray[np.int64],
    num_partitions: int,
    partition: str = "iid",
    *,
    alpha: float = 0.5,
    classes_per_node: int = 2,
    seed: int = 0,
) -> list[Rows]:
    """Deal the rows of a data set to nodes."""
    check_partition(partition, alpha, classes_per_node)
    _check_sizes(len(labels), num_partitions)
    rng = np.random.default_rng(seed)
    weights = np.ones(num_partitions)
    if partition.startswith("quantity"):
        group = np.arange(num_partitions) * len(QUANTITY_SHARES) // num_partitions
        weights = np.asarray(QUANTITY_SHARES)[group]
    if partition == "dirichlet":
        parts = dirichlet_parts(labels, num_partitions, alpha, rng)
    elif partition.endswith("classes"):
        parts = class_parts(labels, weights, classes_per_node, rng)
    else:
        parts = _split(rng.permutation(len(labels)), weights)
    parts = [rng.permutation(part) for part in parts]
    return _top_up(parts) if partition == "dirichlet" else _check_parts(parts)


def check_partition(partition: str, alpha: float, classes_per_node: int) -> None:
    """Refuse what no data set could be partitioned by; see :func:`partition_rows`."""
    if partition not in PARTITIONS:
        cure = f"use one of {', '.join(PARTITIONS)}"
        raise invalid("partition", partition, "be a known way to deal data", cure)
    if not (isfinite(alpha) and alpha > 0):
        raise invalid("alpha", alpha, "be positive and finite", "0.5 is uneven, 100 nearly even")
    if classes_per_node < 1:
        raise invalid("classes_per_node", classes_per_node, "be at least 1", "the paper uses 2..10")


def dirichlet_parts(
    labels: NDArray[np.int64], num_partitions: int, alpha: float, rng: np.random.Generator
) -> list[Rows]:
    """Split each class by shares from a symmetric Dirichlet distribution.

    Notes
    -----
    The same parts as Flower Datasets' ``DirichletPartitioner`` without a minimum size, in a
    hundredth of the time.
    """
    parts: list[list[Rows]] = [[] for _ in range(num_partitions)]
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        shares = rng.dirichlet(np.full(num_partitions, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def class_parts(
    labels: NDArray[np.int64],
    weights: NDArray[np.float64],
    classes_per_node: int,
    rng: np.random.Generator,
) -> list[Rows]:
    """Give each node a few classes, and split each class among the nodes that have it."""
    classes = np.unique(labels)
    least = -(-len(classes) // len(weights))
    if not least <= classes_per_node <= len(classes):
        rule = f"lie in {least}..{len(classes)} for {len(weights)} nodes and {len(classes)} classes"
        cure = "so that a node can hold as many and each class is held by someone"
        raise invalid("classes_per_node", classes_per_node, rule, cure)
    deal = deal_classes(len(classes), len(weights), classes_per_node, rng)
    parts: list[list[Rows]] = [[] for _ in weights]
    for position, label in enumerate(classes):
        holders = np.flatnonzero((deal == position).any(axis=1))
        rows = rng.permutation(np.flatnonzero(labels == label))
        for holder, piece in zip(holders, _split(rows, weights[holders]), strict=True):
            parts[holder].append(piece)
    return [np.concatenate(part) for part in parts]


def deal_classes(
    num_classes: int, num_partitions: int, classes_per_node: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Deal classes like cards, deck after deck, so that all are held about equally often."""
    cards: list[int] = []
    while len(cards) < num_partitions * classes_per_node:
        deck = rng.permutation(num_classes)
        hand = cards[len(cards) - len(cards) % classes_per_node :]  # of a player half served
        held = np.isin(deck, hand)
        cards += [*deck[~held].tolist(), *deck[held].tolist()]
    dealt = np.asarray(cards[: num_partitions * classes_per_node])
    return dealt.reshape(num_partitions, classes_per_node)


def _split(rows: Rows, weights: NDArray[np.float64]) -> list[Rows]:
    cuts = np.rint(np.cumsum(weights)[:-1] / weights.sum() * len(rows)).astype(np.int64)
    return np.split(rows, cuts)


def _check_sizes(num_rows: int, num_partitions: int) -> None:
    if not 1 <= num_partitions * MIN_EXAMPLES <= num_rows:
        rule = f"lie in 1..{num_rows // MIN_EXAMPLES} for {num_rows} examples"
        cure = f"each node needs at least {MIN_EXAMPLES}: use fewer nodes or more data"
        raise invalid("num_partitions", num_partitions, rule, cure)


def _check_parts(parts: list[Rows]) -> list[Rows]:
    smallest = min(len(part) for part in parts)
    if smallest < MIN_EXAMPLES:
        cure = "use fewer nodes, more data or more classes_per_node"
        rule = f"leave at least {MIN_EXAMPLES} examples to each node (one has {smallest})"
        raise invalid("num_partitions", len(parts), rule, cure)
    return parts


def _top_up(parts: Sequence[Rows]) -> list[Rows]:
    """Let nodes that got too little have a random example of whoever has most at the time."""
    full = list(parts)
    for poor in range(len(full)):
        while len(full[poor]) < MIN_EXAMPLES:
            rich = max(range(len(full)), key=lambda i: len(full[i]))
            full[poor] = np.append(full[poor], full[rich][-1])
            full[rich] = full[rich][:-1]
    return full
