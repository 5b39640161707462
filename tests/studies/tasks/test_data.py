import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from flwr_hetero_studies.tasks import data_shape, load_partition, load_test

SHAPE = (6, 5)


def png(array):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def pixels(rows, seed, channels=1):
    shape = (rows, *SHAPE, 3) if channels == 3 else (rows, *SHAPE)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write(path, images, labels, names=("image", "label"), **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {names[0]: [png(image) for image in images], names[1]: labels} | extra
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def folder(tmp_path):
    """A Parquet data set with both splits, colour images and the column names of CIFAR-10."""
    labels = np.arange(60) % 3
    write(tmp_path / "data/train-0.parquet", pixels(60, 0, 3), labels, ("img", "label"))
    write(tmp_path / "data/test-0.parquet", pixels(9, 1, 3), np.arange(9) % 3, ("img", "label"))
    return tmp_path


def test_both_splits_are_normalised_by_the_channels_of_training(folder):
    truth, test = (
        pixels(rows, seed, 3).transpose(0, 3, 1, 2) / 255 for rows, seed in ((60, 0), (9, 1))
    )
    mean = truth.mean((0, 2, 3), keepdims=True)
    std = truth.std((0, 2, 3), keepdims=True)
    parts = [load_partition(str(folder), i, 4) for i in range(4)]
    inputs = torch.cat([part.inputs for part in parts]).numpy()
    assert (inputs.dtype, parts[0].targets.dtype) == (np.float32, torch.int64)
    expected = (truth - mean) / std
    both = [each[np.lexsort(each.reshape(60, -1).T[:3])] for each in (inputs, expected)]
    np.testing.assert_allclose(*both, atol=1e-5)
    found = load_test(str(folder))
    np.testing.assert_allclose(found.inputs.numpy(), (test - mean) / std, atol=1e-5)
    assert found.targets.tolist() == [0, 1, 2] * 3
    assert data_shape(str(folder)) == ((3, *SHAPE), 3)
    first = load_partition(str(folder), 0, 4, partition="dirichlet", alpha=1)
    assert load_partition(str(folder), 0, 4, partition="dirichlet", alpha=1.0) is first


TRAIN, IMAGES, LABELS = "train.parquet", pixels(6, 0), np.arange(6) % 2


@pytest.mark.parametrize(
    ("file", "columns", "message"),
    [
        ("notes.txt", {}, "hold Parquet files to train on"),
        ("test.parquet", {"image": IMAGES, "label": LABELS}, "hold Parquet files to train on"),
        (TRAIN, {"image": IMAGES, "label": [0.5] * 6}, r"type label \(its columns: image, l"),
        (TRAIN, {"label": [0]}, r"images, texts, series or numbers \(its columns: label\)"),
        (TRAIN, {"one": ["a"], "two": ["b"], "label": [0]}, r"one column of type text .*'text'"),
        (TRAIN, {"text": ["a", None], "label": [0, 1]}, "in each row of its column 'te"),
        (TRAIN, {"x": [0.1, np.nan], "label": [0, 1]}, "value in each row of its col.*x"),
        (TRAIN, {"image": IMAGES, "first": LABELS, "second": LABELS}, "type label"),
        (TRAIN, {"image": IMAGES, "label": LABELS - 1}, "from 0 in its label column 'label'"),
        (TRAIN, {"image": IMAGES, "label": [0, 1, None, 0, 1, 0]}, "from 0 in its label"),
    ],
)
def test_broken_data_set_is_one_clear_error(tmp_path, file, columns, message):
    images = [png(image)["bytes"] for image in columns.get("image", ())]
    stored = {"image": pa.array(images, pa.binary())} if images else {}
    pq.write_table(pa.table(columns | stored), tmp_path / file)
    with pytest.raises(ValueError, match=rf"^dataset must .*{message}"):
        load_partition(str(tmp_path), 0, 2)


@pytest.mark.parametrize("dataset", ["/no/such/folder", "./train.parquet", "owner/name"])
def test_missing_path_is_refused(dataset):
    with pytest.raises(ValueError, match=f"dataset must exist, got '{dataset}': use digits"):
        load_partition(dataset, 0, 2)


def test_rows_of_numbers_are_standardised_by_column(tmp_path):
    rng = np.random.default_rng(1)
    columns = {"age": rng.integers(20, 60, 50), "tall": rng.normal(1.7, 0.1, 50)}
    columns |= {"smokes": rng.random(50) < 0.5, "same": np.full(50, 0.3)}
    columns |= {"label": np.arange(50) % 2}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    # "age" is whole too: the label is told by its name
    assert data_shape(str(tmp_path)) == ((4, 1, 1), 2)
    inputs = load_partition(str(tmp_path), 0, 1).inputs[:, :, 0, 0]
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    spread = torch.tensor([1.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(inputs.std(0, correction=0), spread, atol=1e-5, rtol=0)
