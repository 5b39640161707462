from logging import DEBUG, WARNING

import pytest
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower
from recording import History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.server import loop
from flwr_hetero.server.loop import Run
from flwr_hetero.strategy import FedBuff, LocalSteps, ModelAverage, RandomSelection, Wrapper


def test_history_has_time_bytes_nodes_and_their_accuracy():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(2.0), DeviceProfile(0.5)])
    history = History(flower.FedAvg())
    history.start(grid, toy_arrays(), 2, evaluate_fn=lambda r, a: MetricRecord({"acc": r / 10}))
    first, last = history.records[1:]
    assert last["virtual_s"] == pytest.approx(grid.virtual_time_s)
    assert first["latency"] == {"node-0": pytest.approx(0.5), "node-1": pytest.approx(2.0)}
    assert first["global"] == {"acc": 0.1}
    model = sum(len(a.data) for a in toy_arrays().values())
    assert first["bytes_down"] == 2 * 2 * (model + 8)
    assert first["bytes_up"] > 2 * model
    assert sorted(last["selected"]) == ["node-0", "node-1"]
    by_node = {f"node-{i}": pytest.approx(0.5 + 0.01 * i) for i in range(2)}
    assert first["fairness"]["by_node"] == by_node
    assert "fairness" not in history.records[0]


def fleet(num_nodes):
    return LocalGrid(toy_app(), profiles=[DeviceProfile(1 / (1 + i)) for i in range(num_nodes)])


def test_hooks_end_also_after_an_error():
    ended = []

    class Ends(History):
        def on_finish(self, run):
            ended.append(run.round)

    def fails(server_round, arrays):
        if server_round == 1:
            raise KeyError(server_round)

    with pytest.raises(KeyError):
        Ends(Ends()).start(fleet(2), toy_arrays(), 3, evaluate_fn=fails)
    assert ended == [0, 0]


@pytest.mark.parametrize("kind", [LocalSteps, ModelAverage, FedBuff])
def test_a_strategy_of_flowers_goes_inside(kind):
    outside = flower.DifferentialPrivacyServerSideFixedClipping(kind(), 0.0, 9.0, 4)
    with pytest.raises(ValueError, match=rf"not be inside Diff.*write {kind.__name__}\(Diff"):
        Wrapper(outside)
    with pytest.raises(RuntimeError, match=rf"put that one inside, {kind.__name__}\(DP"):
        outside.start(fleet(4), toy_arrays(), 1)


def test_line_of_a_round():
    run = Run(None, None, toy_arrays(), 20, 60.0, ConfigRecord(), ConfigRecord(), None)
    record = {"round": 7, "virtual_s": 2.5, "selected": ["a", "a", "b"], "train": {"acc": 0.1}}
    record |= {"evaluate": {"loss": 0.25}, "global": {"x": [1.0]}, "tifl": {"tier": 4}}
    line = loop.log_line(run, record | {"failures": [{"node": n} for n in "bbcde"]})
    assert line == (
        "round  7/20  tier 4   2 nodes     2.50 s  at    2.5 s  acc 0.1  failed: b, c and 2 more"
    )
    run.logged_s = 0.5
    record["train"] = {}
    record["failures"] = []
    line = loop.log_line(run, record | {"tifl": {"tier": None}})
    assert line == "round  7/20  tier -   2 nodes     2.00 s  at    2.5 s  loss 0.25"


def test_run_logs_one_line_a_round_and_each_kind_of_warning_thrice(caplog):
    def fails(message, context, call_next):
        if context.node_config["partition-id"] < 4:
            raise ValueError(f"disk of node {context.node_config['partition-id']} is full")
        return call_next(message, context)

    Wrapper().start(LocalGrid(toy_app(mods=[fails]), [DeviceProfile()] * 6), toy_arrays(), 5)
    shown = [log for log in caplog.records if log.levelno > DEBUG and log.name == "flwr"]
    lines = [log.getMessage() for log in shown if log.getMessage().startswith("round ")]
    assert len(lines) == 5
    assert all("failed: id-" in line for line in lines)
    warnings = [log.getMessage() for log in shown if log.levelno == WARNING]
    assert sum("is full" in text for text in warnings) == 3
    assert len(shown) - len(lines) - len(warnings) <= 2  # the header


def errs_in(rounds, nodes=range(6)):
    faults = [Fault(i, "errs", r, r, message_type="train") for i in nodes for r in rounds]
    return LocalGrid(toy_app(), [DeviceProfile(1.0)] * 6, faults=faults)


@pytest.mark.parametrize(("nodes_a_round", "first", "last"), [(2, 3, 8), (6, 3, 4), (2, 1, 2)])
def test_a_fault_of_all_nodes_ends_the_run(nodes_a_round, first, last):
    history = History(RandomSelection(flower.FedAvg(fraction_evaluate=0.0), nodes_a_round))
    with pytest.raises(RuntimeError, match="no reply to training has counted in"):
        history.start(errs_in(range(first, 20)), toy_arrays(), 20)
    assert len(history.records) == last
