import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from flwr_hetero_studies.tasks import data_shape, load_partition


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
