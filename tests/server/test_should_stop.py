"""``should_stop`` of ``start``: when it is called, and what a run that it ends leaves."""

import pytest
from flwr.app import MetricRecord
from quadratics import Watched, fedavg, start
from recording import Folder, History, checkpoint

from flwr_hetero.strategy import FedBuff, FedSlice, ModelAverage, Recorded, TiFL, Wrapper

GOALS = [0.0, 1.0, 2.0, 5.0]
SPEEDS = [2.0, 1.3, 0.9, 0.5]
ROUNDS = 4
LAST = 2
KINDS = {
    "rounds": Wrapper,
    "tiers": lambda inner: TiFL(inner, clients_per_round=2, num_tiers=2),
    "average": lambda inner: ModelAverage(Wrapper(inner)),
    "FedBuff": FedBuff,
    "FedSlice": FedSlice,
}


def build(kind):
    return KINDS[kind](fedavg(fraction_evaluate=1.0))


def central(number, arrays):
    return MetricRecord({"x": float(arrays["x"].numpy()[0])})


class Patience:
    """Stop after a round, and keep what each call has seen."""

    def __init__(self, last=LAST):
        self.last = last
        self.models = {}
        self.rounds = []

    def __call__(self, number, result):
        self.models[number] = float(result.arrays["x"].numpy()[0])
        self.rounds.append([*result.evaluate_metrics_serverapp])
        return number >= self.last


@pytest.mark.parametrize("kind", KINDS)
def test_run_ends_after_the_round(tmp_path, kind):
    folder = Folder(tmp_path / "run")
    patience = Patience()
    strategy = Recorded(build(kind), run_dir=folder)
    grid = Watched(GOALS, SPEEDS)
    result = strategy.start(grid, start(), ROUNDS, evaluate_fn=central, should_stop=patience)
    assert [*patience.models] == [1, 2]
    assert patience.rounds == [list(range(number + 1)) for number in patience.models]
    evaluated = {n: metrics["x"] for n, metrics in result.evaluate_metrics_serverapp.items()}
    assert patience.models == {number: evaluated[number] for number in patience.models}
    assert result.arrays["x"].numpy()[0] == patience.models[LAST]
    assert max(result.train_metrics_clientapp) == LAST
    assert folder.model["x"][0] == patience.models[LAST]
    assert [record.get("stopped") for record in folder.records] == [None] * 2 + [
        "should_stop returned True"
    ]
    assert checkpoint(tmp_path / "run" / "state.npz")[1]["round"] == LAST
    # resumed, it goes on with the round after
    patience = Patience(ROUNDS)
    strategy = Recorded(build(kind), run_dir=folder, resume=True)
    strategy.start(Watched(GOALS, SPEEDS), start(), ROUNDS, should_stop=patience)
    assert [*patience.models] == [3, 4]
    assert [record["round"] for record in folder.records] == list(range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers_as_without_it_until_then(kind):
    runs = []
    for should_stop in (None, Patience()):
        grid = Watched(GOALS, SPEEDS)
        result = build(kind).start(
            grid, start(), ROUNDS, evaluate_fn=central, should_stop=should_stop
        )
        runs.append([metrics["x"] for metrics in result.evaluate_metrics_serverapp.values()])
    whole, stopped = runs
    assert stopped == whole[: LAST + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_strategy_starts_again_after_a_stop(kind):
    grid = Watched(GOALS, SPEEDS)
    strategy = build(kind)
    first = strategy.start(grid, start(), ROUNDS, should_stop=Patience())
    # Without rounds, this run takes up the training that is in flight, but no evaluation.
    second = strategy.start(grid, first.arrays, 2, evaluate_fn=central)
    assert [*second.train_metrics_clientapp] == [1, 2]
    assert max(second.evaluate_metrics_clientapp) == 2


def test_last_round_is_not_a_stop():
    patience = Patience()
    history = History(build("FedBuff"))
    history.start(Watched(GOALS, SPEEDS), start(), LAST, should_stop=patience)
    assert [*patience.models] == [1, 2]
    assert "stopped" not in history.records[-1]
