"""Evaluation on nodes while others train."""

import pytest
from quadratics import Watched, fedavg, models, start
from recording import History

from flwr_hetero.asynchronous.engine import EVALUATION_SHARE
from flwr_hetero.fleet import Fault
from flwr_hetero.strategy import FedBuff, Wrapper

GOALS = [0.0, 1.0, 2.0, 5.0]
SPEEDS = [2.0, 1.3, 0.9, 0.17]
EXAMPLES = [100, 30, 70, 10]


def run(merges, concurrency=None, make=Watched, timeout=600.0, **settings):
    """Return what is recorded and found, the result, and the grid."""
    strategy = History(FedBuff(fedavg(fraction_evaluate=1.0), concurrency=concurrency))
    fleet = make(GOALS, SPEEDS, examples=EXAMPLES, **settings)
    return strategy.records, *models(strategy, fleet, merges, timeout=timeout), fleet


def by_fedavg(x):
    """Return what a synchronous run says of this model."""
    one = Wrapper(fedavg(fraction_evaluate=1.0))
    one.inner.configure_train = lambda *_: []
    result = one.start(Watched(GOALS, SPEEDS, examples=EXAMPLES), start(x), 1)
    return dict(result.evaluate_metrics_clientapp[1])


@pytest.mark.parametrize("concurrency", [pytest.param(None, marks=pytest.mark.nightly), 2])
def test_figures_are_those_of_fedavg(concurrency):
    records, found, result, fleet = run(120, concurrency)
    figures = result.evaluate_metrics_clientapp
    assert len(figures) >= 3
    assert max(figures) == 120  # the last model, at the end
    for number, metrics in figures.items():
        assert dict(metrics) == pytest.approx(by_fedavg(found[number]))
    history = [r["evaluate"] for r in records if r["evaluate"]]
    assert [line["evaluated_round"] for line in history] == sorted(figures)
    assert fleet.most == min(concurrency or 4, 4)
    spans = {}
    for at_s, _, kind, number in fleet.sent:
        if kind == "evaluate" and number < 120:
            spans.setdefault(number, []).append(at_s)
    evaluating_s = sum(max(times) - min(times) for times in spans.values())
    assert evaluating_s < EVALUATION_SHARE * records[-2]["virtual_s"]
    assert all(len(times) == 4 for times in spans.values())


def test_training_goes_on():
    *_, fleet = run(60)
    first = [at_s for at_s, _, kind, n in fleet.sent if kind == "evaluate" and n == 1]
    trained = [(at_s, node) for at_s, node, kind, _ in fleet.sent if kind == "train"]
    assert max(first) > min(first)  # as nodes become idle
    assert sum(min(first) < at_s < max(first) for at_s, _ in trained) > 3
    assert {node for _, node in trained} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["errs", "dies"])
def test_a_node_that_fails_holds_no_evaluation_up(kind):
    faults = [Fault(2, kind, 2), Fault(1, kind, 1, message_type="evaluate")]
    records, _, result, _ = run(100, faults=faults, timeout=60.0)
    assert len(result.evaluate_metrics_clientapp) >= 3
    assert 100 in result.evaluate_metrics_clientapp
    assert len({f["reason"] for r in records for f in r["failures"]}) == 1


def test_a_fault_of_all_nodes_in_evaluation_ends_the_run():
    fault = {"kind": "garbage", "corrupt": "no-metrics", "message_type": "evaluate"}
    fleet = Watched([0.0, 1.0], [2.0, 1.3], faults=[Fault(0, **fault), Fault(1, **fault)])
    with pytest.raises(RuntimeError, match="no reply to evaluation counts, all for the same"):
        models(FedBuff(fedavg(fraction_evaluate=1.0)), fleet, 60)
