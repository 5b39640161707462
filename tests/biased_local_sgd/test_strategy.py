import random

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower
from recording import History
from steps_toy import local_model, steps_app, steps_arrays

from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.strategy import BiasedLocalSGD, FedNova, LocalSteps, TiFL, Wrapper

FAST, SLOW = DeviceProfile(compute_factor=8.0), DeviceProfile(compute_factor=1.0)
FLEET = [FAST, FAST, FAST, SLOW]
STEPS = [16, 16, 16, 2]
FLOWER_STRATEGIES = {
    "FedAvg": lambda: flower.FedAvg(),
    "FedAdagrad": lambda: flower.FedAdagrad(),
    "FedAdam": lambda: flower.FedAdam(),
    "FedYogi": lambda: flower.FedYogi(),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedMedian": lambda: flower.FedMedian(),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.3),
    "Krum": lambda: flower.Krum(),
    "MultiKrum": lambda: flower.MultiKrum(num_nodes_to_select=3),
    "Bulyan": lambda: flower.Bulyan(),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, train_loss_key="train-loss"),
}


def float_arrays():
    """Make a model without integers, which some of Flower's strategies cannot take."""
    return ArrayRecord({"w": steps_arrays()["w"], "n": Array(np.zeros(1, np.float32))})


def run(strategy, *, num_rounds=3, arrays=None, profiles=FLEET, faults=(), **app):
    random.seed(0)
    grid = LocalGrid(steps_app(**app), profiles=profiles, seed=0, faults=faults)
    history = History(strategy)
    result = history.start(grid, arrays or steps_arrays(), num_rounds=num_rounds)
    return result, history.records


def models(w, steps):
    return [local_model(w, partition, count) for partition, count in enumerate(steps)]


# --- aggregation -----------------------------------------------------------------------


def test_equation_4_by_hand():
    result, _ = run(BiasedLocalSGD(fast_steps=16), num_rounds=2)
    w = np.average(models(np.zeros(3, np.float32), [1] * 4), axis=0)
    w = np.average(models(w.astype(np.float32), STEPS), axis=0, weights=STEPS)
    np.testing.assert_allclose(result.arrays["w"].numpy(), w, rtol=1e-6)


def test_metrics_stay_weighted_by_examples():
    examples = {0: 700, 1: 100, 2: 100, 3: 100}
    result, _ = run(BiasedLocalSGD(fast_steps=16), num_examples=examples, num_rounds=2)
    metrics = result.train_metrics_clientapp[2]
    assert metrics["num-steps"] == pytest.approx(0.9 * 16 + 0.1 * 2)
    assert "num-examples" not in metrics


def test_integer_buffers_keep_their_dtype_and_are_averaged_by_steps():
    result, _ = run(BiasedLocalSGD(fast_steps=16), num_rounds=2)
    assert result.arrays["n"].dtype == "int64"
    assert result.arrays["n"].numpy() == 1 + round((3 * 16 * 16 + 2 * 2) / 50)


def test_switched_off_it_is_the_inner_strategy_with_unequal_steps():
    off = BiasedLocalSGD(fast_steps=16, weighted_by_steps=False, high_loss_fraction=None)
    result, _ = run(off)
    plain, _ = run(LocalSteps(fast_steps=16))
    np.testing.assert_array_equal(result.arrays["w"].numpy(), plain.arrays["w"].numpy())


class Spied(flower.FedAvg):
    """A FedAvg of the user's own: how many replies reach it, and with what attributes?"""

    def __init__(self):
        super().__init__()
        self.seen = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seen.append((len(replies), self.weighted_by_key))
        return super().aggregate_train(server_round, replies)


def test_in_place_mean_and_weight_key_give_the_same():
    spied = Spied()
    by_key, _ = run(BiasedLocalSGD(spied, fast_steps=16))
    in_place, _ = run(BiasedLocalSGD(flower.FedAvg(), fast_steps=16))
    nested, _ = run(BiasedLocalSGD(Wrapper(flower.FedAvg()), fast_steps=16))
    assert spied.seen == [(4, "flwr-hetero.weight")] * 3
    for other in (by_key, nested):
        for name in in_place.arrays:
            np.testing.assert_allclose(
                other.arrays[name].numpy(), in_place.arrays[name].numpy(), rtol=1e-6
            )
        assert other.train_metrics_clientapp == in_place.train_metrics_clientapp


def test_own_metrics_function_gets_all_replies_and_its_own_key():
    calls = []

    def collect(contents, key):
        calls.append((len(contents), key, {float(c["metrics"][key]) for c in contents}))
        return MetricRecord({"seen": len(contents)})

    for inner in (flower.FedAvg(train_metrics_aggr_fn=collect), Wrapped := Spied()):
        inner.train_metrics_aggr_fn = collect
        result, _ = run(BiasedLocalSGD(inner, fast_steps=16), num_rounds=1)
        assert result.train_metrics_clientapp[1]["seen"] == 4
        assert inner.train_metrics_aggr_fn is collect
        assert inner.weighted_by_key == "num-examples"
    assert calls == [(4, "num-examples", {100.0})] * 2
    assert isinstance(Wrapped, Spied)


@pytest.mark.parametrize("name", sorted(FLOWER_STRATEGIES))
def test_every_flower_strategy_learns_and_survives_faults(name):
    profiles = [FAST] * 4 + [SLOW] * 2
    faults = [
        Fault(0, "garbage", 2, 2, corrupt="nan", message_type="train"),
        Fault(1, "garbage", 2, 2, corrupt="shape", message_type="train"),
        Fault(5, "errs", 3, 3, message_type="train"),
    ]
    arrays = float_arrays() if name == "QFedAvg" else steps_arrays()
    strategy = BiasedLocalSGD(FLOWER_STRATEGIES[name](), fast_steps=8)
    result, records = run(strategy, arrays=arrays, profiles=profiles, faults=faults)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert (result.arrays["w"].numpy() != 0).all()
    assert [len(r["failures"]) for r in records[1:]] == [0, 2, 1]
    for key in arrays:
        assert result.arrays[key].dtype == arrays[key].dtype


@pytest.mark.parametrize("name", ["FedMedian", "FedTrimmedAvg", "Krum"])
def test_robust_strategies_get_each_reply_and_keep_their_rule(name):
    inner = FLOWER_STRATEGIES[name]
    biased, _ = run(BiasedLocalSGD(inner(), fast_steps=16))
    plain, _ = run(LocalSteps(inner(), fast_steps=16))
    np.testing.assert_allclose(biased.arrays["w"].numpy(), plain.arrays["w"].numpy(), rtol=1e-6)


def test_multikrum_weights_the_chosen_by_steps():
    inner = flower.MultiKrum(num_nodes_to_select=4)
    chosen_all, _ = run(BiasedLocalSGD(inner, fast_steps=16))
    fedavg, _ = run(BiasedLocalSGD(fast_steps=16))
    np.testing.assert_allclose(
        chosen_all.arrays["w"].numpy(), fedavg.arrays["w"].numpy(), rtol=1e-5
    )


def test_a_server_optimiser_gets_the_weighted_mean():
    result, _ = run(BiasedLocalSGD(flower.FedAdam(eta=0.5), fast_steps=16), num_rounds=1)
    mean = np.average(models(np.zeros(3, np.float32), [1] * 4), axis=0)
    eta_norm = 0.5 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
    expected = eta_norm * 0.1 * mean / (np.sqrt(0.01 * mean**2) + 1e-3)
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected, rtol=1e-5)


def test_differential_privacy_inside_clips_each_reply():
    inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.0, 0.5, 4)
    result, _ = run(BiasedLocalSGD(inner, fast_steps=16), arrays=float_arrays(), num_rounds=1)
    moved = np.concatenate([array.numpy() for array in result.arrays.values()])
    assert 0 < np.linalg.norm(moved) <= 0.5 + 1e-6


def test_inside_tifl():
    strategy = TiFL(
        BiasedLocalSGD(flower.FedAdam(), fast_steps=8),
        clients_per_round=2,
        num_tiers=2,
        policy="uniform",
    )
    result, records = run(strategy, profiles=[FAST] * 3 + [SLOW] * 3, num_rounds=6)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert all(len(r["selected"]) == 2 for r in records[1:])
    for record in records[1:]:  # TiFL's profiling has told both how fast each node is
        fast = int(record["selected"][0][-1]) < 3
        assert set(record["biased-local-sgd"]["num-steps"].values()) == {8 if fast else 1}


# --- trust -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("app", "faults"),
    [
        ({"claims": {3: 10**6}}, []),
        ({"claims": {3: 0}}, []),
        ({"claims": {3: float("nan")}}, []),
        ({}, [Fault(3, "garbage", corrupt="nan", message_type="train")]),
        ({}, [Fault(3, "garbage", corrupt="shape", message_type="train")]),
        ({}, [Fault(3, "garbage", corrupt="nan-weight", message_type="train")]),
    ],
)
def test_a_bad_node_changes_a_log_line_and_the_failure_count_only(app, faults, caplog):
    result, records = run(BiasedLocalSGD(fast_steps=16), faults=faults, **app)
    counted = 4 if app.get("claims", {}).get(3) == 10**6 else 3
    w = np.zeros(3, np.float32)
    for number in range(3):
        steps = [1] * 4 if number == 0 else STEPS
        steps = steps[:counted]
        w = np.average(models(w, steps), axis=0, weights=steps).astype(np.float32)
    np.testing.assert_allclose(result.arrays["w"].numpy(), w, rtol=1e-5)
    assert [len(r["failures"]) for r in records[1:]] == [1, 1, 1]
    nodes = {r["failures"][0]["node"] for r in records[1:]}
    assert nodes <= {"node-3", "id-1003"}, "its name is known once a good reply has come"
    assert all(node in caplog.text for node in nodes)


def test_all_replies_bad_keeps_the_model():
    faults = [Fault(i, "garbage", 2, 2, corrupt="nan") for i in range(4)]
    result, records = run(BiasedLocalSGD(fast_steps=16), faults=faults, num_rounds=2)
    first, _ = run(BiasedLocalSGD(fast_steps=16), num_rounds=1)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), first.arrays["w"].numpy())
    assert len(records[2]["failures"]) == 4


# --- sampling ----------------------------------------------------------------------------


def test_roles_in_private_mode():
    seen = []
    run(BiasedLocalSGD(fast_steps=16, high_loss_fraction=0.25), seen=seen)
    told = {partition: config for number, partition, config in seen if number == 3}
    assert [told[p]["fast"] for p in range(4)] == [True, True, True, False]
    assert {config["fast-share"] for config in told.values()} == {48 / 50}
    assert {config["high-loss-fraction"] for config in told.values()} == {0.25}


def test_a_given_share_and_no_sampling_bias():
    seen = []
    run(BiasedLocalSGD(fast_steps=16, share=0.5), seen=seen, num_rounds=1)
    assert seen[0][2]["fast-share"] == 0.5
    seen.clear()
    run(BiasedLocalSGD(fast_steps=16, high_loss_fraction=None), seen=seen)
    assert not any("fast" in config for _, _, config in seen)


def test_config_of_the_user_is_left_alone():
    config = ConfigRecord({"lr": 0.1})
    grid = LocalGrid(steps_app(), profiles=FLEET)
    BiasedLocalSGD(fast_steps=4).start(grid, steps_arrays(), num_rounds=2, train_config=config)
    assert set(config) == {"lr", "server-round"}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: BiasedLocalSGD(high_loss_fraction=0.0), "high_loss_fraction must lie in"),
        (lambda: BiasedLocalSGD(share=0.0), "share must lie in"),
        (lambda: BiasedLocalSGD(share=1.5), "share must lie in"),
        (lambda: BiasedLocalSGD(shared_samples=0), "shared_samples must be a whole number"),
        (
            lambda: BiasedLocalSGD(shared_samples=9, batch_size=0),
            "batch_size must be a whole number of at least 1",
        ),
        (lambda: BiasedLocalSGD(gamma=2.0), "gamma must lie in"),
        (lambda: BiasedLocalSGD(shared_samples=10.5), r"shared_samples must be .* got 10\.5"),
        (lambda: BiasedLocalSGD(seed=-1), "seed must be a whole number of at least 0"),
        (lambda: BiasedLocalSGD(fast_steps=0), "fast_steps must be a whole number"),
        (lambda: BiasedLocalSGD("FedAvg"), "strategy must be a flwr"),
        (lambda: BiasedLocalSGD(FedNova()), "strategy must leave steps to"),
        (lambda: BiasedLocalSGD(OwnRule()), "strategy must derive from FedAvg to weight"),
        (lambda: BiasedLocalSGD(accounted()), "strategy must be without a privacy accountant"),
    ],
)
def test_errors_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()


class OwnRule(flower.Strategy):
    """A strategy that is no FedAvg."""

    def configure_train(self, *args):
        return []

    configure_evaluate = configure_train

    def aggregate_train(self, *args):
        return None, None

    def aggregate_evaluate(self, *args):
        return None

    def summary(self):
        pass


def accounted():
    inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 4)
    inner.accountant = object()
    return inner


def test_a_strategy_of_its_own_kind_goes_without_weighting():
    strategy = BiasedLocalSGD(OwnRule(), weighted_by_steps=False)
    result, _ = run(strategy, num_rounds=1)
    assert (result.arrays["w"].numpy() == 0).all()
