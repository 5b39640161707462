import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from recording import History
from steps_toy import steps_arrays

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples, read_samples, samples_record
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD

FLEET = [DeviceProfile(compute_factor=4.0), DeviceProfile(compute_factor=1.0)]


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=5),
    st.booleans(),
    st.one_of(st.none(), st.floats(0.05, 1)),
)
def test_every_node_gets_its_samples_however_small_the_data(size, nodes, unified, fraction):
    shared = SharedSamples(size, 3, fraction, unified=unified, seed=1)
    steps, fast = zip(*nodes, strict=True)
    for _ in range(4):
        lists = shared.hand_out(steps, fast)
        assert [len(one) for one in lists] == [3 * count for count in steps]
        assert all(((one >= 0) & (one < size)).all() for one in lists)
        shared.record(lists[0], np.ones(len(lists[0])))


def test_unbiased_nodes_share_one_random_order():
    shared = SharedSamples(30, 5, None, seed=0)
    lists = shared.hand_out([4, 2], [True, False])
    assert sorted(np.concatenate(lists).tolist()) == list(range(30))


def test_a_fast_epoch_has_the_hardest_samples():
    # share 4 / 5 of 50 samples: 40; lambda .5: the 20 hardest
    shared = SharedSamples(50, 2, 0.5, seed=0)
    shared.record(np.arange(50), np.arange(50.0))
    rounds = [shared.hand_out([4, 1], [True, False]) for _ in range(5)]
    fast = np.concatenate([lists[0] for lists in rounds]).tolist()
    assert len(set(fast)) == 40
    assert set(range(30, 50)) <= set(fast)
    assert shared.epoch == 1
    shared.hand_out([4, 1], [True, False])
    assert shared.epoch == 2


def test_an_own_share_makes_the_fast_epochs_shorter_and_harder():
    shared = SharedSamples(50, 2, 1.0, share=0.2, seed=0)
    shared.record(np.arange(50), np.arange(50.0))
    fast, slow = shared.hand_out([5, 1], [True, False])
    assert sorted(fast.tolist()) == list(range(40, 50))
    assert len(slow) == 2


def test_unified_slow_nodes_get_what_is_left():
    shared = SharedSamples(50, 2, 0.5, unified=True, seed=0)
    rounds = [shared.hand_out([4, 1], [True, False]) for _ in range(5)]
    assert sorted(np.concatenate([one for lists in rounds for one in lists])) == list(range(50))


def test_unified_pools_stay_apart_in_every_epoch():
    # N_F, N_S = 33, 17; a round takes 16 and 8: the fast pool ends while the slow one has 1 left
    shared = SharedSamples(50, 2, 0.5, unified=True, seed=0)
    for _ in range(40):
        fast, _slow = shared.hand_out([8, 4], [True, False])
        shared.record(fast, np.sin(fast))
        pools = shared.state_dict()
        assert not set(pools["slow"].tolist()) & set(pools["taken"].tolist())


def test_the_order_of_nodes_does_not_cut_an_epoch_short():
    # the slow pool of 10 runs out in the middle; the fast pool must still give all its 40
    shared = SharedSamples(50, 2, 1.0, seed=0)
    shared.record(np.arange(50), np.arange(50.0))
    fast = np.concatenate([shared.hand_out([2, 8], [False, True])[1] for _ in range(2)])
    assert len(set(fast.tolist())) == 32
    assert fast.min() >= 10


def test_lists_on_the_wire():
    record = samples_record(np.array([5, 0]), np.array([0.5, np.nan]))
    assert {key: len(value) for key, value in record.items()} == {"indices": 8, "losses": 8}
    for bad in ({}, {"indices": b"123"}, {"indices": 3}, {"indices": b"1234", "losses": "x"}):
        with pytest.raises(ValueError, match=r"list of samples|size"):
            read_samples(ConfigRecord(bad))


# --- with nodes ---------------------------------------------------------------------------


def shared_app(spoil=None, given=None):
    """Make a ClientApp that reports loss = index for what it was given."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        steps = int(message.content["config"]["num-steps"])
        partition = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": 1, "examples-processed": 4 * steps})
        arrays = ArrayRecord(dict(message.content["arrays"]))
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        if keys.SAMPLES in message.content:
            indices, _ = read_samples(message.content[keys.SAMPLES])
            if given is not None:
                given.append((partition, indices))
            content[keys.SAMPLES] = samples_record(indices, indices.astype(float))
            if spoil and partition == 1:
                content[keys.SAMPLES] = spoil(indices)
        return Message(content, reply_to=message)

    return app


def biased(**settings):
    from flwr.serverapp.strategy import FedAvg

    inner = FedAvg(fraction_evaluate=0.0)
    return BiasedLocalSGD(inner, 8, shared_samples=100, batch_size=4, **settings)


def test_losses_come_back_into_the_servers_table():
    given = []
    strategy = biased()
    strategy.start(LocalGrid(shared_app(given=given), FLEET), steps_arrays(), num_rounds=3)
    seen = np.unique(np.concatenate([indices for _, indices in given]))
    known = np.flatnonzero(~np.isnan(strategy.shared.losses))
    np.testing.assert_array_equal(known, seen)
    np.testing.assert_array_equal(strategy.shared.losses[known], known)
    assert {partition: len(indices) for partition, indices in given} == {0: 32, 1: 8}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda indices: samples_record(np.array([10**6]), np.array([1.0])),
        lambda indices: samples_record(np.array([-1]), np.array([1.0])),
        lambda indices: samples_record(indices, np.full(len(indices), np.nan)),
        lambda indices: samples_record(indices, np.ones(1)),
        lambda indices: samples_record(np.setdiff1d(np.arange(100), indices), np.ones(92)),
        lambda indices: ConfigRecord({"indices": "all of them"}),
    ],
)
def test_a_bad_list_of_losses_costs_that_reply_only(spoil):
    strategy = biased()
    history = History(strategy)
    history.start(LocalGrid(shared_app(spoil), FLEET), steps_arrays(), num_rounds=3)
    assert [len(record["failures"]) for record in history.records[1:]] == [0, 1, 1]
    assert history.records[2]["failures"][0]["node"] == "node-1"
    known = np.flatnonzero(~np.isnan(strategy.shared.losses))
    np.testing.assert_array_equal(strategy.shared.losses[known], known)


def test_a_state_of_other_data_is_refused():
    state = biased().state_dict()
    with pytest.raises(ValueError, match="losses must have the size"):
        BiasedLocalSGD(shared_samples=7).load_state_dict(state)
