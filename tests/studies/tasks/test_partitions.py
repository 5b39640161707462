import numpy as np
import pytest

from flwr_hetero_studies.tasks.partitions import (
    MIN_EXAMPLES,
    PARTITIONS,
    dirichlet_parts,
    partition_rows,
)

LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(10), 60))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(
    ("num_partitions", "alpha", "classes_per_node", "seed"),
    [(5, 1e-3, 2, 0), (17, 1.0, 3, 2), (32, 1e4, 9, 3), (32, 1e-3, 2, 2**31)],
)
def test_each_row_goes_to_one_node(partition, num_partitions, alpha, classes_per_node, seed):
    how = (num_partitions, partition, alpha, classes_per_node)
    parts, again, other = (partition_rows(LABELS, *how, s) for s in (seed, seed, seed + 1))
    assert len(parts) == num_partitions
    assert min(len(part) for part in parts) >= MIN_EXAMPLES
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    if partition in ("classes", "quantity-classes"):
        assert all(len(np.unique(LABELS[part])) <= classes_per_node for part in parts)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_dirichlet_equals_flower_datasets():
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner

    theirs = DirichletPartitioner(6, "label", 0.5, min_partition_size=0, seed=9, shuffle=False)
    theirs.dataset = datasets.Dataset.from_dict({"label": LABELS, "row": np.arange(len(LABELS))})
    ours = dirichlet_parts(LABELS, 6, 0.5, np.random.default_rng(9))
    for node, part in enumerate(ours):
        assert theirs.load_partition(node)["row"][:] == part.tolist()


BY_SPEED = {"partition": "classes-by-speed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition": "sorted"}, "partition must be one of iid, .* got 'sorted'"),
        ({"partition": "dirichlet", "alpha": 0.0}, "alpha must"),
        ({"partition": "classes", "classes_per_node": 0}, "classes_per_node must"),
        ({"partition": "classes", "classes_per_node": 1}, r"classes_per_node must lie in 2\.\.10"),
        (BY_SPEED | {"classes_per_node": 10}, r"node must lie in 1\.\.9"),
        ({"num_partitions": 0}, r"num_partitions must lie in 1\.\.300 for 600 examples, got 0"),
        ({"num_partitions": 301}, r"num_partitions must lie in 1\.\.300"),
        ({"num_partitions": 300, "partition": "quantity"}, r"at least 2 .* \(one has 1\)"),
    ],
)
def test_partition_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition_rows(LABELS, **{"num_partitions": 5} | arguments)
