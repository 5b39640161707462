"""What the server of our apps needs besides a strategy: a first model and a test of it."""

from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord

from flwr_hetero.task.data import data_shape, load_test
from flwr_hetero.task.models import make_model, model_from
from flwr_hetero.task.settings import Settings
from flwr_hetero.task.training import evaluate


def initial_arrays(settings: Settings) -> ArrayRecord:
    """Draw the initial global model.

    Parameters
    ----------
    settings : Settings
        Its data set, model and seed count.

    Returns
    -------
    ArrayRecord
        The model's ``state_dict``.

    Raises
    ------
    ValueError
        If the data set cannot be read or the model does not fit it.

    Examples
    --------
    >>> list(initial_arrays(Settings(model="softmax")))
    ['1.weight', '1.bias']
    """
    return ArrayRecord(
        make_model(settings.model, *data_shape(settings.dataset), settings.seed).state_dict()
    )


def central_evaluate(settings: Settings) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Make the function that measures the global model on the test examples after each round.

    Parameters
    ----------
    settings : Settings
        Its data set and model count.

    Returns
    -------
    callable
        ``evaluate_fn`` of a strategy's ``start``: (round, arrays) to a MetricRecord with
        ``loss`` and ``accuracy``.

    Raises
    ------
    ValueError
        If the data set cannot be read.

    Examples
    --------
    >>> settings = Settings(model="softmax")
    >>> sorted(central_evaluate(settings)(0, initial_arrays(settings)))
    ['accuracy', 'loss']
    """
    test, shape = load_test(settings.dataset), data_shape(settings.dataset)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = model_from(arrays.to_torch_state_dict(), settings.model, *shape)
        loss, accuracy = evaluate(model, test, device="auto")
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    return evaluate_fn
