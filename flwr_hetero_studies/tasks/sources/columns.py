"""Columns of a table as inputs and labels, by their types: images, texts, series or numbers."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid
from flwr_hetero_studies.tasks.kinds import AUTO, TASKS, Task
from flwr_hetero_studies.tasks.texts import character_windows, token_numbers

IMAGE_NAMES = ("image", "img", "picture")
TEXT_NAMES = ("text", "sentence", "content", "review", "question")
LABEL_NAMES = ("label", "labels", "target", "fine_label", "character")
SERIES_NAMES = ("series", "values", "signal", "audio", "target")
NUMBERS = ("int", "float", "double", "bool")
"""What the types of columns of numbers contain."""
LIST_OF_NUMBERS = re.compile(r"(large_|fixed_size_)?list<\w+: (u?int|float|double|halffloat)")
"""How Arrow writes the types of columns of series."""


class MemoryArray(NamedTuple):
    """Inputs that are in memory."""

    values: NDArray[Any]

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        # Texts are kept as bytes, but models need int64.
        values = self.values[rows]
        return values.astype(np.int64) if values.dtype == np.uint8 else values


class TextColumn(NamedTuple):
    """Arrow column of texts."""

    column: Any

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return token_numbers(self.column.take(rows).to_pylist())


class ImageColumn:
    """Image column of a Hugging Face data set, in which all images are taken like the first."""

    def __init__(self, table: Any, name: str) -> None:
        from datasets import Image

        self.images = table.select_columns([name]).cast_column(name, Image())
        self.name = name
        self.mode = "L" if self.image(0).mode in ("1", "L") else "RGB"

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        pixels = np.stack([np.asarray(self.image(r).convert(self.mode)) for r in rows.tolist()])
        # Grey images have no axis of channels.
        pixels = pixels.reshape(*pixels.shape[:3], -1).transpose(0, 3, 1, 2)
        scaled = np.ascontiguousarray(pixels, dtype=np.float32)
        scaled /= 255.0
        return scaled

    def image(self, row: int) -> Any:
        return self.images[row][self.name]


Inputs: TypeAlias = MemoryArray | TextColumn | ImageColumn
"""Inputs by row number.

Images are float32 (C, H, W) in [0, 1], rows of numbers float32 (columns, 1, 1), and texts int64
(LENGTH,), which are numbers of tokens. Windows of texts are int64 (window,), which are numbers of
characters, and windows of series float32 (window,).
"""


class TableColumns(NamedTuple):
    """Names of a table's columns by what they hold."""

    labels: list[str]
    images: list[str]
    texts: list[str]
    series: list[str]
    numbers: list[str]

    @classmethod
    def of(cls, table: Any) -> "TableColumns":
        """Sort columns by their types; a ``ClassLabel`` is the label if there is one."""
        features = table.features
        types = {name: str(getattr(feature, "dtype", "")) for name, feature in features.items()}
        labels = [name for name, f in features.items() if type(f).__name__ == "ClassLabel"]
        images = [name for name, f in features.items() if type(f).__name__ == "Image"] or [
            name for name, f in features.items()
            if "binary" in types[name] or (isinstance(f, dict) and "bytes" in f)
        ]  # fmt: skip
        # Types of lists differ between versions of datasets, but not Arrow's types.
        arrow = {field.name: str(field.type) for field in table.data.schema}
        return cls(
            labels or [name for name, kind in types.items() if "int" in kind],
            images,
            [name for name, kind in types.items() if "string" in kind],
            [name for name, kind in arrow.items() if LIST_OF_NUMBERS.match(kind)],
            [name for name, kind in types.items() if any(part in kind for part in NUMBERS)],
        )

    @property
    def has_label(self) -> bool:
        return len(self.labels) == 1 or any(name in LABEL_NAMES for name in self.labels)

    def task(self, name: str) -> Task:
        if name != AUTO:
            return TASKS[name]
        # Texts without labels cannot be classified.
        if self.texts and not self.has_label and not self.images:
            return TASKS["language-model"]
        is_series = self.series and not self.images and not self.texts
        return TASKS["forecasting" if is_series else "classification"]


def inputs_and_labels(dataset: str, table: Any, task: Task) -> tuple[Inputs, NDArray[np.int64]]:
    """Read a table of the library ``datasets``: images, else texts, else series, else numbers."""
    columns = TableColumns.of(table)
    # Images are never cut into windows.
    length = task.window if (columns.texts or columns.series) and not columns.images else 0
    label = ""
    if length and not columns.has_label:
        labels = np.zeros(len(table), dtype=np.int64)
    else:
        label = _one_of(dataset, table, "label", columns.labels, LABEL_NAMES)
        labels = _labels(dataset, table, label)
    inputs: Inputs
    if columns.images:
        name = _one_of(dataset, table, "image", columns.images, IMAGE_NAMES)
        inputs = ImageColumn(table, name)
    elif columns.texts or columns.series:
        what, usual = ("text", TEXT_NAMES) if columns.texts else ("series", SERIES_NAMES)
        name = _one_of(dataset, table, what, columns.texts or columns.series, usual)
        column = _complete(dataset, table, name)
        if length:
            cut = character_windows if columns.texts else series_windows
            values, rows = cut(column.to_pylist(), length)
            inputs = MemoryArray(values)
            labels = labels[rows]
        elif columns.texts:
            inputs = TextColumn(column)
        else:
            raise invalid("task", "classification", "be forecasting with series")
    else:
        numbers = [name for name in columns.numbers if name != label]
        if not numbers:
            rule = "have columns of images, texts, series or numbers (its columns: "
            raise invalid("dataset", dataset, f"{rule}{', '.join(table.features)})")
        found = [_complete(dataset, table, name).to_numpy() for name in numbers]
        inputs = MemoryArray(np.stack(found, axis=1).astype(np.float32)[:, :, None, None])
    if not len(labels):
        raise invalid("dataset", dataset, "hold examples", "it is empty, or all rows are too short")
    return inputs, labels


def series_windows(
    series: Sequence[list[float]], length: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cut each series from its end into windows, and return the row of each window."""
    windows = [np.zeros((0, length), dtype=np.float32)]
    for values in series:
        count = len(values) // length
        # Cut from the end, because the newest values are worth most.
        whole = np.asarray(values[len(values) - count * length :], dtype=np.float32)
        windows.append(whole.reshape(count, length))
    origin = np.repeat(np.arange(len(series)), [len(each) for each in windows[1:]])
    return np.concatenate(windows), origin


def _labels(dataset: str, table: Any, name: str) -> NDArray[np.int64]:
    labels = table.data.column(name).to_numpy()
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        rule = f"have whole numbers from 0 in its label column {name!r}"
        raise invalid("dataset", dataset, rule)
    return np.asarray(labels, dtype=np.int64)


def _one_of(dataset: str, table: Any, what: str, columns: list[str], usual: tuple[str, ...]) -> str:
    named = columns if len(columns) == 1 else [name for name in usual if name in columns]
    if not named:
        rule = f"have one column of type {what} (its columns: {', '.join(table.features)})"
        raise invalid("dataset", dataset, rule, f"name it {usual[0]!r}")
    return named[0]


def _complete(dataset: str, table: Any, name: str) -> Any:
    column = table.data.column(name)
    if column.is_null(nan_is_null=True).to_numpy().any():
        raise invalid("dataset", dataset, f"have a value in each row of its column {name!r}")
    return column
