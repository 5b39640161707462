"""Where a run comes from: versions, platform, command, and settings as plain JSON."""

import math
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import PurePath
from typing import Any

import numpy as np

PACKAGES = ("flwr-hetero", "flwr", "numpy", "torch")
"""Distributions whose versions a run notes."""

SECRET = re.compile(r"token|password|passwd|secret|api[-_]?key", re.IGNORECASE)
HIDDEN = "(hidden)"


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold.

    Parameters
    ----------
    value : Any
        Numbers, text, NumPy scalars and arrays, mappings, sequences, sets, paths.

    Returns
    -------
    Any
        Only None, bool, int, float, str, list and dict; numbers that are not finite become
        None, and what JSON does not know becomes its text.

    Examples
    --------
    >>> plain({"loss": np.float32(0.5), 3: np.arange(2), "bad": float("nan")})
    {'loss': 0.5, '3': [0, 1], 'bad': None}
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | PurePath):
        return [plain(item) for item in value]
    return str(value)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make a run's settings fit to be written down.

    Parameters
    ----------
    config : mapping
        For instance Flower's run config, or a dataclass of settings as a dict.

    Returns
    -------
    dict
        Plain JSON under kebab-case names, as one types them, without the values of what looks
        like a secret.

    Examples
    --------
    >>> settings_of({"num_tiers": 5, "hub-token": "abc"})
    {'num-tiers': 5, 'hub-token': '(hidden)'}
    """
    return {
        str(key).replace("_", "-"): HIDDEN if SECRET.search(str(key)) else plain(value)
        for key, value in config.items()
    }


def command_line(arguments: Iterable[str]) -> str:
    """Write a command as one would type it, without its secrets.

    Parameters
    ----------
    arguments : iterable of str
        As in ``sys.argv``. Flower starts a ServerApp with a token among them.

    Returns
    -------
    str
        Quoted for a shell.

    Examples
    --------
    >>> command_line(["flwr-serverapp", "--token", "abc", "--key-token=x", "my dir"])
    "flwr-serverapp --token '(hidden)' --key-token='(hidden)' 'my dir'"
    """
    words: list[str] = []
    hide_next = False
    for word in arguments:
        option, equals, _ = word.partition("=")
        is_secret = word.startswith("-") and bool(SECRET.search(option))
        if hide_next:
            words.append(shlex.quote(HIDDEN))
        elif is_secret and equals:
            words.append(f"{option}={shlex.quote(HIDDEN)}")
        else:
            words.append(shlex.quote(word))
        hide_next = is_secret and not equals and not hide_next
    return " ".join(words)


def surroundings() -> dict[str, Any]:
    """Note what a run runs on.

    Returns
    -------
    dict
        ``versions`` of the packages that are installed, ``python``, ``platform`` and
        ``command``.

    Examples
    --------
    >>> sorted(surroundings())
    ['command', 'platform', 'python', 'versions']
    """
    return {
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": command_line(sys.argv),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
