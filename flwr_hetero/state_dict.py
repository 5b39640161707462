"""Saved states: flat dictionaries of numbers, text and arrays."""

import json
import pickle
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

StateDict: TypeAlias = dict[str, NDArray[np.generic] | int | float | str | bool]
"""State of a strategy, sampler or part of one."""

_Value = TypeVar("_Value")
STATEFUL = (bool, int, float, str, list, dict, set, np.random.Generator, random.Random)
"""Types of attributes that are compared to find out whether an object has state."""
SET_UP_AGAIN = frozenset({"lacking", "clear", "selected", "_outcomes"})
"""Attributes of Wrapper and Selection that change, and that a resumed run sets up again."""


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


class UnsavedState:
    """Finds attributes that change between two checkpoints and are in none of them."""

    def __init__(self) -> None:
        self._earlier: list[dict[str, bytes]] | None = None
        self._is_over = False

    def warnings(self, strategies: Sequence[Any], base: Any) -> list[str]:
        """Return a warning for each strategy that has changed since the first call.

        Only strategies with the ``state_dict`` of the class ``base`` are looked at. Calls after
        the second one return nothing.
        """
        if self._is_over:
            return []
        now = [pickled(s) if type(s).state_dict is base.state_dict else {} for s in strategies]
        if self._earlier is None:
            self._earlier = now
            return []
        self._is_over = True
        texts = []
        for strategy, before, after in zip(strategies, self._earlier, now, strict=True):
            changed = [name for name, value in after.items() if before.get(name) != value]
            if changed:
                label = strategy.called or type(strategy).__name__
                texts.append(
                    f"{label}: {', '.join(changed)} changed in a round, but {label} has no "
                    "state_dict, so a resumed run begins without the change. Define state_dict and "
                    "load_state_dict. A state_dict that returns {} says that nothing is lost"
                )
        return texts


def pickled(strategy: object) -> dict[str, bytes]:
    """Pickle the attributes that may be state, to compare them later."""
    found: dict[str, bytes] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, STATEFUL) and name not in SET_UP_AGAIN:
            # A container may hold an object that cannot be pickled.
            with suppress(Exception):
                found[name] = pickle.dumps(value)
    return found


def three_numbers(saved: Sequence[Any]) -> tuple[float, float, float]:
    """Return three numbers of a list that JSON has made of a tuple."""
    first, second, third = map(float, saved)
    return first, second, third
