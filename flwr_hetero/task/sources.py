"""Where examples come from: scikit-learn's digits, Parquet on disk, or the Hub."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flwr_hetero.core.errors import invalid
from flwr_hetero.task.tables import ImageColumn, find_columns

DIGITS = "digits"
TEST_SHARE = 0.2
"""Share held out as test split where a data set has none of its own."""
MEASURED_ROWS = 1024
"""Training rows from which mean and standard deviation are measured."""
_CURE = "use digits, the absolute path of a Parquet folder or file, or a name on the Hub"


class Images(Protocol):
    """Images by row number."""

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return images of shape (len(rows), C, H, W), scaled to [0, 1]."""


class Split(NamedTuple):
    """One split of a data set.

    Parameters
    ----------
    images : Images
        The images, by row number.
    rows : ndarray of int64, shape (n,)
        The rows of ``images`` that belong to the split.
    labels : ndarray of int64, shape (n,)
        Class of each, from 0.
    """

    images: Images
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]


class Source(NamedTuple):
    """A data set, opened; images are decoded when they are asked for.

    Parameters
    ----------
    train, test : Split
        Its splits.
    num_classes : int
        Number of classes.
    shape : tuple of int
        (C, H, W) of an image.
    mean, std : ndarray of float32, shape (C, 1, 1)
        Of training pixels scaled to [0, 1], by channel.
    """

    train: Split
    test: Split
    num_classes: int
    shape: tuple[int, int, int]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]


@lru_cache(maxsize=4)
def open_source(dataset: str) -> Source:
    """Open a data set, once per process.

    Parameters
    ----------
    dataset : str
        ``digits``, a Parquet file, a folder of Parquet files (those with ``test`` in their name
        are the test split), or a name on the Hub. A data set without a test split is divided,
        class by class, always in the same way.

    Returns
    -------
    Source
        The data set.

    Raises
    ------
    ValueError
        If there is no such data set, it cannot be read, is empty, or has no images and labels.

    Examples
    --------
    >>> source = open_source("digits")
    >>> source.shape, source.num_classes, len(source.train.rows), len(source.test.rows)
    ((1, 8, 8), 10, 1438, 359)
    """
    if dataset == DIGITS:
        train, test = _digits()
    elif Path(dataset).expanduser().exists():
        train, test = _splits(dataset, *_read_parquet(dataset))
    else:
        train, test = _splits(dataset, *_read_hub(dataset))
    sample = np.linspace(0, len(train.rows) - 1, min(len(train.rows), MEASURED_ROWS))
    pixels = train.images.take(train.rows[sample.astype(np.int64)])
    mean, std = pixels.mean((0, 2, 3), keepdims=True)[0], pixels.std((0, 2, 3), keepdims=True)[0]
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    channels, height, width = pixels.shape[1:]
    return Source(train, test, num_classes, (channels, height, width), mean, np.maximum(std, 1e-3))


class _Array(NamedTuple):
    pixels: NDArray[np.float32]

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.pixels[rows]


def _digits() -> tuple[Split, Split]:
    from sklearn.datasets import load_digits  # takes a second, and is needed for digits only

    digits = load_digits()
    pixels = (digits.images[:, None] / 16.0).astype(np.float32)
    return _divide(_Array(pixels), digits.target.astype(np.int64))


def _splits(dataset: str, train: pa.Table, test: pa.Table | None) -> tuple[Split, Split]:
    """Find images and labels in tables; without a test table, divide the other."""
    images, labels = _images_and_labels(dataset, train)
    if test is None:
        return _divide(images, labels)
    test_images, test_labels = _images_and_labels(dataset, test)
    return (
        Split(images, np.arange(len(labels)), labels),
        Split(test_images, np.arange(len(test_labels)), test_labels),
    )


def _images_and_labels(dataset: str, table: pa.Table) -> tuple[Images, NDArray[np.int64]]:
    if not table.num_rows:
        raise invalid("dataset", dataset, "hold examples (it is empty)", _CURE)
    image, label = find_columns(dataset, table.schema)
    labels = table.column(label).to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        rule = f"have whole numbers from 0 in its label column {label!r}"
        raise invalid("dataset", dataset, rule, "encode the classes")
    return ImageColumn(dataset, table.column(image)), labels.astype(np.int64)


def _divide(images: Images, labels: NDArray[np.int64]) -> tuple[Split, Split]:
    """Hold out the test share of each class, the same rows always."""
    rng = np.random.default_rng(0)
    chance = rng.random(len(labels))
    order = np.lexsort((chance, labels))  # class by class, random within
    starts = np.searchsorted(labels[order], labels[order])
    rank = np.arange(len(labels)) - starts
    size = np.bincount(labels)[labels[order]]
    is_test = np.empty(len(labels), dtype=bool)
    is_test[order] = rank < np.rint(TEST_SHARE * size)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not len(test):  # a handful of rows: test on what there is
        test = train
    return Split(images, train, labels[train]), Split(images, test, labels[test])


def _read_parquet(dataset: str) -> tuple[pa.Table, pa.Table | None]:
    path = Path(dataset).expanduser()
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    tests = [file for file in files if path.is_dir() and "test" in file.stem.lower()]
    trains = [file for file in files if "train" in file.stem.lower()]
    trains = trains or [file for file in files if file not in tests]
    if not trains:
        raise invalid("dataset", dataset, "hold Parquet files to train on", _CURE)
    try:
        train = pa.concat_tables([pq.read_table(file) for file in trains])
        test = pa.concat_tables([pq.read_table(file) for file in tests]) if tests else None
    except (OSError, pa.ArrowException) as error:
        raise invalid("dataset", dataset, f"be readable Parquet ({error})", _CURE) from error
    return train, test


def _read_hub(dataset: str) -> tuple[pa.Table, pa.Table | None]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or dataset.endswith(".parquet"):
        raise invalid("dataset", dataset, "exist", _CURE)
    from flwr_datasets import FederatedDataset  # takes seconds, and is needed for the Hub only

    federated = FederatedDataset(dataset=dataset, partitioners={}, shuffle=False)
    try:
        train = federated.load_split("train")
    except (OSError, ValueError) as error:
        rule = f"be on this disk or on the Hub with a split 'train' ({error})"
        raise invalid("dataset", dataset, rule, _CURE) from error
    try:
        test = federated.load_split("test")
    except ValueError:
        return _table(train), None
    return _table(train), _table(test)


def _table(split: Any) -> pa.Table:
    """Take the Arrow table out of a Hugging Face data set, with its feature types."""
    table: pa.Table = split.with_format("arrow")[:]
    return table.replace_schema_metadata(split.features.arrow_schema.metadata)
