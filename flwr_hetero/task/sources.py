"""Images and labels in Arrow tables, as Parquet files and the Hub have them."""

import io
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from flwr_hetero.errors import invalid

IMAGE_NAMES = ("image", "img", "picture")


LABEL_NAMES = ("label", "labels", "target", "fine_label", "character")


class ImageColumn:
    """Encoded images, each decoded once, when it is first asked for.

    A node of a real fleet decodes its own part only; an emulated fleet in one process ends up
    with all images decoded, one byte a pixel, and decodes none again.
    """

    def __init__(self, dataset: str, column: pa.ChunkedArray) -> None:
        self.dataset = dataset
        self._column = column
        first = self._open(0)
        self._mode = "L" if first.mode in ("1", "L") else "RGB"
        shape = (first.height, first.width, *((3,) if self._mode == "RGB" else ()))
        self._pixels = np.zeros((len(column), *shape), dtype=np.uint8)
        self._decoded = np.zeros(len(column), dtype=bool)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return images scaled to [0, 1]."""
        for row in rows[~self._decoded[rows]].tolist():
            self._pixels[row] = self._decode(row)
            self._decoded[row] = True
        pixels = self._pixels[rows].reshape(len(rows), *self._pixels.shape[1:3], -1)
        scaled = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32)
        scaled /= 255.0
        return scaled

    def _decode(self, row: int) -> NDArray[np.uint8]:
        image = self._open(row)
        if (image.height, image.width) != self._pixels.shape[1:3]:
            rule = f"have images of one size (image {row} is {image.width}x{image.height})"
            raise invalid("dataset", self.dataset, rule, "resize them")
        return np.asarray(image.convert(self._mode))

    def _open(self, row: int) -> Image.Image:
        cell = self._column[row].as_py()
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        try:
            image = Image.open(io.BytesIO(cell) if isinstance(cell, bytes) else cell or "")
            image.load()
        except (OSError, UnidentifiedImageError) as error:
            rule = f"have readable images (image {row}: {error})"
            raise invalid("dataset", self.dataset, rule, "repair or leave out that row") from error
        return image


def find_columns(dataset: str, schema: pa.Schema) -> tuple[str, str]:
    """Find the columns with images and class labels.

    Hugging Face's feature types decide where the file has them, else Arrow's types and then
    usual names.
    """
    declared = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = declared.get("info", {}).get("features", {})
    images = [name for name, kind in features.items() if kind.get("_type") == "Image"]
    labels = [name for name, kind in features.items() if kind.get("_type") == "ClassLabel"]
    images = images or [field.name for field in schema if _may_be_image(field.type)]
    labels = labels or [field.name for field in schema if pa.types.is_integer(field.type)]
    return (
        _the_one(dataset, "image", images, IMAGE_NAMES, schema),
        _the_one(dataset, "label", labels, LABEL_NAMES, schema),
    )


def _may_be_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _the_one(
    dataset: str, what: str, found: list[str], usual: tuple[str, ...], schema: pa.Schema
) -> str:
    if len(found) == 1:
        return found[0]
    for name in usual:
        if name in found:
            return name
    rule = f"have one column of type {what} (its columns: {', '.join(schema.names)})"
    raise invalid("dataset", dataset, rule, f"name it {usual[0]!r}")


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
    """One split of a data set."""

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
