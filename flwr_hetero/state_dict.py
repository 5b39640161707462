"""Saving and restoring a NumPy random generator as text."""

import json
from collections.abc import Mapping
from typing import TypeVar

import numpy as np


def rng_to_str(rng: np.random.Generator) -> str:
    """Write the state of a generator as JSON.

    Parameters
    ----------
    rng : np.random.Generator
        Any generator whose bit generator is NumPy's own.

    Returns
    -------
    str
        JSON that :func:`rng_from_str` turns back into an equal generator.

    Examples
    --------
    >>> rng = np.random.default_rng(7)
    >>> twin = rng_from_str(rng_to_str(rng))
    >>> rng.random() == twin.random()
    True
    """
    return json.dumps(rng.bit_generator.state)


def rng_from_str(text: str) -> np.random.Generator:
    """Restore a generator saved by :func:`rng_to_str`.

    Parameters
    ----------
    text : str
        JSON of a PCG64 state.

    Returns
    -------
    np.random.Generator
        A generator that continues where the saved one stopped.

    Raises
    ------
    ValueError
        If the text is not the state of a PCG64 generator.
    """
    bits = np.random.PCG64()
    try:
        bits.state = json.loads(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not the state of a PCG64 generator: {error}") from error
    return np.random.Generator(bits)


_Value = TypeVar("_Value")


def entries_below(prefix: str, entries: Mapping[str, _Value]) -> dict[str, _Value]:
    """Pick the entries of one part, without its name.

    Parameters
    ----------
    prefix : str
        How their keys begin, the separator with it.
    entries : mapping of str to any
        A flat state.

    Returns
    -------
    dict
        The part's own state.

    Examples
    --------
    >>> entries_below("walk.", {"walk.epoch": 3, "walk.position": 0, "seed": 7})
    {'epoch': 3, 'position': 0}
    """
    return {k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)}
