"""Saving and restoring a NumPy random generator as text."""

import json
from collections.abc import Mapping
from typing import TypeVar

import numpy as np


def rng_to_str(rng: np.random.Generator) -> str:
    """Write the state of a generator as JSON."""
    return json.dumps(rng.bit_generator.state)


def rng_from_str(text: str) -> np.random.Generator:
    """Restore a generator saved by :func:`rng_to_str`."""
    bits = np.random.PCG64()
    try:
        bits.state = json.loads(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not the state of a PCG64 generator: {error}") from error
    return np.random.Generator(bits)


_Value = TypeVar("_Value")


def entries_below(prefix: str, entries: Mapping[str, _Value]) -> dict[str, _Value]:
    """Pick the entries of one part, without its name."""
    return {k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)}
