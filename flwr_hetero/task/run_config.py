"""Keys of the run-config: their spelling, their types, and errors that name them as typed."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from flwr_hetero.core.errors import invalid

CURE = "correct it in --run-config or in the app's pyproject.toml"
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def key_of(name: str) -> str:
    """Return the run-config's spelling of a setting.

    Parameters
    ----------
    name : str
        In Python.

    Returns
    -------
    str
        With dashes.
    """
    return name.replace("_", "-")


def unknown_key(key: str, known: list[str]) -> ValueError:
    """Make the error for a key that no setting has.

    Parameters
    ----------
    key : str
        As typed.
    known : list of str
        Keys that there are.

    Returns
    -------
    ValueError
        With the most similar key, if one is.
    """
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? Known are " if close else "known are "
    return invalid("run-config", key, "hold known keys only", hint + ", ".join(known))


def typed(key: str, value: Any, kind: type) -> Any:
    """Check a value's type; whole numbers pass for numbers, nothing else is converted.

    Parameters
    ----------
    key : str
        As typed.
    value : Any
        From the run-config.
    kind : type
        What it must be.

    Returns
    -------
    Any
        The value.

    Raises
    ------
    ValueError
        If it is of another type.

    Examples
    --------
    >>> typed("alpha", 1, float)
    1.0
    """
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise invalid(key, value, f"be {_KINDS[kind]}", CURE)
    return value


@contextmanager
def keys_as_typed(names: Iterable[str]) -> Iterator[None]:
    """Let errors name settings as the user typed them, with dashes.

    Parameters
    ----------
    names : iterable of str
        Settings, as arguments in Python are called.

    Examples
    --------
    >>> with keys_as_typed(["num_tiers"]):
    ...     raise ValueError("num_tiers must be at least 1, got 0: correct it.")
    Traceback (most recent call last):
    ...
    ValueError: num-tiers must be at least 1, got 0: correct it.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        for name in names:
            text = re.sub(rf"\b{name}\b", key_of(name), text)
        raise ValueError(text) from error
