from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flwr_hetero_studies.tasks import (
    data_shape,
    load_partition,
)
from flwr_hetero_studies.tasks.sources import measure
from flwr_hetero_studies.tasks.texts import (
    LENGTH,
    VOCABULARY,
    token_numbers,
)


def number(token):
    return 1 + crc32(token) % (VOCABULARY - 1)


def test_tokens_by_hand():
    [row] = token_numbers(["Été: get_name(X)\n"])
    tokens = ["été", ":", "get", "name", "(", "x", ")"]
    assert row.tolist() == [number(t.encode()) for t in tokens] + [0] * (LENGTH - len(tokens))
    assert number(b"get") == 801  # the same on every machine
    long, empty = token_numbers(["a b " * LENGTH, " \n"])
    assert long.tolist() == [number(b"a"), number(b"b")] * (LENGTH // 2)
    assert not empty.any()
    assert measure(long[None]) is None  # numbers of tokens have no scale


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    words = np.array([["red", "hot", "fire"], ["blue", "cold", "ice"], ["green", "mild", "grass"]])
    rows = [" ".join(rng.choice(words[label], 5)) for label in labels]
    columns = {"id": [f"row {i}" for i in range(60)], "sentence": rows, "label": labels}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    return tmp_path


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
