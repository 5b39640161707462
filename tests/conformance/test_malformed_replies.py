"""Malformed replies thrown at every wrapper: each costs itself, never the run or another reply.

What is corrupted is mostly what the wrapper reads; each wrapper has a seed of its own.
``FUZZ_EXAMPLES=2000 pytest tests/conformance/test_malformed_replies.py`` tries more than CI does.
"""

import logging
import os
import zlib
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest
from composition_toy import swap
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from order_toy import order_app, order_arrays
from recording import History

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.reply_checks import judge_latency

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
NUM_NODES, HOSTILE, ROUNDS = 5, {0, 3}, 3
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
lists = st.lists(st.integers(-1, 40), max_size=3).map(lambda v: np.array(v, "<i4").tobytes())
OWN_KEYS = {
    keys.TIMING: {
        keys.TRAIN_TIME: real,
        keys.TRANSFER_TIME: real,
        keys.EMULATED: st.booleans(),
        keys.PARTITION_ID: st.integers(-1, NUM_NODES) | whole,
    },
    keys.ORDER: {
        **dict.fromkeys([keys.SERVER_ROUND, keys.VERSION], st.integers(-1, 4) | whole),
        **dict.fromkeys([keys.FIRST_PAIR, keys.NUM_UNITS], st.integers(-1, 5) | whole),
        **dict.fromkeys([keys.SKETCH_SIZE, keys.SKETCH_SEED], st.integers(0, 5) | whole),
        keys.DTYPE: st.sampled_from(["float16", "float32", "float64", "object", "i4", ""]),
        keys.VECTORS: payload,
        keys.SCALE: real,
    },
    keys.HERDING: {
        keys.NUM_UNITS: st.integers(-1, 5) | whole,
        keys.SKETCH_SIZE: st.integers(0, 5) | whole,
        keys.VECTORS: payload,
        keys.SCALE: real,
    },
    keys.RESHARDING: {
        keys.SLOTS: lists,
        keys.CONTENT: payload,
        keys.MISSING: lists,
    },
    keys.SAMPLES: {
        keys.INDICES: lists,
        keys.LOSSES: payload
        | st.lists(st.sampled_from([0.0, -1.0, 3e38, np.nan, np.inf]), max_size=3).map(
            lambda values: np.array(values, "<f4").tobytes()
        ),
    },
    keys.SAMPLER: {"group.name": real, "name": real},
}
"""What a node writes in records of ours, with values of the right type."""
METRICS = ["num-examples", "num-steps", "loss", "examples-processed", keys.TRAIN_TIME, "new"]


def _entry(name, key, value):
    def spoil(content):
        if content.config_records.get(name) is None:
            content[name] = ConfigRecord()
        content[name][key] = value

    return spoil


def _no_entry(name, key):
    return lambda content: content.config_records.get(name, {}).pop(key, None)


def _metric(key, value):
    return lambda content: content["metrics"].update({key: value})


def _no_metric(key):
    return lambda content: content["metrics"].pop(key, None)


def _record(name, record):
    return lambda content: content.update({name: record})


def _array(name, array):
    return lambda content: content["arrays"].update({name: array})


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
anything = st.sampled_from(["error", "twice", "stale", "empty"]) | st.one_of(
    st.builds(_record, st.sampled_from(["arrays", "metrics", "x", *OWN_KEYS]), records),
    st.builds(_array, st.sampled_from(["w", "v"]), arrays),
)


def shares(*parts):
    """Draw from (share, strategy): ``one_of`` counts what a strategy is made of, and it once."""
    # a new tuple each time, for a strategy that occurs twice would count once
    return st.one_of(
        [st.tuples(part).map(itemgetter(0)) for share, part in parts for _ in range(share)]
    )


def entries(names):
    """Draw an entry in one of the records ``names``: of the right type more often than not."""
    at = st.sampled_from([(name, key) for name in names for key in OWN_KEYS[name]])
    return at.flatmap(
        lambda at: shares(
            (3, st.builds(partial(_entry, *at), OWN_KEYS[at[0]][at[1]])),
            (1, st.builds(partial(_entry, *at), config_values)),
            (1, st.just(_no_entry(*at))),
        )
    )


def metrics(names):
    """Draw a metric."""
    name = st.sampled_from(names)
    return shares((3, st.builds(_metric, name, metric_values)), (1, st.builds(_no_metric, name)))


def plans(reads):
    """Draw what hostile nodes do in which round: spoil mostly what a wrapper reads."""
    records = [name for name in reads if name in OWN_KEYS]
    figures = ["num-examples", *(name for name in reads if name in METRICS)]
    spoilers = shares(
        *([(2 if len(figures) > 1 else 4, entries(records))] if records else ()),
        (2, metrics(figures)),
        (1, entries(list(OWN_KEYS))),
        (1, metrics(METRICS)),
        (2, anything),
    )
    return st.dictionaries(
        st.tuples(st.sampled_from(sorted(HOSTILE)), st.integers(1, ROUNDS)),
        st.lists(spoilers, min_size=1, max_size=3),
        min_size=1,
    )


def say_all(message, context, call_next):
    """Send all that a wrapper may ask for: statistics, losses of samples, samples to swap."""
    reply = call_next(message, context)
    if message.metadata.message_type == "train":
        reply.content[keys.SAMPLER] = ConfigRecord({"name": 0.5, "group.name": 1.0})
        if keys.SAMPLES in message.content:
            indices, _ = read_samples(message.content[keys.SAMPLES])
            reply.content[keys.SAMPLES] = samples_record(indices, np.cos(indices))
        swap(message, context, reply)
    return reply


class HostileGrid(LocalGrid):
    """Spoil replies after the grid has stamped them, and send some twice or out of time."""

    def __init__(self, plan, **settings):
        app = order_app([8] * NUM_NODES, passes=0.5, mods=[say_all])
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


STEPS = ["num-steps", "examples-processed"]
READS = {
    "TiFL": [keys.TIMING],
    "BiasedLocalSGD": [keys.TIMING, *STEPS],
    "BiasedLocalSGD shared": [keys.SAMPLES, *STEPS],
    "LocalSteps": [keys.TIMING, *STEPS],
    "FedNova": [keys.TIMING, *STEPS],
    "CDGraB": [keys.ORDER],
    "CDGraB exact": [keys.ORDER],
    "HerdingMeter": [keys.HERDING],
    "Resharding": [keys.RESHARDING],
    "AdaComm": ["loss"],
    "SamplerFacts": [keys.SAMPLER],
    "OverSelect": [keys.TIMING],
    "RandomSelection": [keys.TIMING],
    "Recorded": ["loss"],
    "composition": [keys.TIMING, keys.ORDER, keys.HERDING, *STEPS],
}
"""Records and metrics by wrapper, beside the arrays and the number of examples."""
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
    "RandomSelection": lambda: ours.RandomSelection(fedavg(), NUM_NODES),
    "Recorded": lambda: recorded(fedavg()),
    "composition": lambda: recorded(
        ours.OverSelect(
            tifl(ours.BiasedLocalSGD(ours.HerdingMeter(ours.CDGraB(FedAdam(), sketch_size=4)), 4)),
            take=NUM_NODES,
        )
    ),
}


@pytest.fixture
def survive(tmp_path):
    """Run a strategy among hostile nodes, and check that no other node is harmed."""

    def run(strategy, plan):
        if isinstance(strategy, ours.Recorded):
            strategy.run_dir.checkpoint_dir, rounds = tmp_path, strategy.run_dir.records
        else:
            strategy = History(strategy)
            rounds = strategy.records
        result = strategy.start(HostileGrid(plan), order_arrays(), ROUNDS, timeout=60.0)
        model = result.arrays["w"].numpy()
        assert np.isfinite(model).all()
        assert model.any()
        honest = {f"id-{1000 + i}" for i in range(NUM_NODES) if i not in HOSTILE}
        honest |= {strategy.identity(int(name[3:])) for name in honest}  # a name may be stolen
        for record in rounds[1:]:
            failed = {failure["node"] for failure in record["failures"]}
            assert not failed & honest, record["failures"]
            assert all(failure["reason"] for failure in record["failures"])
            assert len(record["selected"]) == NUM_NODES
        return rounds

    logging.disable()  # a line per node, thousands of times
    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_hostile_node_costs_its_own_reply_only(name, survive):
    @seed(zlib.crc32(name.encode()))  # else all would get the same plans
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # slow to run: no time for the smallest example
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=plans(READS[name]))
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
    "a value whose square is infinite": (
        "composition",
        [_array("w", Array(np.full(5, 3e38, np.float32)))],
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
def test_former_faults_cost_one_reply_only(what, survive):
    name, spoil, num_failures = FOUND[what]
    records = survive(WRAPPERS[name](), {(0, 1): spoil})
    assert len(records[1]["failures"]) == num_failures


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(
    metrics=st.dictionaries(st.sampled_from(METRICS), metric_values),
    timing=st.dictionaries(st.sampled_from(sorted(OWN_KEYS[keys.TIMING])), config_values)
    | st.none(),
    simulated=st.booleans(),
    round_trip_s=st.none() | st.floats(0, 1e4),
)
def test_no_claim_above_the_round_trip_is_believed(metrics, timing, simulated, round_trip_s):
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
