"""Malformed replies thrown at every wrapper: each costs itself, never the run or another reply.

What is corrupted is mostly what the reply holds; each wrapper has a seed of its own.
``FUZZ_EXAMPLES=2000 pytest tests/conformance/test_malformed_replies.py`` tries more than CI does.
"""

import os
import random
from contextlib import suppress
from copy import deepcopy
from itertools import product

import numpy as np
import pytest
from attacker import NESTS, RIVAL_NESTS, attack, leaf, trained
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.serde import message_to_proto

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.biased_local_sgd.shared_data import read_samples, samples_record

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "2"))
NUM_NODES = 6
HOSTILE = (0, 3)
ROUNDS = 3

# --- what a hostile node may write --------------------------------------------------------

NAN = float("nan")
INF = float("inf")
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
    keys.RESHARDING: {keys.SLOTS: INDICES, keys.CONTENT: PAYLOAD, keys.MISSING: INDICES},
    keys.SAMPLES: {keys.INDICES: INDICES, keys.LOSSES: PAYLOAD + LOSSES},
    keys.SAMPLER: {"group.name": REAL, "name": REAL},
}
"""What a node writes in records of ours, with values of the right type."""
METRICS = ["num-examples", "num-steps", "train-loss", "examples-processed", keys.TRAIN_TIME, "new"]
MISSING = object()
RECORDS = [MetricRecord({"loss": 1.0}), MetricRecord(), ConfigRecord({"x": 1}), ArrayRecord()]
ARRAYS = [
    *(Array(np.full(3, value, np.float32)) for value in (0, 1, 3e38, NAN)),
    *(
        Array(d, s, "numpy.ndarray", Array(np.zeros(3)).data)
        for d, s in [("warp", ()), ("", (-1,))]
    ),
    Array("object", (2**40,), "numpy.ndarray", PAYLOAD[2]),
    Array("float32", (3,), "torch.tensor", Array(np.zeros(3)).data),
    *(Array("float32", (3,), "numpy.ndarray", data) for data in PAYLOAD),
]
ANYTHING = [
    *((name, None, one) for name, one in product(["arrays", "metrics", "x", *OWN_KEYS], RECORDS)),
    *(("arrays", name, array) for name, array in product("wv", ARRAYS)),
]


def draw(rng, content):
    """Draw what is done to a reply: mostly to an entry that it holds."""
    here = [name for name in OWN_KEYS if name in content]
    kinds = ["own entry", "metric", "entry", "anything"]
    match rng.choices(kinds, [3 if here else 0, 3, 1, 3])[0]:
        case "anything":
            return rng.choice(ANYTHING)
        case "metric":
            return "metrics", rng.choice(METRICS), rng.choice([*METRIC_VALUES, *[MISSING] * 8])
        case kind:
            name = rng.choice(here if kind == "own entry" else list(OWN_KEYS))
            key = rng.choice(list(OWN_KEYS[name]))
            values = rng.choices([OWN_KEYS[name][key], VALUES, [MISSING]], [3, 1, 1])[0]
            return name, key, rng.choice(values)


def spoil(content, name, key, value):
    """Write or remove an entry of a record, or (``key`` None) a whole record."""
    if key is None:
        content[name] = deepcopy(value)
    elif value is MISSING:
        content[name].pop(key)
    else:
        content.setdefault(name, ConfigRecord())[key] = value


def hostile(rng):
    """Make a node that spoils about half of its replies, or fails."""

    def lie(message, reply):
        message_to_proto(message)  # what cannot be sent would end a real run
        what = rng.choices(["nothing", "error", "empty", "spoilt"], [9, 1, 1, 9])[0]
        if what == "error":
            return Message(Error(2, None), reply_to=message)
        if what == "empty":
            reply.content.clear()
        for _ in range(rng.randint(1, 3) if what == "spoilt" else 0):
            # Flower's records refuse it, or there is nothing left to spoil
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                spoil(reply.content, *draw(rng, reply.content))
        return reply

    return lie


def say_losses(message, context, call_next):
    """Send losses of the samples that the server assigned."""
    reply = call_next(message, context)
    if keys.SAMPLES in message.content:
        indices, _ = read_samples(message.content[keys.SAMPLES])
        reply.content[keys.SAMPLES] = samples_record(indices, np.cos(indices))
    return reply


MORE = {
    "BiasedLocalSGD shared": lambda inner: ours.BiasedLocalSGD(
        inner, fast_steps=4, shared_samples=40, batch_size=2
    ),
    "CDGraB exact": lambda inner: ours.CDGraB(inner, mode="exact"),
}
WRAPPERS = NESTS | RIVAL_NESTS | MORE
AS_THEY_COME = ("FedAsync", "FedAT", "FedBuff", "FedCompass", "TiFL", "merged")
"""Strategies that do not wait for all nodes."""


@pytest.mark.parametrize("name", WRAPPERS)
def test_hostile_node_costs_its_own_reply_only(name):
    rng = random.Random(name)
    for _ in range(EXAMPLES):
        strategy = WRAPPERS[name](leaf())
        lies = dict.fromkeys(HOSTILE, trained(hostile(rng)))
        rounds, models = attack(strategy, lies, app=composition_app([say_losses]))
        assert len(rounds) == ROUNDS
        assert np.isfinite(models).all()
        assert models[-1].any()
        honest = {f"id-{1000 + i}" for i in range(NUM_NODES) if i not in HOSTILE}
        honest |= {strategy.identity(int(node[3:])) for node in honest}  # a name may be stolen
        for record in rounds:
            # a claim above the others' counts as theirs, whoever makes it
            failures = [f for f in record["failures"] if "counts as" not in f["reason"]]
            assert not {failure["node"] for failure in failures} & honest, failures
            assert all(failure["reason"] for failure in failures)
            # without rounds: lost ones, too
            assert len(record["selected"]) >= NUM_NODES or name in AS_THEY_COME
