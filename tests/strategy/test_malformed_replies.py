"""Malformed replies thrown at every wrapper: each costs itself, never the run or another reply.

``FUZZ_EXAMPLES=2000 pytest tests/strategy/test_malformed_replies.py`` looks harder than CI does.
"""

import logging
import os
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from order_toy import order_app, order_arrays

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy.latency import judge_latency

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
NUM_NODES, HOSTILE, ROUNDS = 5, {0, 3}, 2
PROFILE = {"sync_rounds": 1, "warmup_rounds": 0}

# --- what a hostile node may write --------------------------------------------------------

whole = st.sampled_from([0, 1, -1, 2, 7, 255, 2**20, 2**31, -(2**63), 2**63 - 1, 2**64 - 1])
real = st.sampled_from([0.0, -0.0, 0.5, -1.0, 1e-320, 1e38, 1e308, float("nan"), float("inf")])
payload = st.sampled_from(
    [b"", b"\0", b"\x80\x04N.", b"\xff" * 8, bytes(4), bytes(64), np.float16([9]).tobytes() * 10]
)
scalars = [whole, real, payload, st.booleans(), st.text(max_size=3)]
config_values = st.one_of(*scalars, *(st.lists(each, max_size=3) for each in scalars))
metric_values = st.one_of(
    whole, real, st.lists(whole, min_size=1, max_size=3), st.lists(real, max_size=3)
)
OWN_KEYS = {
    keys.TIMING: [keys.TRAIN_TIME, keys.TRANSFER_TIME, keys.EMULATED, keys.PARTITION_ID],
    keys.ORDER: [
        *(keys.SERVER_ROUND, keys.SKETCH_SIZE, keys.SKETCH_SEED, keys.NUM_UNITS, keys.VERSION),
        *(keys.FIRST_PAIR, keys.DTYPE, keys.VECTORS, keys.SCALE),
    ],
    keys.HERDING: [keys.NUM_UNITS, keys.SKETCH_SIZE, keys.VECTORS, keys.SCALE],
    keys.RESHARDING: [keys.PLAN, keys.SLOTS, keys.CONTENT, keys.MISSING],
    keys.SAMPLES: [keys.INDICES, keys.LOSSES],
    keys.SAMPLER: ["group.name", "name"],
}
METRICS = ["num-examples", "num-steps", "loss", "examples-processed", keys.TRAIN_TIME, "new"]
WHOLE_RECORDS = {
    keys.RESHARDING: {
        keys.PLAN: 1,
        keys.SLOTS: np.arange(2, dtype="<i4").tobytes(),
        keys.CONTENT: bytes(8),
        keys.MISSING: b"",
    },
    keys.SAMPLES: {keys.INDICES: bytes(4), keys.LOSSES: np.float32([1]).tobytes()},
    keys.SAMPLER: {"group.name": 1.0},
}


def _entry(name, key, value):
    def spoil(content):
        if content.config_records.get(name) is None:
            content[name] = ConfigRecord(WHOLE_RECORDS.get(name, {}))
        content[name][key] = value

    return spoil


def _no_entry(name, key):
    return lambda content: content.config_records.get(name, {}).pop(key, None)


def _metric(key, value):
    return lambda content: content["metrics"].update({key: value})


def _record(name, record):
    return lambda content: content.update({name: record})


def _array(name, array):
    return lambda content: content["arrays"].update({name: array})


names = st.sampled_from(sorted(OWN_KEYS)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(OWN_KEYS[name]))
)
records = st.one_of(
    st.dictionaries(st.sampled_from(METRICS), metric_values).map(MetricRecord),
    st.dictionaries(st.text(max_size=3), config_values).map(ConfigRecord),
    st.just(ArrayRecord()),
)
arrays = st.builds(
    lambda dtype, shape, stype, data: Array(dtype, shape, stype, data),
    st.sampled_from(["float32", "object", "warp", ""]),
    st.sampled_from([(), (5,), (2**40,), (-1,)]),
    st.sampled_from(["numpy.ndarray", "torch.tensor"]),
    payload
    | st.sampled_from([np.full(5, v, np.float32) for v in (0, 1, 3e38, np.nan)]).map(
        lambda values: Array(values).data
    ),
)
spoilers = st.one_of(
    st.builds(lambda at, value: _entry(*at, value), names, config_values),
    st.builds(lambda at, value: _entry(*at, value), names, config_values),
    st.builds(lambda at: _no_entry(*at), names),
    st.builds(_metric, st.sampled_from(METRICS), metric_values),
    st.builds(_record, st.sampled_from(["arrays", "metrics", "x", *OWN_KEYS]), records),
    st.builds(_array, st.sampled_from(["w", "v"]), arrays),
    st.sampled_from(["error", "twice", "stale", "empty"]),
)
plans = st.dictionaries(
    st.tuples(st.sampled_from(sorted(HOSTILE)), st.integers(1, ROUNDS)),
    st.lists(spoilers, min_size=1, max_size=3),
    min_size=1,
)


class HostileGrid(LocalGrid):
    """Spoil replies after the grid has stamped them, and send some twice or out of time."""

    def __init__(self, plan, **settings):
        app = order_app([8] * NUM_NODES, passes=0.5)
        super().__init__(app, [DeviceProfile()] * NUM_NODES, **settings)
        self.plan = plan
        self.echoes = []

    def _push(self, message):
        message_id = super()._push(message)
        message_to_proto(message)  # what cannot be sent would end a real run
        return message_id

    def _answer(self, message, node_id):
        arrival_s, reply = super()._answer(message, node_id)
        number = message.content["config"].get(keys.SERVER_ROUND, 0)
        for spoil in self.plan.get((node_id - 1000, number), []):
            if spoil == "error":
                return arrival_s, Message(Error(2, None), reply_to=message)
            if spoil == "empty":
                reply.content.clear()
            elif spoil == "twice":
                self.echoes.append(reply)
            elif spoil == "stale":
                self.echoes.append(Message(reply.content, reply_to=message))
            else:
                # Flower's records refuse it, or there is nothing left to spoil
                with suppress(KeyError, TypeError, ValueError, AttributeError):
                    spoil(reply.content)
        return arrival_s, reply

    def wait_for(self, message_ids, timeout=None, enough=None):
        echoes, self.echoes = self.echoes, []
        return [*super().wait_for(message_ids, timeout, enough), *echoes]


class History(ours.Wrapper):
    def __init__(self, strategy=None):
        super().__init__(strategy)
        self.run_dir = SimpleNamespace(records=[])

    def on_round_end(self, run, record):
        self.run_dir.records.append(record)


def recorded(strategy):
    """Record into a list; checkpoints go to a folder that the test sets."""
    records = []
    keeper = SimpleNamespace(
        records=records,
        append_round=records.append,
        save_model=lambda model: None,
        finish=lambda: "nowhere",
    )
    return ours.Recorded(strategy, run_dir=keeper, checkpoint_every=10**9)


def tifl(inner=None, **more):
    own = {"clients_per_round": NUM_NODES, "num_tiers": 1, "interval": 1, "max_failures": 99}
    return ours.TiFL(inner, **own | PROFILE | more)


def fedavg():
    return FedAvg(fraction_evaluate=0.0)


WRAPPERS = {
    "TiFL": lambda: tifl(),
    "BiasedLocalSGD": lambda: ours.BiasedLocalSGD(fedavg(), fast_steps=4),
    "BiasedLocalSGD shared": lambda: ours.BiasedLocalSGD(
        fedavg(), fast_steps=4, shared_samples=40, batch_size=2
    ),
    "LocalSteps": lambda: ours.LocalSteps(
        FedMedian(fraction_evaluate=0.0), fast_steps=4, budget="deadline"
    ),
    "FedNova": lambda: ours.FedNova(fedavg(), fast_steps=4),
    "CDGraB": lambda: ours.CDGraB(fedavg(), sketch_size=4),
    "CDGraB exact": lambda: ours.CDGraB(fedavg(), mode="exact"),
    "HerdingMeter": lambda: ours.HerdingMeter(fedavg(), sketch_size=4),
    "Resharding": lambda: ours.Resharding(fedavg(), share=0.5, budget_bytes=16),
    "AdaComm": lambda: ours.AdaComm(fedavg(), 4, interval_s=0.0, loss_key="loss"),
    "SamplerFacts": lambda: ours.SamplerFacts(fedavg()),
    "OverSelect": lambda: ours.OverSelect(fedavg(), take=NUM_NODES),
    "Recorded": lambda: recorded(fedavg()),
    "a nest": lambda: recorded(
        ours.OverSelect(
            tifl(ours.BiasedLocalSGD(ours.HerdingMeter(ours.CDGraB(FedAdam(), sketch_size=4)), 4)),
            take=NUM_NODES,
        )
    ),
}


@pytest.fixture
def survive(tmp_path):
    """Run a strategy among hostile nodes, and see that nobody else is harmed."""

    def run(strategy, plan):
        if not isinstance(strategy, ours.Recorded):
            strategy = History(strategy)
        strategy.run_dir.checkpoint_dir = tmp_path
        result = strategy.start(HostileGrid(plan), order_arrays(), ROUNDS, timeout=60.0)
        model = result.arrays["w"].numpy()
        assert np.isfinite(model).all()
        assert model.any()
        honest = {f"id-{1000 + i}" for i in range(NUM_NODES) if i not in HOSTILE}
        honest |= {strategy.identity(int(name[3:])) for name in honest}  # a name may be stolen
        for record in strategy.run_dir.records[1:]:
            failed = {failure["node"] for failure in record["failures"]}
            assert not failed & honest
            assert all(failure["reason"] for failure in record["failures"])
            assert len(record["selected"]) == NUM_NODES
        return strategy.run_dir.records

    logging.disable()  # a line per node, thousands of times
    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_a_hostile_node_costs_its_own_reply_only(name, survive):
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a nest is slow to run: no time for the smallest example
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans)
    def run(plan):
        survive(WRAPPERS[name](), plan)

    run()


def _reply_of_another_length(name):
    return [_entry(name, keys.SKETCH_SIZE, 1), _entry(name, keys.VECTORS, bytes(8))]


FOUND = {
    "the first reply has no examples": ("Recorded", [_metric("num-examples", 0)], 0),
    "more examples than can be added up": ("Recorded", [_metric("num-examples", 1e308)], 1),
    "a list where others have a number": ("Recorded", [_metric("loss", [1.0, 2.0])], 1),
    "an array that numpy cannot read": (
        "LocalSteps",
        [_array("w", Array("float32", (5,), "torch.tensor", Array(np.zeros(5)).data))],
        1,
    ),
    "the first to say how long vectors are": (
        "HerdingMeter",
        _reply_of_another_length(keys.HERDING),
        1,
    ),
    "the first to say how long pairs are": ("CDGraB", _reply_of_another_length(keys.ORDER), 1),
}


@pytest.mark.parametrize("what", sorted(FOUND))
def test_what_once_harmed_others_does_so_no_more(what, survive):
    name, spoil, num_failures = FOUND[what]
    records = survive(WRAPPERS[name](), {(0, 1): spoil})
    assert len(records[1]["failures"]) == num_failures


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(
    metrics=st.dictionaries(st.sampled_from(METRICS), metric_values),
    timing=st.dictionaries(st.sampled_from(OWN_KEYS[keys.TIMING]), config_values) | st.none(),
    simulated=st.booleans(),
    round_trip_s=st.none() | st.floats(0, 1e4),
)
def test_no_claim_of_time_is_believed_above_what_the_server_saw(
    metrics, timing, simulated, round_trip_s
):
    message = Message(RecordDict({"metrics": MetricRecord(metrics)}), 1000, "train")
    reply = Message(message.content, reply_to=message)
    if timing is not None:
        reply.content[keys.TIMING] = ConfigRecord(timing)
    latency, _ = judge_latency(reply, round_trip_s, simulated=simulated)
    if latency is not None:
        assert np.isfinite(latency.seconds)
        assert latency.seconds >= 0
        if round_trip_s is not None and not simulated:
            assert latency.seconds <= round_trip_s
