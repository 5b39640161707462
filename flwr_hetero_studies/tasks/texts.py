"""Texts as numbers, and texts that every Python brings along: its standard library."""

import re
import sysconfig
from collections.abc import Sequence, Sized
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

LENGTH, VOCABULARY = 64, 4096
"""Tokens of a text, cut off or padded with 0; numbers of tokens, with that 0."""
PADDING, CHARACTERS = 0, 128
"""Of tokens and characters alike; the numbers of characters, those of ASCII."""
Rows = NDArray[np.int64]
TOKEN = re.compile(r"[^\W_]+|[^\w\s]")
"""A word, divided at underscores, or a punctuation mark."""

STDLIB = "stdlib"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "_pydecimal",
            "unittest", "urllib", "xml")  # fmt: skip
"""Packages of CPython 3.11 to 3.13 with the most lines; the label is the position."""
WINDOW, TEXTS_PER_CLASS = 3, 1000
"""Lines of a text of the standard library, and how many texts."""


def token_numbers(texts: Sequence[str]) -> NDArray[np.int64]:
    """Turn words and punctuation marks of texts into numbers, in order: (len(texts), LENGTH)."""
    # a hash, the same on every machine: there is no vocabulary to agree on
    # 0 is padding, which no token has
    numbers = np.zeros((len(texts), LENGTH), dtype=np.int64)
    for row, text in zip(numbers, texts, strict=True):
        found = [crc32(m[0].lower().encode()) for m in islice(TOKEN.finditer(text), LENGTH)]
        row[: len(found)] = [1 + word % (VOCABULARY - 1) for word in found]
    return numbers


def character_windows(texts: Sequence[str], length: int) -> tuple[NDArray[np.uint8], Rows]:
    """Cut texts into windows of ASCII characters (count, length), padded; and the text of each."""
    windows, origin = [], []
    for number, text in enumerate(texts):
        codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        # a rest of a single character says nothing of the next
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
    rows, labels = _evenly(windows := [*map(_windows, PACKAGES)])
    return [found[i] for found, part in zip(windows, rows, strict=True) for i in part], labels


def _evenly(windows: Sequence[Sized]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # as many of each package: classes are balanced
    count = min(TEXTS_PER_CLASS, *map(len, windows))
    rows = [np.linspace(0, len(found) - 1, count).astype(int) for found in windows]
    return np.array(rows), np.repeat(np.arange(len(PACKAGES)), count)


def _windows(package: str) -> list[str]:
    windows = []
    for file in _files(package):
        lines = [s for line in file.read_text("utf-8").splitlines() if (s := line.strip())]
        starts = range(0, len(lines) - WINDOW + 1, WINDOW)
        windows += ["\n".join(lines[i : i + WINDOW]) for i in starts]
    return windows


def _files(package: str) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    single = root / f"{package}.py"
    files = [single] if single.is_file() else sorted((root / package).rglob("*.py"))
    # tests are code of another kind, and not on every machine
    return [file for file in files if not {"test", "tests"} & {*file.relative_to(root).parts}]
