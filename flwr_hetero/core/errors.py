"""One form for every complaint about an argument."""

from typing import Any


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
