"""Data sets with labels: those of ``EMBEDDED``, or Parquet files."""

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid
from flwr_hetero_studies.tasks.kinds import AUTO, TASKS, Outputs, Task
from flwr_hetero_studies.tasks.sources.columns import (
    Inputs,
    MemoryArray,
    TableColumns,
    inputs_and_labels,
)
from flwr_hetero_studies.tasks.sources.generated import SERIES, generated_series
from flwr_hetero_studies.tasks.texts import STDLIB, stdlib_texts, stdlib_windows, token_numbers

DIGITS = "digits"
BREAST_CANCER = "breast-cancer"
EMBEDDED = {DIGITS: "classification", BREAST_CANCER: "classification",
            STDLIB: "classification", SERIES: "forecasting"}  # fmt: skip
"""Data sets that need no download, and the tasks that ``auto`` takes for them."""
TEST_SHARE = 0.2
"""Share held out as test split where a data set has none of its own."""
MEASURED_ROWS = 1024
"""Training rows that are measured to standardise inputs."""
USE = f"use {', '.join(EMBEDDED)}, or the absolute path of a Parquet folder or file"


class Split(NamedTuple):
    """One split of a data set: input ``rows[i]`` has ``labels[i]``."""

    inputs: Inputs
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]


class Scale(NamedTuple):
    """Mean and standard deviation of each channel, shape (C, 1, ...)."""

    mean: NDArray[np.float32]
    std: NDArray[np.float32]


class DataSource(NamedTuple):
    """A data set, opened for a task; inputs are decoded when they are taken."""

    train: Split
    test: Split
    task: Task
    num_classes: int
    shape: tuple[int, ...]
    outputs: Outputs
    scale: Scale | None
    """How inputs are standardised; None for texts and windows of series."""


@lru_cache(maxsize=4)
def open_source(dataset: str, task: str = AUTO) -> DataSource:
    if dataset in EMBEDDED:
        chosen = TASKS[EMBEDDED[dataset] if task == AUTO else task]
        train, test = _divide(*_embedded(dataset, chosen))
    else:
        tables = _read_parquet(dataset)
        chosen = TableColumns.of(tables[0]).task(task)
        train, test = _splits(dataset, *tables, chosen)
    # Do not decode all images for this.
    sample = np.linspace(0, len(train.rows) - 1, min(len(train.rows), MEASURED_ROWS))
    found = train.inputs.take(train.rows[sample.astype(np.int64)])
    shape = found.shape[1:]
    test_shape = test.inputs.take(test.rows[:1]).shape[1:]
    if test_shape != shape:
        shapes = f"test {test_shape}, training {shape}"
        raise invalid("dataset", dataset, f"have inputs of one shape ({shapes})")
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    inputs, targets = chosen.divide(found[:1], train.labels[:1])
    outputs = chosen.outputs(targets, num_classes)
    return DataSource(train, test, chosen, num_classes, inputs.shape[1:], outputs, measure(found))


def measure(inputs: NDArray[Any]) -> Scale | None:
    """Measure each channel; one that does not vary is only shifted."""
    if inputs.dtype.kind != "f" or inputs.ndim < 3:
        return None
    axes = (0, *range(2, inputs.ndim))
    mean, std = (f(axes, keepdims=True)[0] for f in (inputs.mean, inputs.std))
    return Scale(mean, np.where(std > 1e-6 * np.abs(mean), std, np.float32(1)))


def _embedded(dataset: str, task: Task) -> tuple[Inputs, NDArray[np.int64]]:
    if dataset == STDLIB and task.window:
        windows, labels = stdlib_windows(task.window)
        return MemoryArray(windows), labels
    if dataset == STDLIB:
        texts, labels = stdlib_texts()
        return MemoryArray(token_numbers(texts)), labels
    if dataset == SERIES:
        if not task.window:
            raise invalid("task", "classification", "be forecasting with series")
        series, labels = generated_series(task.window)
        return MemoryArray(series), labels
    # This import takes a second, so do it only here.
    from sklearn import datasets

    found = datasets.load_digits() if dataset == DIGITS else datasets.load_breast_cancer()
    inputs = found.images[:, None] / 16.0 if dataset == DIGITS else found.data[:, :, None, None]
    return MemoryArray(inputs.astype(np.float32)), found.target.astype(np.int64)


def _splits(dataset: str, train: Any, test: Any | None, task: Task) -> tuple[Split, Split]:
    inputs, labels = inputs_and_labels(dataset, train, task)
    if test is None:
        return _divide(inputs, labels)
    test_inputs, test_labels = inputs_and_labels(dataset, test, task)
    train = Split(inputs, np.arange(len(labels)), labels)
    return train, Split(test_inputs, np.arange(len(test_labels)), test_labels)


def _divide(inputs: Inputs, labels: NDArray[np.int64]) -> tuple[Split, Split]:
    """Hold out the test share of each class, the same rows whatever the seed of the run."""
    rng = np.random.default_rng(0)
    # Sort by class, and randomly within a class.
    order = np.lexsort((rng.random(len(labels)), labels))
    starts = np.searchsorted(labels[order], labels[order])
    rank = np.arange(len(labels)) - starts
    size = np.bincount(labels)[labels[order]]
    is_test = np.empty(len(labels), dtype=bool)
    is_test[order] = rank < np.rint(TEST_SHARE * size)
    train = np.flatnonzero(~is_test)
    # With a handful of rows, all are used for both.
    test = np.flatnonzero(is_test) if is_test.any() else train
    return Split(inputs, train, labels[train]), Split(inputs, test, labels[test])


def _read_parquet(dataset: str) -> tuple[Any, Any | None]:
    path = Path(dataset).expanduser()
    if not path.exists():
        raise invalid("dataset", dataset, "exist", USE)
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    # A single file has no test split, whatever its name.
    tests = [file for file in files if path.is_dir() and "test" in file.stem.lower()]
    trains = [file for file in files if "train" in file.stem.lower()]
    trains = trains or [file for file in files if file not in tests]
    if not trains:
        raise invalid("dataset", dataset, "hold Parquet files to train on", USE)
    return _table(trains), _table(tests) if tests else None


def _table(files: list[Path]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # In memory, nothing is copied to a cache on disk.
    return Dataset(InMemoryTable(pa.concat_tables([pq.read_table(file) for file in files])))
