"""A model of which nodes return a part: what they leave out must keep its value to the bit."""

import attacker
import numpy as np
from composition_toy import composition_app
from flwr.app import Array, ArrayRecord

SIZE = 300  # enough to be packed


def frozen_arrays():
    """Arrays of several types that no node returns, with values that a mean would round."""
    rng = np.random.default_rng(1)
    return {
        "a.base": Array(rng.normal(size=SIZE).astype(np.float32)),
        "b.half": Array(rng.normal(size=SIZE).astype(np.float16)),
        "x.count": Array(np.array(7)),
        "y.running_var": Array(rng.normal(size=(2, 3))),
        "z.mask": Array(np.array([True, False])),
    }


def whole_model(kinds="fib"):
    """A model of these kinds of types; nodes of ``composition_app`` return ``w`` alone of it."""
    arrays = frozen_arrays() | {"w": Array(np.zeros(SIZE, np.float32))}
    names = sorted(name for name in arrays if np.dtype(arrays[name].dtype).kind in kinds)
    return ArrayRecord({name: arrays[name] for name in names})


def changed(arrays):
    """Name the arrays that have not kept their value."""
    return [n for n, a in frozen_arrays().items() if n in arrays and arrays[n].data != a.data]


def seen_by(found):
    """Make a mod that notes what nodes are sent."""

    def mod(message, context, call_next):
        if "arrays" in message.content:
            found.append(message.content["arrays"])
        return call_next(message, context)

    return mod


def run(strategy, *, arrays=None, lies=None, mods=(), rounds=4, logs=False):
    """Run among liars; return the records after the first, and all models with the result."""
    records, models, result = attacker.run(
        strategy,
        lies or {},
        app=composition_app(mods),
        arrays=arrays or whole_model(),
        rounds=rounds,
        logs=logs,
    )
    return records, [*models, result.arrays]
