"""States within states: flat dictionaries whose keys begin with the name of a part."""

from collections.abc import Mapping
from typing import TypeVar

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
