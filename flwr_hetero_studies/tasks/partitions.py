"""Which rows of a data set each node holds, drawn by the labels."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flwr_hetero.errors import check_choice, check_count, check_number, invalid

PARTITIONS = ("iid", "dirichlet", "classes", "classes-by-speed", "quantity", "quantity-classes")
MIN_EXAMPLES = 2
"""A node needs an example to train on and one that is held out."""
QUANTITY_SHARES = (0.10, 0.15, 0.20, 0.25, 0.30)
"""TiFL, section 5.1: share of the data of each of five equal groups of nodes."""

Rows = NDArray[np.int64]
Weights = NDArray[np.float64]


def partition_rows(
    labels: Rows,
    num_partitions: int,
    partition: str = "iid",
    alpha: float = 0.5,
    classes_per_node: int = 2,
    seed: int = 0,
) -> list[Rows]:
    check_partition(partition, alpha, classes_per_node)
    if not 1 <= num_partitions * MIN_EXAMPLES <= len(labels):
        rule = f"lie in 1..{len(labels) // MIN_EXAMPLES} for {len(labels)} examples"
        raise invalid("num_partitions", num_partitions, rule)
    rng = np.random.default_rng(seed)
    # Parts have equal sizes, except in partitions by quantity.
    weights = np.ones(num_partitions)
    if partition.startswith("quantity"):
        group = np.arange(num_partitions) * len(QUANTITY_SHARES) // num_partitions
        weights = np.asarray(QUANTITY_SHARES)[group]
    if partition == "dirichlet":
        parts = dirichlet_parts(labels, num_partitions, alpha, rng)
    elif partition == "classes-by-speed":
        parts = by_speed_parts(labels, num_partitions, classes_per_node, rng)
    elif partition.endswith("classes"):
        parts = class_parts(labels, weights, classes_per_node, rng)
    else:
        parts = _split(rng.permutation(len(labels)), weights)
    # Shuffle, so that what a node holds out is not a single class.
    parts = [rng.permutation(part) for part in parts]
    if partition == "dirichlet":
        # With a small alpha, some nodes have no example.
        parts = _fill_up(parts)
    smallest = min(len(part) for part in parts)
    if smallest < MIN_EXAMPLES:
        rule = f"leave at least {MIN_EXAMPLES} examples to each node (one has {smallest})"
        raise invalid("num_partitions", num_partitions, rule)
    return parts


def check_partition(partition: str, alpha: float, classes_per_node: int) -> None:
    check_choice("partition", partition, PARTITIONS)
    check_number("alpha", alpha, "(0, inf)")
    check_count("classes_per_node", classes_per_node, 1)


def dirichlet_parts(labels: Rows, count: int, alpha: float, rng: Generator) -> list[Rows]:
    # Flower Datasets' DirichletPartitioner does the same, but takes seconds to import.
    pieces = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        shares = np.cumsum(rng.dirichlet(np.full(count, alpha)))
        pieces.append(np.split(rows, (shares[:-1] * len(rows)).astype(np.int64)))
    return [np.concatenate(part) for part in zip(*pieces, strict=True)]


def class_parts(
    labels: Rows, weights: Weights, classes_per_node: int, rng: Generator
) -> list[Rows]:
    """Give each node a few classes, and split each class among the nodes that have it."""
    # Flower Datasets' PathologicalPartitioner may leave a class without a node.
    classes = np.unique(labels)
    # With fewer classes per node, a class would have no node.
    least = -(-len(classes) // len(weights))
    if not least <= classes_per_node <= len(classes):
        rule = f"lie in {least}..{len(classes)} for {len(weights)} nodes and {len(classes)} classes"
        raise invalid("classes_per_node", classes_per_node, rule)
    assigned = assign_classes(len(classes), len(weights), classes_per_node, rng)
    parts: list[list[Rows]] = [[] for _ in weights]
    for position, label in enumerate(classes):
        holders = np.flatnonzero((assigned == position).any(axis=1))
        rows = rng.permutation(np.flatnonzero(labels == label))
        for holder, piece in zip(holders, _split(rows, weights[holders]), strict=True):
            parts[holder].append(piece)
    return [np.concatenate(part) for part in parts]


def by_speed_parts(
    labels: Rows, num_partitions: int, slow_classes: int, rng: Generator
) -> list[Rows]:
    """Give the last classes to the last nodes alone, which are the slowest of a named fleet."""
    classes = np.unique(labels)
    if not 1 <= slow_classes < len(classes):
        rule = f"lie in 1..{len(classes) - 1}, so that other nodes have a class"
        raise invalid("classes_per_node", slow_classes, rule)
    # All parts shall have about the same size: 2 of 10 equal classes go to 4 of 20 nodes.
    slow = np.isin(labels, classes[-slow_classes:])
    num_slow = min(max(1, round(num_partitions * slow.mean())), num_partitions - 1)
    parts = []
    for rows, count in ((~slow, num_partitions - num_slow), (slow, num_slow)):
        parts += _split(rng.permutation(np.flatnonzero(rows)), np.ones(count))
    return parts


def assign_classes(
    num_classes: int, num_partitions: int, classes_per_node: int, rng: Generator
) -> Rows:
    """Assign different classes to each node, all of them about equally often."""
    # Concatenate random permutations, in which classes that a node has already come last.
    flat: list[int] = []
    while len(flat) < num_partitions * classes_per_node:
        order = rng.permutation(num_classes)
        current = flat[len(flat) - len(flat) % classes_per_node :]
        held = np.isin(order, current)
        flat += [*order[~held].tolist(), *order[held].tolist()]
    assigned = np.asarray(flat[: num_partitions * classes_per_node])
    return assigned.reshape(num_partitions, classes_per_node)


def _split(rows: Rows, weights: Weights) -> list[Rows]:
    cuts = np.rint(np.cumsum(weights)[:-1] / weights.sum() * len(rows)).astype(np.int64)
    return np.split(rows, cuts)


def _fill_up(parts: list[Rows]) -> list[Rows]:
    for poor in range(len(parts)):
        while len(parts[poor]) < MIN_EXAMPLES:
            # The largest part changes least.
            rich = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[poor] = np.append(parts[poor], parts[rich][-1])
            parts[rich] = parts[rich][:-1]
    return parts
