import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower
from recording import Folder, History
from steps_toy import steps_app, steps_arrays
from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.server import rounds
from flwr_hetero.strategy import (
    FedBuff,
    LocalSteps,
    ModelAverage,
    RandomSelection,
    Recorded,
    TiFL,
    Wrapper,
)
from flwr_hetero_studies.rivals import AdaComm


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
    assert first["fairness"]["by-node"] == by_node
    assert "fairness" not in history.records[0]


def fleet(num_nodes):
    return LocalGrid(toy_app(), profiles=[DeviceProfile(1 / (1 + i)) for i in range(num_nodes)])


def test_stop_reason_ends_the_run():
    strategy = History(flower.FedAvg(fraction_evaluate=0.0))

    def stop(server_round, arrays):
        strategy.fleet.stop_reason = "seen enough" if server_round == 2 else None

    strategy.start(fleet(2), toy_arrays(), 9, evaluate_fn=stop)
    assert [record["round"] for record in strategy.records] == [0, 1, 2]


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


def test_another_loop_uses_the_pieces(tmp_path):
    """Aggregate two replies at a time, in the order in which they come, as FedBuff does."""
    fedavg = flower.FedAvg(fraction_evaluate=0.0)
    inner = TiFL(fedavg, 4, 1, policy="vanilla", profiling="phase")
    folder, grid = Folder(tmp_path), fleet(4)
    strategy = Recorded(inner, run_dir=folder)
    run = rounds.Run(strategy, grid, toy_arrays(), 2, 60.0, ConfigRecord(), ConfigRecord(), None)
    with rounds.opened(run):
        rounds.finish_round(run, rounds.new_record(run, run.exchange(0), []))
        sent = strategy.configure_train(1, run.arrays, run.train_config, grid, run.exchange(1))
        waiting = dict(zip(grid.push_messages(sent), sent, strict=True))
        while waiting:
            replies = grid.wait_for(list(waiting), enough=2)
            arrived = [waiting.pop(reply.metadata.reply_to_message_id) for reply in replies]
            context = run.exchange(run.round + 1)
            context.ask(arrived, grid)
            record = rounds.aggregate(run, context, arrived, replies)
            record["global"] = rounds.evaluate_centrally(run, record["round"])
            rounds.finish_round(run, record)
    assert [sorted(record["weights"]) for record in folder.records] == [
        [],
        ["node-0", "node-1"],
        ["node-2", "node-3"],
    ]
    assert folder.records[-1]["tifl"]["tier"] == 0
    # the second buffer replaces the first: FedAvg keeps nothing of the old model
    assert run.arrays["w"].numpy() == pytest.approx((2.04 + 3.09) / 2 / 2)
    assert (tmp_path / "state.npz").exists()


# --- inside one of Flower's own wrappers -----------------------------------------------------


class Untimed(LocalGrid):
    """Nodes without a mod: replies do not say how long they took."""

    def _answer(self, message):
        arrival_s, reply = super()._answer(message)
        reply.content.pop(keys.TIMING, None)
        return arrival_s, reply


def inside(strategy, num_nodes=4):
    return flower.DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 9.0, num_nodes)


def run_untimed(strategy, num_rounds):
    seen, arrays = [], steps_arrays()
    arrays["n"] = Array(np.zeros(1, np.float32))
    grid = Untimed(steps_app(seen=seen), [DeviceProfile(4.0)] * 2 + [DeviceProfile(0.5)] * 2)
    strategy.start(grid, arrays, num_rounds)
    return sorted((*told[:2], told[2].get("num-steps")) for told in seen)


def test_the_clock_and_the_times_of_nodes_are_known_inside():
    told = run_untimed(Wrapper(inside(LocalSteps(fast_steps=16))), 2)
    assert told[4:] == [(2, 0, 16), (2, 1, 16), (2, 2, 2), (2, 3, 2)]
    told = run_untimed(Wrapper(inside(AdaComm(first_steps=8, interval_s=0.1))), 2)
    assert {steps for number, _, steps in told if number == 2} == {4}


def test_a_run_that_flower_starts_says_what_it_lacks(caplog):
    run_untimed(Wrapper(inside(LocalSteps())), 1)
    assert "has started the run" not in caplog.text
    run_untimed(inside(ModelAverage()), 2)
    assert caplog.text.count("ModelAverage: a strategy of Flower's around it has started") == 1


def test_no_round_goes_by_without_the_loop_that_a_strategy_brings():
    with pytest.raises(RuntimeError, match=r"FedBuff works without rounds, .* into FedBuff"):
        run_untimed(inside(FedBuff()), 1)
    for build in (Wrapper, lambda s: Wrapper(inside(Wrapper(s.strategy)))):
        with pytest.raises(ValueError, match=r"inside a strategy of Flower's, .* other way round"):
            build(inside(FedBuff()))


def test_nodes_without_times_are_equal_where_flower_starts_the_run():
    tifl = TiFL(clients_per_round=2, num_tiers=2)
    told = run_untimed(inside(tifl, 2), 4)
    assert [number for number, *_ in told] == [1] * 4 + [2] * 2 + [3] * 2 + [4] * 2
    assert len(tifl.tiers.members) == 1


# --- replies that do not count ----------------------------------------------------------------


def errs_in(rounds, nodes=range(6)):
    faults = [Fault(i, "errs", r, r, message_type="train") for i in nodes for r in rounds]
    return LocalGrid(toy_app(), [DeviceProfile(1.0)] * 6, faults=faults)


def test_two_rounds_in_vain_of_a_few_nodes_end_no_run_that_has_begun():
    """With two nodes a round and one failure in three, such rounds come in most runs."""
    history = History(RandomSelection(flower.FedAvg(fraction_evaluate=0.0), 2))
    history.start(errs_in([3, 4, 5]), toy_arrays(), 8)
    assert [bool(record["weights"]) for record in history.records[3:]] == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("nodes_a_round", "first", "last"), [(2, 3, 8), (6, 3, 4), (2, 1, 2)])
def test_a_fault_of_all_nodes_ends_the_run(nodes_a_round, first, last):
    history = History(RandomSelection(flower.FedAvg(fraction_evaluate=0.0), nodes_a_round))
    with pytest.raises(RuntimeError, match="no reply to training has counted in"):
        history.start(errs_in(range(first, 20)), toy_arrays(), 20)
    assert len(history.records) == last
