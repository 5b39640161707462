"""Malformed replies thrown at every wrapper: each costs itself, never the run or another reply.

What is corrupted is mostly what the wrapper reads; each wrapper has a seed of its own.
``FUZZ_EXAMPLES=2000 pytest tests/conformance/test_malformed_replies.py`` tries more than CI does.
"""

import logging
import os
import random
from contextlib import suppress
from copy import deepcopy
from itertools import product

import numpy as np
import pytest
from composition_toy import swap
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.serde import message_to_proto
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from order_toy import order_app, order_arrays
from recording import Folder, History

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero_studies import rivals
from flwr_hetero_studies.papers.cd_grab.herding import HERDING, HerdingMeter

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
NUM_NODES, HOSTILE, ROUNDS = 5, {0, 3}, 3
PROFILE = {"profiling": "phase", "sync_rounds": 1, "warmup_rounds": 0}

# --- what a hostile node may write --------------------------------------------------------

NAN, INF = float("nan"), float("inf")
WHOLE = [0, 1, -1, 2, 7, 255, 2**20, 2**31, -(2**63), 2**63 - 1, 2**64 - 1]
SMALL = [-1, 0, 1, 2, 3, 4, 5, *WHOLE]
REAL = [0.0, -0.0, 0.5, -1.0, 1e-320, 1e38, 1e308, NAN, INF]
PAYLOAD = [b"", b"\0", b"\x80\x04N.", b"\xff" * 8, bytes(4), bytes(64), b"\x80H" * 10]
INDICES = [np.array(v, "<i4").tobytes() for v in ([], [-1], [0], [1, 1], [0, 1, 2], [40], [3, 39])]
LOSSES = [np.array(v, "<f4").tobytes() for v in ([], [0], [-1, 3e38], [NAN, INF, 0], [INF])]
METRIC_VALUES = [*WHOLE, *REAL, [], [1, 2], [0.5, NAN, INF]]
VALUES = [*METRIC_VALUES, *PAYLOAD, True, "", "x", [True], ["x"], [b"", b"x"]]
SIZES = dict.fromkeys([keys.NUM_UNITS, keys.SKETCH_SIZE], SMALL)
VECTORS = {**SIZES, keys.VECTORS: PAYLOAD, keys.SCALE: REAL}
OWN_KEYS = {
    keys.TIMING: {
        **dict.fromkeys([keys.TRAIN_TIME, keys.TRANSFER_TIME], REAL),
        keys.EMULATED: [True, False],
        keys.PARTITION_ID: SMALL,
    },
    keys.ORDER: {
        **dict.fromkeys([keys.SERVER_ROUND, keys.VERSION], SMALL),
        **dict.fromkeys([keys.FIRST_PAIR, keys.SKETCH_SEED], SMALL),
        **VECTORS,
    },
    HERDING: VECTORS,
    keys.RESHARDING: {keys.SLOTS: INDICES, keys.CONTENT: PAYLOAD, keys.MISSING: INDICES},
    keys.SAMPLES: {keys.INDICES: INDICES, keys.LOSSES: PAYLOAD + LOSSES},
    keys.SAMPLER: {"group.name": REAL, "name": REAL},
}
"""What a node writes in records of ours, with values of the right type."""
METRICS = ["num-examples", "num-steps", "loss", "examples-processed", keys.TRAIN_TIME, "new"]
MISSING = object()
RECORDS = [MetricRecord({"loss": 1.0}), MetricRecord(), ConfigRecord({"x": 1}), ArrayRecord()]
ARRAYS = [
    *(Array(np.full(5, value, np.float32)) for value in (0, 1, 3e38, NAN)),
    *(
        Array(d, s, "numpy.ndarray", Array(np.zeros(5)).data)
        for d, s in [("warp", ()), ("", (-1,))]
    ),
    Array("object", (2**40,), "numpy.ndarray", PAYLOAD[2]),
    Array("float32", (5,), "torch.tensor", Array(np.zeros(5)).data),
    *(Array("float32", (5,), "numpy.ndarray", data) for data in PAYLOAD),
]
ANYTHING = [
    *["error", "twice", "stale", "empty"] * 6,
    *((name, None, one) for name, one in product(["arrays", "metrics", "x", *OWN_KEYS], RECORDS)),
    *(("arrays", name, array) for name, array in product("wv", ARRAYS)),
]


def spoil(content, name, key, value):
    """Write or remove an entry of a record, or (``key`` None) a whole record."""
    if key is None:
        content[name] = deepcopy(value)
    elif value is MISSING:
        content[name].pop(key)
    else:
        content.setdefault(name, ConfigRecord())[key] = value


def draw(rng, reads):
    """Draw what is done to a reply: mostly to an entry that a wrapper reads."""
    records = [name for name in reads if name in OWN_KEYS]
    metrics = ["num-examples", *(name for name in reads if name in METRICS)]
    kinds = ["own entry", "own metric", "entry", "metric", "anything"]
    match rng.choices(kinds, [3 if records else 0, 2, 1, 1, 2])[0]:
        case "anything":
            return rng.choice(ANYTHING)
        case "own metric" | "metric" as kind:
            name = rng.choice(metrics if kind == "own metric" else METRICS)
            return "metrics", name, rng.choice([*METRIC_VALUES, *[MISSING] * 8])
        case kind:
            name = rng.choice(records if kind == "own entry" else list(OWN_KEYS))
            key = rng.choice(list(OWN_KEYS[name]))
            values = rng.choices([OWN_KEYS[name][key], VALUES, [MISSING]], [3, 1, 1])[0]
            return name, key, rng.choice(values)


def plan(rng, reads):
    """Draw what hostile nodes do in which round."""
    slots = list(product(sorted(HOSTILE), range(1, ROUNDS + 1)))
    chosen = rng.sample(slots, rng.randint(1, len(slots)))
    return {slot: [draw(rng, reads) for _ in range(rng.randint(1, 3))] for slot in chosen}


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

    def _answer(self, message):
        message_to_proto(message)  # what cannot be sent would end a real run
        return self.spoilt(message, *super()._answer(message))

    def spoilt(self, message, arrival_s, reply):
        number = message.content["config"].get(keys.SERVER_ROUND, 0)
        number *= message.metadata.message_type != keys.PROFILE_MESSAGE
        for what in self.plan.get((message.metadata.dst_node_id - 1000, number), []):
            if what == "error":
                return arrival_s, Message(Error(2, None), reply_to=message)
            if what == "empty":
                reply.content.clear()
            elif what == "twice":
                self.echoes.append(reply)
            elif what == "stale":
                self.echoes.append(Message(reply.content, reply_to=message))
            else:
                # Flower's records refuse it, or there is nothing left to spoil
                with suppress(KeyError, TypeError, ValueError, AttributeError):
                    spoil(reply.content, *what)
        return arrival_s, reply

    def wait_for(self, message_ids, timeout=None, enough=None):
        echoes, self.echoes = self.echoes, []
        return [*super().wait_for(message_ids, timeout, enough), *echoes]

    def wait_for_next(self, message_ids, until_s=INF):
        echoes, self.echoes = self.echoes, []
        return [*super().wait_for_next(message_ids, until_s), *echoes]


def recorded(strategy):
    return ours.Recorded(strategy, run_dir=Folder(), checkpoint_every=10**9)


def tifl(inner=None):
    return ours.TiFL(inner, NUM_NODES, 1, interval=1, **PROFILE)


def fedavg():
    return FedAvg(fraction_evaluate=0.0)


TIMES, STEPS = [keys.TIMING], ["num-steps", "examples-processed"]
WRAPPERS = {
    "TiFL": (tifl, TIMES),
    "BiasedLocalSGD": (lambda: ours.BiasedLocalSGD(fedavg(), fast_steps=4), TIMES + STEPS),
    "BiasedLocalSGD shared": (
        lambda: ours.BiasedLocalSGD(fedavg(), fast_steps=4, shared_samples=40, batch_size=2),
        [keys.SAMPLES, *STEPS],
    ),
    "LocalSteps": (
        lambda: ours.LocalSteps(FedMedian(fraction_evaluate=0.0), fast_steps=4, budget="deadline"),
        TIMES + STEPS,
    ),
    "FedNova": (lambda: ours.FedNova(fedavg(), fast_steps=4), TIMES + STEPS),
    "CDGraB": (lambda: ours.CDGraB(fedavg(), sketch_size=4), [keys.ORDER]),
    "CDGraB exact": (lambda: ours.CDGraB(fedavg(), mode="exact"), [keys.ORDER]),
    "HerdingMeter": (lambda: HerdingMeter(fedavg(), sketch_size=4), [HERDING]),
    "Resharding": (
        lambda: ours.Resharding(fedavg(), share=0.5, budget_bytes=16),
        [keys.RESHARDING],
    ),
    "AdaComm": (lambda: rivals.AdaComm(fedavg(), 4, interval_s=0.0), ["loss"]),
    "SamplerMetrics": (lambda: ours.SamplerMetrics(fedavg()), [keys.SAMPLER]),
    "OverSelect": (lambda: ours.OverSelect(fedavg(), take=NUM_NODES), TIMES),
    "RandomSelection": (lambda: ours.RandomSelection(fedavg(), NUM_NODES), TIMES),
    "Oort": (lambda: rivals.Oort(fedavg(), NUM_NODES, profiling=True), ["loss", *TIMES]),
    "PowerOfChoice": (lambda: rivals.PowerOfChoice(fedavg(), NUM_NODES), ["loss"]),
    "DeadlineSelection": (lambda: rivals.DeadlineSelection(fedavg(), deadline_s=100.0), TIMES),
    "FedBuff": (lambda: ours.FedBuff(fedavg(), buffer_size=NUM_NODES), TIMES),
    "FedBuff slices": (
        lambda: ours.FedBuff(
            ours.LocalSteps(fedavg(), fast_steps=4, budget="slice"), buffer_size=NUM_NODES
        ),
        TIMES + STEPS,
    ),
    "FedAsync": (lambda: rivals.FedAsync(fedavg()), TIMES),
    "FedAT": (lambda: rivals.FedAT(fedavg(), NUM_NODES, 1), TIMES),
    "FedCompass": (lambda: rivals.FedCompass(fedavg(), 2, 4), TIMES + STEPS),
    "Recorded": (lambda: recorded(fedavg()), ["loss"]),
    "composition": (
        lambda: recorded(
            ours.OverSelect(
                tifl(ours.BiasedLocalSGD(HerdingMeter(ours.CDGraB(FedAdam(), sketch_size=4)), 4)),
                take=NUM_NODES,
            )
        ),
        [keys.TIMING, keys.ORDER, HERDING, *STEPS],
    ),
}
"""How a wrapper is made; records and metrics that it reads beside arrays and examples."""


AS_THEY_COME = (rivals.FedAsync, rivals.FedAT, rivals.FedCompass)
"""Strategies that do not wait for all nodes."""


@pytest.fixture
def survive(tmp_path):
    """Run a strategy among hostile nodes, and check that no other node is harmed."""

    def run(strategy, plan):
        if isinstance(strategy, ours.Recorded):
            strategy.run_dir.checkpoint_dir, rounds = tmp_path, strategy.run_dir.records
        else:
            strategy = History(strategy)
            rounds = strategy.records
        as_they_come = isinstance(strategy.inner, AS_THEY_COME)
        random.seed(0)  # Flower samples with it
        result = strategy.start(HostileGrid(plan), order_arrays(), ROUNDS, timeout=60.0)
        model = result.arrays["w"].numpy()
        assert np.isfinite(model).all()
        assert model.any()
        honest = {f"id-{1000 + i}" for i in range(NUM_NODES) if i not in HOSTILE}
        honest |= {strategy.identity(int(name[3:])) for name in honest}  # a name may be stolen
        for record in rounds[1:]:
            failures = record["failures"]
            assert not {failure["node"] for failure in failures} & honest, failures
            assert all(failure["reason"] for failure in failures)
            assert len(record["selected"]) >= NUM_NODES or as_they_come  # FedBuff: lost ones, too
        return rounds

    logging.disable()  # a line per node, thousands of times
    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_hostile_node_costs_its_own_reply_only(name, survive):
    rng, (make, reads) = random.Random(name), WRAPPERS[name]
    for _ in range(EXAMPLES):
        survive(make(), plan(rng, reads))


def other_length(record):
    return [(record, keys.SKETCH_SIZE, 1), (record, keys.VECTORS, bytes(8))]


FOUND = {
    "the first reply has no examples": ("Recorded", [("metrics", "num-examples", 0)], 0),
    "too many examples to add up": ("Recorded", [("metrics", "num-examples", 1e308)], 1),
    "a list where others have a number": ("Recorded", [("metrics", "loss", [1.0, 2.0])], 1),
    "an array that numpy cannot read": ("LocalSteps", [("arrays", "w", ARRAYS[7])], 1),
    "a value whose square is infinite": ("composition", [("arrays", "w", ARRAYS[2])], 1),
    "the first to say how long vectors are": ("HerdingMeter", other_length(HERDING), 1),
    "the first to say how long pairs are": ("CDGraB", other_length(keys.ORDER), 1),
}


@pytest.mark.parametrize("what", sorted(FOUND))
def test_former_faults_cost_one_reply_only(what, survive):
    name, entries, num_failures = FOUND[what]
    records = survive(WRAPPERS[name][0](), {(0, 1): entries})
    assert len(records[1]["failures"]) == num_failures
