"""One form for every complaint about an argument."""

from typing import Any

import numpy as np


def invalid(argument: str, value: Any, rule: str, cure: str) -> ValueError:
    """Make the error for a bad argument: its name, its value, the rule and the cure.

    Parameters
    ----------
    argument : str
        Name of the argument as the caller wrote it.
    value : Any
        What was passed.
    rule : str
        What must hold, as the end of a sentence that begins "<argument> must".
    cure : str
        What to do about it, as a sentence without a full stop.

    Returns
    -------
    ValueError
        To be raised by the caller, so that the traceback ends there.

    Examples
    --------
    >>> raise invalid("num_tiers", 0, "be at least 1", "pass the number of groups you want")
    Traceback (most recent call last):
    ...
    ValueError: num_tiers must be at least 1, got 0: pass the number of groups you want.
    """
    return ValueError(f"{argument} must {rule}, got {value!r}: {cure}.")


def check_count(argument: str, value: Any, least: int, cure: str) -> int:
    """Refuse what is no whole number, or one too small.

    Parameters
    ----------
    argument : str
        Name of the argument as the caller wrote it.
    value : Any
        What was passed.
    least : int
        Smallest number that is good.
    cure : str
        What to do about it, as a sentence without a full stop.

    Returns
    -------
    int
        The value.

    Raises
    ------
    ValueError
        If it is of another type (bool too) or below ``least``.

    Examples
    --------
    >>> check_count("seed", np.int64(3), 0, "any such number will do")
    3
    >>> check_count("interval", 2.5, 1, "10 looks every 10 rounds")
    Traceback (most recent call last):
    ...
    ValueError: interval must be a whole number of at least 1, got 2.5: 10 looks every 10 rounds.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise invalid(argument, value, f"be a whole number of at least {least}", cure)
    return int(value)
