"""Texts as numbers, and texts that every Python has: its standard library."""

import re
import sysconfig
from collections.abc import Sequence, Sized
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

LENGTH = 64
"""Tokens of a text, which is cut off or padded."""
VOCABULARY = 4096
"""Different tokens, with padding."""
PADDING = 0
"""The number of padding, both of tokens and of characters."""
CHARACTERS = 128
"""Different characters, those of ASCII."""
Rows = NDArray[np.int64]
TOKEN = re.compile(r"[^\W_]+|[^\w\s]")
"""A word, divided at underscores, or a punctuation mark."""

STDLIB = "stdlib"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "_pydecimal",
            "unittest", "urllib", "xml")  # fmt: skip
"""Packages of CPython 3.11 to 3.13 with the most lines; the label is the position."""
WINDOW = 3
"""Lines of a text of the standard library."""
TEXTS_PER_CLASS = 1000


def token_numbers(texts: Sequence[str]) -> NDArray[np.int64]:
    """Turn words and punctuation marks of texts into numbers, in order: (len(texts), LENGTH)."""
    # A hash is the same on every machine, so that no vocabulary has to be shared.
    numbers = np.zeros((len(texts), LENGTH), dtype=np.int64)
    for row, text in zip(numbers, texts, strict=True):
        found = [crc32(m[0].lower().encode()) for m in islice(TOKEN.finditer(text), LENGTH)]
        row[: len(found)] = [1 + word % (VOCABULARY - 1) for word in found]
    return numbers


def character_windows(texts: Sequence[str], length: int) -> tuple[NDArray[np.uint8], Rows]:
    """Cut texts into windows of ASCII characters (count, length), padded; and the text of each."""
    windows = []
    origin = []
    for number, text in enumerate(texts):
        codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        # A rest of a single character has no next one to predict.
        count = len(codes) // length + (len(codes) % length > 1)
        padded = np.zeros(count * length, dtype=np.uint8)
        padded[: len(codes)] = codes[: len(padded)]
        windows.append(padded.reshape(count, length))
        origin += [number] * count
    empty = np.zeros((0, length), dtype=np.uint8)
    return np.concatenate([empty, *windows]), np.array(origin, dtype=np.int64)


def stdlib_windows(length: int) -> tuple[NDArray[np.uint8], Rows]:
    """Cut the code of Python's standard library into windows; the label is the package."""
    found = []
    for package in PACKAGES:
        codes = [file.read_text("utf-8") for file in _files(package)]
        found.append(character_windows([c[: len(c) // length * length] for c in codes], length)[0])
    rows, labels = _evenly(found)
    return np.concatenate([part[i] for part, i in zip(found, rows, strict=True)]), labels


def stdlib_texts() -> tuple[list[str], Rows]:
    windows = [*map(_windows, PACKAGES)]
    rows, labels = _evenly(windows)
    return [texts[i] for texts, part in zip(windows, rows, strict=True) for i in part], labels


def _evenly(windows: Sequence[Sized]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # Take equally many of each package, so that classes are balanced.
    count = min(TEXTS_PER_CLASS, *map(len, windows))
    rows = [np.linspace(0, len(found) - 1, count).astype(int) for found in windows]
    return np.array(rows), np.repeat(np.arange(len(PACKAGES)), count)


def _windows(package: str) -> list[str]:
    windows = []
    for file in _files(package):
        stripped = (line.strip() for line in file.read_text("utf-8").splitlines())
        lines = [line for line in stripped if line]
        starts = range(0, len(lines) - WINDOW + 1, WINDOW)
        windows += ["\n".join(lines[i : i + WINDOW]) for i in starts]
    return windows


def _files(package: str) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    single = root / f"{package}.py"
    files = [single] if single.is_file() else sorted((root / package).rglob("*.py"))
    # Not every machine has the tests of the library.
    return [file for file in files if not {"test", "tests"} & {*file.relative_to(root).parts}]
