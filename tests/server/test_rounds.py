import pytest
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower
from recording import Folder, History
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server import rounds
from flwr_hetero.strategy import Recorded, TiFL


def test_history_has_time_bytes_and_nodes():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(2.0), DeviceProfile(0.5)])
    history = History(flower.FedAvg(fraction_evaluate=0.0))
    history.start(
        grid, toy_arrays(), num_rounds=2, evaluate_fn=lambda r, a: MetricRecord({"acc": r / 10})
    )
    first, last = history.records[1], history.records[-1]
    assert last["virtual_s"] == pytest.approx(4.0) == grid.virtual_time_s
    assert first["latency"] == {"node-0": pytest.approx(0.5), "node-1": pytest.approx(2.0)}
    assert first["global"] == {"acc": 0.1}
    model = sum(len(a.data) for a in toy_arrays().values())
    assert first["bytes_down"] == 2 * (model + 8)
    assert first["bytes_up"] > 2 * model
    assert sorted(history.records[2]["selected"]) == ["node-0", "node-1"]


def test_history_has_accuracy_by_node():
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile(1.0)] * 3)
    history = History(flower.FedAvg())
    history.start(grid, toy_arrays(), num_rounds=1)
    assert history.records[1]["fairness"]["by-node"] == {
        f"node-{i}": pytest.approx(0.5 + 0.01 * i) for i in range(3)
    }
    assert "fairness" not in history.records[0]


def fleet(num_nodes):
    return LocalGrid(toy_app(), profiles=[DeviceProfile(1 / (1 + i)) for i in range(num_nodes)])


def run_of(strategy, grid, num_rounds=2, evaluate_fn=None):
    configs = (ConfigRecord(), ConfigRecord())
    return rounds.Run(strategy, grid, toy_arrays(), num_rounds, 60.0, *configs, evaluate_fn)


def test_stop_reason_ends_the_run():
    strategy = History(flower.FedAvg(fraction_evaluate=0.0))

    def stop(server_round, arrays):
        strategy.session.stop_reason = "seen enough" if server_round == 2 else None

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
    run = run_of(strategy, grid)
    session = strategy.session
    with rounds.opened(run):
        rounds.finish_round(run, rounds.new_record(run, 0, []))
        sent = strategy.configure_train(1, run.arrays, run.train_config, grid)
        waiting = dict(zip(grid.push_messages(sent), sent, strict=True))
        while waiting:
            replies = grid.wait_for(list(waiting), enough=2)
            arrived = [waiting.pop(reply.metadata.reply_to_message_id) for reply in replies]
            session.begin_round(run.arrays, run.train_config)
            session.ask(arrived, grid)
            record = rounds.aggregate(run, run.round + 1, arrived, replies)
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
