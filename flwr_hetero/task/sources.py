"""Data sets of labelled images: digits, Parquet on this disk, or a name on the Hub."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

DIGITS = "digits"
TEST_SHARE = 0.2
"""Share held out as test split where a data set has none of its own."""
MEASURED_ROWS = 1024
"""Training rows from which mean and standard deviation are measured."""
IMAGE_NAMES = ("image", "img", "picture")
LABEL_NAMES = ("label", "labels", "target", "fine_label", "character")
USE = "use digits, the absolute path of a Parquet folder or file, or a name on the Hub"


class Images(Protocol):
    """Images by row number."""

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return images of shape (len(rows), C, H, W), scaled to [0, 1]."""


class Split(NamedTuple):
    """One split of a data set: image ``rows[i]`` has ``labels[i]``."""

    images: Images
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]


class Source(NamedTuple):
    """A data set, opened; images are decoded when they are asked for."""

    train: Split
    test: Split
    num_classes: int
    shape: tuple[int, int, int]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]


@lru_cache(maxsize=4)
def open_source(dataset: str) -> Source:
    """Open a data set, once per process."""
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


class _Column:
    """Image column of a Hugging Face data set; the first image gives mode and size of all."""

    def __init__(self, dataset: str, table: Any, name: str) -> None:
        from datasets import Image

        self.dataset, self.name = dataset, name
        self.table = table.select_columns([name]).cast_column(name, Image())
        first = self._image(0)
        self.mode = "L" if first.mode in ("1", "L") else "RGB"
        self.size = first.size

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decode images."""
        images = [self._image(row) for row in rows.tolist()]
        for row, image in zip(rows.tolist(), images, strict=True):
            if image.size != self.size:
                rule = f"have images of one size (image {row} is {image.width}x{image.height})"
                raise invalid("dataset", self.dataset, rule)
        pixels = np.stack([np.asarray(image.convert(self.mode)) for image in images])
        pixels = pixels.reshape(*pixels.shape[:3], -1).transpose(0, 3, 1, 2)
        scaled = np.ascontiguousarray(pixels, dtype=np.float32)
        scaled /= 255.0
        return scaled

    def _image(self, row: int) -> Any:
        try:
            return self.table[row][self.name]
        except (OSError, ValueError, TypeError) as error:
            rule = f"have readable images (image {row}: {error})"
            raise invalid("dataset", self.dataset, rule) from error


def _digits() -> tuple[Split, Split]:
    from sklearn.datasets import load_digits  # takes a second, and is needed for digits only

    digits = load_digits()
    pixels = (digits.images[:, None] / 16.0).astype(np.float32)
    return _divide(_Array(pixels), digits.target.astype(np.int64))


def _splits(dataset: str, train: Any, test: Any | None) -> tuple[Split, Split]:
    """Find images and labels in tables; without a test table, divide the other."""
    images, labels = _images_and_labels(dataset, train)
    if test is None:
        return _divide(images, labels)
    test_images, test_labels = _images_and_labels(dataset, test)
    train_rows, test_rows = np.arange(len(labels)), np.arange(len(test_labels))
    return Split(images, train_rows, labels), Split(test_images, test_rows, test_labels)


def _images_and_labels(dataset: str, table: Any) -> tuple[Images, NDArray[np.int64]]:
    if not len(table):
        raise invalid("dataset", dataset, "hold examples (it is empty)")
    image, label = _find_columns(dataset, table.features)
    labels = table.data.column(label).to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        rule = f"have whole numbers from 0 in its label column {label!r}"
        raise invalid("dataset", dataset, rule)
    return _Column(dataset, table, image), labels.astype(np.int64)


def _find_columns(dataset: str, features: Any) -> tuple[str, str]:
    """Find the columns with images and labels by feature type, then by Arrow type, then by name."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"] or [
        name
        for name, feature in features.items()
        if "binary" in types[name] or (isinstance(feature, dict) and "bytes" in feature)
    ]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = labels or [name for name, kind in types.items() if "int" in kind]
    found = []
    for what, columns, usual in (("image", images, IMAGE_NAMES), ("label", labels, LABEL_NAMES)):
        named = columns if len(columns) == 1 else [name for name in usual if name in columns]
        if not named:
            rule = f"have one column of type {what} (its columns: {', '.join(features)})"
            raise invalid("dataset", dataset, rule, f"name it {usual[0]!r}")
        found.append(named[0])
    return found[0], found[1]


def _divide(images: Images, labels: NDArray[np.int64]) -> tuple[Split, Split]:
    """Hold out the test share of each class, the same rows always."""
    rng = np.random.default_rng(0)
    order = np.lexsort((rng.random(len(labels)), labels))  # class by class, random within
    starts = np.searchsorted(labels[order], labels[order])
    rank = np.arange(len(labels)) - starts
    size = np.bincount(labels)[labels[order]]
    is_test = np.empty(len(labels), dtype=bool)
    is_test[order] = rank < np.rint(TEST_SHARE * size)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if not len(test):  # a handful of rows: test on what there is
        test = train
    return Split(images, train, labels[train]), Split(images, test, labels[test])


def _read_parquet(dataset: str) -> tuple[Any, Any | None]:
    path = Path(dataset).expanduser()
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    tests = [file for file in files if path.is_dir() and "test" in file.stem.lower()]
    trains = [file for file in files if "train" in file.stem.lower()]
    trains = trains or [file for file in files if file not in tests]
    if not trains:
        raise invalid("dataset", dataset, "hold Parquet files to train on", USE)
    train, test = (_tables(dataset, part) if part else None for part in (trains, tests))
    return train, test


def _tables(dataset: str, files: list[Path]) -> Any:
    """Read Parquet files into memory; nothing is copied to a cache on disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset
    from datasets.table import InMemoryTable

    try:
        table = pa.concat_tables([pq.read_table(file) for file in files])
    except (OSError, pa.ArrowException) as error:
        raise invalid("dataset", dataset, f"be readable Parquet ({error})", USE) from error
    return Dataset(InMemoryTable(table))


def _read_hub(dataset: str) -> tuple[Any, Any | None]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or dataset.endswith(".parquet"):
        raise invalid("dataset", dataset, "exist", USE)
    from flwr_datasets import FederatedDataset  # takes seconds, and is needed for the Hub only

    federated = FederatedDataset(dataset=dataset, partitioners={}, shuffle=False)
    try:
        train = federated.load_split("train")
    except (OSError, ValueError) as error:
        rule = f"be on this disk or on the Hub with a split 'train' ({error})"
        raise invalid("dataset", dataset, rule, USE) from error
    try:
        return train, federated.load_split("test")
    except ValueError:
        return train, None
