"""Columns of a table as inputs and labels: images, texts or numbers, told by their types."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid
from flwr_hetero.task.texts import token_numbers

IMAGE_NAMES = ("image", "img", "picture")
TEXT_NAMES = ("text", "sentence", "content", "review", "question")
LABEL_NAMES = ("label", "labels", "target", "fine_label", "character")
NUMBERS = ("int", "float", "double", "bool")
"""What the types of columns of numbers contain."""


class Inputs(Protocol):
    """Inputs by row number."""

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return new inputs of shape (len(rows), ...).

        Images are float32 (C, H, W), scaled to [0, 1], rows of numbers float32 (columns, 1, 1),
        texts int64 (LENGTH,), numbers of tokens.
        """


class Array(NamedTuple):
    """Inputs that are in memory."""

    values: NDArray[Any]

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy inputs."""
        return self.values[rows]


class TextColumn(NamedTuple):
    """Arrow column of texts."""

    column: Any

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn texts into numbers of tokens."""
        return token_numbers(self.column.take(rows).to_pylist())


class ImageColumn:
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


def inputs_and_labels(dataset: str, table: Any) -> tuple[Inputs, NDArray[np.int64]]:
    """Read a table of the library ``datasets``.

    Inputs are a column of images; without one, a column of texts; without either, all columns of
    numbers but the label.
    """
    if not len(table):
        raise invalid("dataset", dataset, "hold examples (it is empty)")
    features = table.features
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in features.items()}
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = labels or [name for name, kind in types.items() if "int" in kind]
    label = _one_of(dataset, features, "label", labels, LABEL_NAMES)
    images = [name for name, kind in kinds.items() if kind == "Image"] or [
        name
        for name, feature in features.items()
        if "binary" in types[name] or (isinstance(feature, dict) and "bytes" in feature)
    ]
    texts = [name for name, kind in types.items() if "string" in kind]
    inputs: Inputs
    if images:
        name = _one_of(dataset, features, "image", images, IMAGE_NAMES)
        inputs = ImageColumn(dataset, table, name)
    elif texts:
        name = _one_of(dataset, features, "text", texts, TEXT_NAMES)
        inputs = TextColumn(_complete(dataset, table, name))
    else:
        numbers = [n for n, kind in types.items() if n != label and any(k in kind for k in NUMBERS)]
        if not numbers:
            rule = f"have columns of images, texts or numbers (its columns: {', '.join(features)})"
            raise invalid("dataset", dataset, rule)
        found = [_complete(dataset, table, name).to_numpy() for name in numbers]
        inputs = Array(np.stack(found, axis=1).astype(np.float32)[:, :, None, None])
    return inputs, _labels(dataset, table, label)


def _labels(dataset: str, table: Any, name: str) -> NDArray[np.int64]:
    labels = table.data.column(name).to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        rule = f"have whole numbers from 0 in its label column {name!r}"
        raise invalid("dataset", dataset, rule)
    return np.asarray(labels, dtype=np.int64)


def _one_of(
    dataset: str, features: Any, what: str, columns: list[str], usual: tuple[str, ...]
) -> str:
    """Return the one column of a type, or of several the one with a usual name."""
    named = columns if len(columns) == 1 else [name for name in usual if name in columns]
    if not named:
        rule = f"have one column of type {what} (its columns: {', '.join(features)})"
        raise invalid("dataset", dataset, rule, f"name it {usual[0]!r}")
    return named[0]


def _complete(dataset: str, table: Any, name: str) -> Any:
    """Return a column that has a value in each row."""
    column = table.data.column(name)
    if column.is_null(nan_is_null=True).to_numpy().any():
        raise invalid("dataset", dataset, f"have a value in each row of its column {name!r}")
    return column
