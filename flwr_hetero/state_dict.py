"""Saved states: flat dictionaries of numbers, text and arrays."""

import json
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

StateDict: TypeAlias = dict[str, NDArray[np.generic] | int | float | str | bool]
"""State of a strategy, sampler or part of one."""

_Value = TypeVar("_Value")


def rng_to_str(rng: np.random.Generator) -> str:
    """Write the state of a generator as JSON."""
    return json.dumps(rng.bit_generator.state)


def rng_from_str(text: str) -> np.random.Generator:
    """Restore a generator saved by ``rng_to_str``."""
    bits = np.random.PCG64()
    try:
        bits.state = json.loads(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not the state of a PCG64 generator: {error}") from error
    return np.random.Generator(bits)


def entries_below(prefix: str, entries: Mapping[str, _Value]) -> dict[str, _Value]:
    """Pick the entries of one part of a state, without its prefix."""
    return {k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)}


def check_state(state: Mapping[str, object], schema: Mapping[str, object], owner: str) -> None:
    """Refuse a saved state whose entries do not fit: from other settings, or damaged.

    ``schema`` gives per entry a type, or the shape of an array and the kinds of its dtype:
    ``{"steps": int, "importance": ((100,), "f")}``; -1 in a shape is any length.
    """
    for name, wanted in schema.items():
        value = state.get(name)
        if isinstance(wanted, tuple):
            shape, kinds = wanted
            fits = (
                isinstance(value, np.ndarray)
                and value.dtype.kind in kinds
                and len(value.shape) == len(shape)
                and all(w in (-1, n) for n, w in zip(value.shape, shape, strict=True))
            )
            rule = f"an array of shape {shape}"
        else:
            kind = (int, np.integer) if wanted is int else wanted
            # A bool is an int to Python.
            fits = isinstance(value, kind) and (wanted is bool or not isinstance(value, bool))  # type: ignore[arg-type]
            rule = getattr(wanted, "__name__", str(wanted))
        if not fits:
            shown = value if not isinstance(value, np.ndarray) else (value.shape, value.dtype.str)
            raise ValueError(f"state of {owner} must hold {name} as {rule}, got {shown!r}.")
