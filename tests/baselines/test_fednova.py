import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedMedian
from steps_toy import local_model, steps_app, steps_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import FedNova, LocalSteps

FAST, SLOW = DeviceProfile(compute_factor=8.0), DeviceProfile(compute_factor=1.0)
FLEET = [FAST, FAST, SLOW]
STEPS = [16, 16, 2]


def run(strategy, *, num_rounds=2, arrays=None, faults=(), **app):
    grid = LocalGrid(steps_app(**app), profiles=FLEET, faults=faults)
    return strategy.start(grid, arrays or steps_arrays(), num_rounds=num_rounds).arrays


def nova_round(w, steps, examples):
    """FedNova as printed: the weighted mean of the updates per step, times the mean steps."""
    shares = np.array(examples) / sum(examples)
    per_step = [
        (local_model(w, partition, count).astype(np.float64) - w) / count
        for partition, count in enumerate(steps)
    ]
    return (w + (shares @ steps) * (shares @ per_step)).astype(np.float32)


def test_equals_the_papers_formula():
    examples = {0: 300, 1: 100, 2: 200}
    arrays = run(FedNova(fast_steps=16), num_examples=examples)
    w = nova_round(np.zeros(3, np.float32), [1, 1, 1], list(examples.values()))
    w = nova_round(w, STEPS, list(examples.values()))
    np.testing.assert_allclose(arrays["w"].numpy(), w, rtol=1e-5)


def test_equal_steps_are_plain_averaging():
    nova, plain = run(FedNova(fast_steps=4, gamma=1.0)), run(LocalSteps(fast_steps=4, gamma=1.0))
    np.testing.assert_allclose(nova["w"].numpy(), plain["w"].numpy(), rtol=1e-6)


def test_integers_and_batch_statistics_are_averaged_as_they_are():
    nova, plain = run(FedNova(fast_steps=16)), run(LocalSteps(fast_steps=16))
    assert nova["n"].numpy() == plain["n"].numpy()
    by_name = run(FedNova(fast_steps=16, buffers=["w"]))
    np.testing.assert_array_equal(by_name["w"].numpy(), plain["w"].numpy())


def test_a_claim_of_fewer_steps_does_not_raise_a_nodes_influence():
    honest, claiming = run(FedNova(fast_steps=16)), run(FedNova(fast_steps=16), claims={0: 1})
    np.testing.assert_array_equal(honest["w"].numpy(), claiming["w"].numpy())


def test_follows_into_a_robust_strategy():
    arrays = run(FedNova(FedMedian(), fast_steps=16), num_rounds=1)
    medians = np.median([local_model(np.zeros(3), p, 1) for p in range(3)], axis=0)
    np.testing.assert_allclose(arrays["w"].numpy(), medians, rtol=1e-6)


def test_a_dropped_reply_leaves_the_rest():
    faults = [Fault(2, "garbage", corrupt="nan", message_type="train")]
    arrays = run(FedNova(fast_steps=16), faults=faults, num_rounds=1)
    w = np.mean([local_model(np.zeros(3), p, 1) for p in range(2)], axis=0)
    np.testing.assert_allclose(arrays["w"].numpy(), w, rtol=1e-6)


def test_replies_without_any_examples_do_not_stop_it():
    start = ArrayRecord({"w": Array(np.ones(3, np.float32)), "n": Array(np.array(0))})
    result = run(FedNova(FedAvg()), arrays=start, num_examples=dict.fromkeys(range(3), 0))
    assert result["w"].numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: FedNova(momentum=1.0), "momentum must lie in"),
        (lambda: FedNova(momentum=-0.1), "momentum must lie in"),
        (lambda: FedNova(buffers="running_mean"), "buffers must be a sequence of names"),
        (lambda: FedNova(gamma=0.0), "gamma must lie in"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
