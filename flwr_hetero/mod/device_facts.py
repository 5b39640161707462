"""What a board says of itself when it is profiled: model, power mode, temperature."""

from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from typing import Any

Facts = dict[str, str | float]


def device_facts() -> Facts:
    """Ask jetson-stats for the facts that change a Jetson's speed.

    Returns
    -------
    dict
        Any of ``model``, ``power-mode`` and ``temperature-c`` (the hottest sensor); nothing
        where jetson-stats is not installed, its service does not run, or it says nothing.

    Notes
    -----
    Tried with a stand-in for jetson-stats 4 only; no Jetson was at hand.

    Examples
    --------
    >>> device_facts()  # not on a Jetson
    {}
    """
    try:
        from jtop import jtop  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return {}
    facts: Facts = {}
    with suppress(Exception), jtop() as board:  # whatever is amiss there, training goes on
        for name, read in _READERS.items():
            with suppress(Exception):
                facts[name] = read(board)
    return facts


def _temperature_c(board: Any) -> float:
    sensors = [float(sensor["temp"]) for sensor in board.temperature.values()]
    return max(celsius for celsius in sensors if isfinite(celsius) and celsius > -100)  # -256: off


_READERS: dict[str, Callable[[Any], str | float]] = {
    "model": lambda board: str(board.board["hardware"]["Model"]),
    "power-mode": lambda board: str(board.nvpmodel),
    "temperature-c": _temperature_c,
}
