import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flwr_hetero_studies.tasks import data_shape, load_partition, load_test, make_model
from flwr_hetero_studies.tasks.kinds import TASKS
from flwr_hetero_studies.tasks.sources import open_source
from flwr_hetero_studies.tasks.texts import CHARACTERS, character_windows

LANGUAGE, FORECASTING = TASKS["language-model"], TASKS["forecasting"]


def test_language_model_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.9, 0.05, 0.05]]))
    targets = torch.tensor([[1, 2, 0], [1, 0, 0]])  # 0 is padding
    outputs = torch.stack([logits, logits])
    losses = LANGUAGE.losses(outputs, targets)
    np.testing.assert_allclose(
        losses, [-(np.log(0.25) + np.log(0.8)) / 2, -np.log(0.25)], rtol=1e-6
    )
    assert LANGUAGE.accuracy(outputs, targets).tolist() == [0.5, 0.0]
    assert LANGUAGE.metrics(np.log(8.0), 0.3) == {"perplexity": pytest.approx(8.0)}
    assert np.isfinite(LANGUAGE.metrics(1e6, 0.0)["perplexity"])
    assert LANGUAGE.losses(outputs, torch.zeros(2, 3, dtype=torch.int64)).tolist() == [0.0, 0.0]


def test_forecasting_by_hand():
    outputs = torch.tensor([[1.0, 3.0], [0.0, -1.0]])
    targets = torch.tensor([[3.0, 3.0], [0.0, 1]])
    assert FORECASTING.losses(outputs, targets).tolist() == [2.0, 2.0]
    smape = [(2 * 2 / 4 + 0) / 2, (0 + 2 * 2 / 2) / 2]
    accuracy = FORECASTING.accuracy(outputs, targets)
    assert accuracy.tolist() == [1 - value / 2 for value in smape]
    mean = float(accuracy.mean())
    assert FORECASTING.metrics(2.0, mean) == {"smape": pytest.approx(np.mean(smape))}


def test_characters_by_hand():
    windows, origin = character_windows(["abcde", "", "é", "xyzäw", "abc"], 3)
    found = [bytes(row.tolist()) for row in windows]
    # a single last character predicts nothing
    assert found == [b"abc", b"de\0", b"xyz", b"?w\0", b"abc"]
    assert origin.tolist() == [0, 0, 3, 3, 4]
    assert windows.max() < CHARACTERS
    inputs, targets = LANGUAGE.divide(windows[:1].astype(np.int64), np.zeros(1, np.int64))
    assert (bytes(inputs[0].tolist()), bytes(targets[0].tolist())) == (b"ab", b"bc")


@pytest.mark.parametrize(
    ("dataset", "task", "shape", "outputs"),
    [
        ("stdlib", "language-model", (64,), (64, CHARACTERS)),
        ("series", "auto", (1, 20), (6,)),
    ],
)
@pytest.mark.parametrize("partition", ["dirichlet", "quantity"])
def test_nodes_get_parts_of_every_task(dataset, task, shape, outputs, partition):
    assert data_shape(dataset, task) == (shape, outputs)
    count = 8
    how = {"task": task, "partition": partition, "alpha": 0.3, "classes_per_node": 2}
    parts = [load_partition(dataset, i, count, **how) for i in range(count)]
    assert sum(map(len, parts)) == len(open_source(dataset, task).train.rows)
    assert parts[0].inputs.shape[1:] == shape
    assert isinstance(parts[0].task, type(load_test(dataset, task).task))
    model = make_model("auto", shape, outputs)
    sizes = (outputs,) if isinstance(outputs, int) else outputs
    assert model(parts[0].inputs[:3]).shape == (3, *sizes)


def table(tmp_path, **columns):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    return str(tmp_path)


TEXTS = ["some words " * 20, "a", "other words " * 9] * 4
LONG = [list(np.arange(60.0)), list(np.arange(30)), [1.0, 2.0]] * 4
LABELS = [0, 1, 2] * 4


@pytest.mark.parametrize(
    ("columns", "expected", "count"),
    [
        ({"text": TEXTS}, "language-model", 4 * (4 + 2)),
        ({"text": TEXTS, "label": LABELS}, "classification", 12),
        ({"series": LONG}, "forecasting", 4 * (2 + 1)),
        ({"series": LONG, "label": LABELS}, "forecasting", 4 * (2 + 1)),
        ({"x": [0.1] * 12, "label": LABELS}, "classification", 12),
    ],
)
def test_auto_goes_by_the_columns(tmp_path, columns, expected, count):
    source = open_source(table(tmp_path, **columns))
    assert source.task is TASKS[expected]
    assert len({*source.train.rows, *source.test.rows}) == count


def test_series_have_no_classes(tmp_path):
    for dataset in ("series", table(tmp_path, series=LONG, label=LABELS)):
        with pytest.raises(ValueError, match="task must be forecasting with series"):
            open_source(dataset, "classification")
