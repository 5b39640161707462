"""One form for every error about an argument, and hints for errors that users meet on nodes."""

import re
from collections.abc import Collection
from difflib import get_close_matches
from math import isfinite
from typing import Any

import numpy as np

from flwr_hetero import __version__

MAX_COUNT = 2**64 - 1
"""Largest whole number of a setting: a seed may be the id of a node, which has 64 bits."""
MAX_TEXT = 300
"""Characters of a value in an error."""


def invalid(argument: str, value: Any, rule: str, hint: str = "") -> ValueError:
    """Make the error for a bad argument: the rule ends a sentence that begins "<argument> must".

    >>> raise invalid("num_tiers", 9, "be at most the number of nodes, 4", "start more nodes")
    Traceback (most recent call last):
    ...
    ValueError: num_tiers must be at most the number of nodes, 4, got 9: start more nodes.
    """
    return ValueError(
        f"{argument} must {rule}, got {shown(value)}" + (f": {hint}." if hint else ".")
    )


def shown(value: Any) -> str:
    """Write a bad value for an error, cut to 300 characters."""
    try:
        text = repr(value)
    # Python writes no number of more than 4,300 digits
    except ValueError:
        text = f"{type(value).__name__} too long to write"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def check_key(argument: str, key: str, known: Collection[str]) -> None:
    """Refuse a key that is not known, and name the nearest that is."""
    if key not in known:
        close = get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]!r}? Known are " if close else "known are "
        hint += ", ".join(sorted(known))
        raise invalid(argument, key, "hold known keys only", hint)


def check_count(argument: str, value: Any, least: int = 0, hint: str = "") -> int:
    """Return a whole number of at least ``least`` that fits into 64 bits; refuse all else."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least:
        raise invalid(argument, value, f"be a whole number of at least {least}", hint)
    if value > MAX_COUNT:
        raise invalid(argument, value, f"be a whole number of at most {MAX_COUNT}", hint)
    return int(value)


def check_number(argument: str, value: Any, bounds: str, hint: str = "") -> float:
    """Return a finite number within bounds, written as an interval; refuse all else.

    >>> check_number("t_max", 0, "(0, inf)")
    Traceback (most recent call last):
    ...
    ValueError: t_max must be a number in (0, inf), got 0.
    """
    low, high = (float(bound) for bound in bounds[1:-1].split(","))
    if not (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and _is_finite(value)
        and (low <= value if bounds[0] == "[" else low < value)
        and (value <= high if bounds[-1] == "]" else value < high)
    ):
        raise invalid(argument, value, f"be a number in {bounds}", hint)
    return float(value)


def _is_finite(value: Any) -> bool:
    try:
        return isfinite(value)
    # An int beyond all floats.
    except OverflowError:
        return False


def check_choice(argument: str, value: Any, choices: Collection[Any], hint: str = "") -> Any:
    """Return a value that is one of the choices; refuse all else."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise invalid(argument, value, f"be one of {', '.join(map(str, choices))}", hint)
    return value


def last_line(text: str | None) -> str:
    """Return the last line of a message that says anything, as :func:`clean` text."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return clean(lines[-1] if lines else "no reason given")


def clean(text: str, most: int = 200) -> str:
    r"""Return text of a node that is safe to show: printable, on one line, and not too long.

    Escape sequences of terminals, control characters and those that turn the direction of writing
    lose their effect.

    >>> clean("loss\x1b[2J\u202e\n")
    'loss?[2J??'
    """
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def install_hint(extra: str, *packages: str) -> str:
    """Say how to install what an extra of this package asks for."""
    checkout = f"in a checkout of flwr-hetero: pip install -e '.[{extra}]'"
    wheel = f"pip install 'flwr_hetero-{__version__}-py3-none-any.whl[{extra}]'"
    others = f"pip install {' '.join(packages)}, or {checkout}"
    return others if packages else f"{checkout}, or with its wheel: {wheel}"


# --- errors of nodes whose cause is known ----------------------------------------------------
HINTS = {
    r"(fit|evaluate)ins\.(parameters|config)": (
        "The ClientApp is of Flower's older API (client_fn, NumPyClient). In the ServerApp:\n"
        "    from flwr_hetero.older import OlderClients\n"
        "    strategy.start(grid=OlderClients(grid), ...)"
    ),
    r"(KeyError\W+|Message: )'(arrays|config)'": (
        "The ClientApp reads a record that the message does not have. Around a ClientApp with\n"
        "@app.train() there is no OlderClients, and the strategy names its records as it does:\n"
        '    strategy.start(grid=grid, ...)  # FedAvg(arrayrecord_key="arrays") inside'
    ),
    r"fit\(\) returned \d+ arrays, the model has": (
        "initial_arrays must be the list that the client takes and returns, in its order:\n"
        "    initial_arrays = ArrayRecord(get_weights(model))"
    ),
    "missing or unknown|of initial_arrays": (
        "initial_arrays must hold all arrays that nodes return, by the same names. With PEFT:\n"
        "    initial_arrays = ArrayRecord(get_peft_model_state_dict(model))"
    ),
    "secaggplus_configs": (
        "SecAgg+ needs the workflow of Flower's older server, which runs no strategy of today's:\n"
        "take the mod out. Differential privacy goes with every strategy:\n"
        "    ClientApp(...)  # without mods=[secaggplus_mod]\n"
        "    DifferentialPrivacyServerSideFixedClipping(FedAvg(), ...)  # as the strategy inside"
    ),
    "(fixed|adaptive)clipping_mod requires the key": (
        "The mod works with its own strategy, inside that of this package:\n"
        "    DifferentialPrivacyClientSideFixedClipping(FedAvg(), ...)  # or ...AdaptiveClipping"
    ),
    r"mod expects exactly one ConfigRecord|conversion: 'flwr-hetero\.packed": (
        "A mod of Flower's gets what hetero is to read. hetero must come first:\n"
        "    ClientApp(mods=[hetero, ...])"
    ),
    "No train function registered with name 'default'": (
        "The ClientApp has no function for training:\n"
        "    @app.train()\n"
        "    def train(msg: Message, context: Context) -> Message: ..."
    ),
    "No module named '?flwr_hetero": (
        "The nodes need this package too, in the environment in which their ClientApp runs."
    ),
}
"""What errors of nodes say, as regular expressions, and the hint for each."""


def hint_for(reason: str) -> str:
    """Return the hint for an error of a node whose cause is known; empty for all others."""
    return next((hint for symptom, hint in HINTS.items() if re.search(symptom, reason)), "")


def with_hint(text: str) -> str:
    """Add to the reason why a run ends the hint for it, if there is one."""
    return f"{text}\n{hint}" if (hint := hint_for(text)) else text
