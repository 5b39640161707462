import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from recording import History
from steps_toy import steps_app, steps_arrays

from flwr_hetero import keys
from flwr_hetero.biased_local_sgd.shared_data import SharedSamples, read_samples, samples_record
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD

FLEET = [DeviceProfile(compute_factor=4.0), DeviceProfile(compute_factor=1.0)]
TWO = [True, False]


def ranked(num_samples=50, batch_size=2, high_loss_fraction=0.5, **settings):
    """Samples whose loss is their index."""
    shared = SharedSamples(num_samples, batch_size, high_loss_fraction, **settings)
    shared.losses = np.arange(num_samples, dtype=np.float32)
    return shared


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("fraction", [None, 0.05, 1.0])
@pytest.mark.parametrize("size", [1, 7, 60])
@pytest.mark.parametrize("fast", [(True, False), (False, True, True), (False,), (True,)])
def test_every_node_gets_its_number_of_samples(size, fast, unified, fraction):
    shared = SharedSamples(size, 3, fraction, unified=unified)
    steps = [8, 1, 2][: len(fast)]
    for _ in range(4):
        lists = shared.draw(steps, fast)
        assert [len(one) for one in lists] == [3 * count for count in steps]
        assert all(((one >= 0) & (one < size)).all() for one in lists)
        shared.losses[lists[0]] = 1.0


def test_edges_of_the_pools():
    """All is allotted to the fast nodes; no bias; unified, for which the rest is left."""
    fast, slow = SharedSamples(5, 3, 0.5, share=1.0).draw([2, 1], TWO)
    assert (len(fast), len(slow)) == (6, 3)
    lists = SharedSamples(30, 5, None).draw([4, 2], TWO)  # one random order
    assert sorted(np.concatenate(lists).tolist()) == list(range(30))
    shared = ranked(unified=True)
    rounds = [shared.draw([4, 1], TWO) for _ in range(5)]
    assert sorted(np.concatenate([one for lists in rounds for one in lists])) == list(range(50))


def test_fast_epoch_has_the_hardest_samples():
    # share 4 / 5 of 50 samples: 40; lambda .5: the 20 hardest
    shared = ranked()
    fast = np.concatenate([shared.draw([4, 1], TWO)[0] for _ in range(5)]).tolist()
    assert len(set(fast)) == 40
    assert set(range(30, 50)) <= set(fast)
    hardest, _ = ranked(high_loss_fraction=1.0, share=0.2).draw([5, 1], TWO)
    assert sorted(hardest.tolist()) == list(range(40, 50))


def test_unified_pools_stay_apart_in_every_epoch():
    # N_F, N_S = 33, 17; a round takes 16 and 8: the fast pool ends while the slow one has 1 left
    shared = ranked(unified=True)
    for _ in range(40):
        fast, _slow = shared.draw([8, 4], TWO)
        shared.losses[fast] = np.sin(fast)
        pools = shared.state_dict()
        assert not set(pools["slow"].tolist()) & set(pools["taken"].tolist())


@pytest.mark.parametrize("unified", [False, True])
def test_restored_state_continues_alike(unified):
    whole, resumed = (ranked(unified=unified, seed=seed) for seed in (3, 4))
    whole.draw([7, 3], TWO)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(6):
        np.testing.assert_equal(resumed.draw([7, 3], TWO), whole.draw([7, 3], TWO))
    with pytest.raises(ValueError, match="losses"):
        ranked(7).load_state_dict(whole.state_dict())


def train(spoil=None):
    """Run three rounds; nodes report indices as losses, node 1 what ``spoil`` makes of them."""
    given: dict[int, list[int]] = {0: [], 1: []}

    def report(message, context, call_next):
        reply = call_next(message, context)
        if keys.SAMPLES in message.content.config_records:
            partition = context.node_config["partition-id"]
            indices, _ = read_samples(message.content[keys.SAMPLES])
            given[partition] += indices.tolist()
            reply.content[keys.SAMPLES] = samples_record(indices, indices.astype(float))
            if spoil is not None and partition == 1:
                reply.content[keys.SAMPLES] = spoil(indices)
        return reply

    inner = FedAvg(fraction_evaluate=0.0)
    history = History(BiasedLocalSGD(inner, 8, shared_samples=100, batch_size=4))
    history.start(LocalGrid(steps_app(mods=[report]), FLEET), steps_arrays(), num_rounds=3)
    losses = history.inner.shared.losses
    known = np.flatnonzero(~np.isnan(losses))
    np.testing.assert_array_equal(losses[known], known)
    failed = [[one["node"] for one in record["failures"]] for record in history.records[1:]]
    return failed, set(known.tolist()), given


def test_losses_come_back_into_the_servers_table():
    failed, known, given = train()
    assert failed == [[]] * 3
    assert known == {*given[0], *given[1]}
    # nothing in round 1, which measures; then 8 and 2 steps of 4 examples
    assert [len(indices) for indices in given.values()] == [2 * 32, 2 * 8]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda indices: samples_record(np.array([10**6]), np.array([1.0])),
        lambda indices: samples_record(indices, np.full(len(indices), np.nan)),
        lambda indices: samples_record(indices, np.ones(1)),
        lambda indices: samples_record(np.setdiff1d(np.arange(100), indices), np.ones(92)),
        lambda indices: ConfigRecord({"indices": "all of them"}),
        lambda indices: ConfigRecord({"indices": b"123"}),
    ],
)
def test_bad_list_of_losses_costs_that_reply_only(spoil):
    failed, known, given = train(spoil)
    assert failed == [[], ["node-1"], ["node-1"]]
    assert known == set(given[0])
