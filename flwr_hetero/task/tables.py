"""Images and labels in Arrow tables, as Parquet files and the Hub have them."""

import io
import json

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from flwr_hetero.core.errors import invalid

IMAGE_NAMES = ("image", "img", "picture")
LABEL_NAMES = ("label", "labels", "target", "fine_label", "character")


class ImageColumn:
    """Encoded images, each decoded once, when it is first asked for.

    A node of a real fleet decodes its own part only; an emulated fleet in one process ends up
    with all images decoded, one byte a pixel, and decodes none again.

    Parameters
    ----------
    dataset : str
        Name for complaints.
    column : pyarrow.ChunkedArray
        Encoded files: bytes, or structs with ``bytes`` and ``path`` as Hugging Face writes them.

    Raises
    ------
    ValueError
        If the first image cannot be read.
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
        """Return images scaled to [0, 1].

        Parameters
        ----------
        rows : ndarray of int64, shape (n,)
            Which.

        Returns
        -------
        ndarray of float32, shape (n, C, H, W)
            Greyscale for grey images, else RGB.

        Raises
        ------
        ValueError
            If one cannot be read or is not of the size of the first.
        """
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

    Parameters
    ----------
    dataset : str
        Name for complaints.
    schema : pyarrow.Schema
        Of the table.

    Returns
    -------
    image, label : str
        Names of the columns.

    Raises
    ------
    ValueError
        If one is not there or it is not clear which one is meant.
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
