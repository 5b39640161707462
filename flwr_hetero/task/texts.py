"""Texts as token numbers, and texts that every Python brings along: its standard library."""

import re
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from flwr_hetero.errors import invalid

LENGTH = 64
"""Tokens of a text: more are cut off, fewer are padded with 0."""
VOCABULARY = 4096
"""Token numbers, with 0 for padding."""
TOKEN = re.compile(r"[^\W_]+|[^\w\s]")
"""A word, divided at underscores, or a punctuation mark."""

STDLIB = "stdlib"
PACKAGES = (
    "asyncio", "email", "http", "importlib", "logging",
    "multiprocessing", "_pydecimal", "unittest", "urllib", "xml",
)  # fmt: skip
"""Packages of CPython 3.11 to 3.13 with the most lines; the label is the position."""
WINDOW = 3
"""Lines of a text of the standard library."""
TEXTS_PER_CLASS = 1000


def token_numbers(texts: Sequence[str]) -> NDArray[np.int64]:
    """Turn words and punctuation marks of texts into numbers, in order: (len(texts), LENGTH).

    The number is a hash, CRC-32 of the token in lower case, the same on every machine; there is
    no vocabulary to agree on. Different tokens may share a number.
    """
    numbers = np.zeros((len(texts), LENGTH), dtype=np.int64)
    for row, text in zip(numbers, texts, strict=True):
        found = [crc32(m[0].lower().encode()) for m in islice(TOKEN.finditer(text), LENGTH)]
        row[: len(found)] = [1 + word % (VOCABULARY - 1) for word in found]
    return numbers


def stdlib_texts() -> tuple[list[str], NDArray[np.int64]]:
    """Read windows of code of Python's standard library; the label is the package.

    As many windows of each package, spread evenly over its files. Their content differs a little
    from one version of Python to the next.
    """
    root = Path(sysconfig.get_path("stdlib"))
    windows = [_windows(root, package) for package in PACKAGES]
    count = min(TEXTS_PER_CLASS, *map(len, windows))
    texts = [
        found[i]
        for found in windows
        for i in np.linspace(0, len(found) - 1, count).astype(int).tolist()
    ]
    return texts, np.repeat(np.arange(len(PACKAGES)), count)


def _windows(root: Path, package: str) -> list[str]:
    """Divide the lines of a package that are not empty; tests are left out."""
    single = root / f"{package}.py"
    files = [single] if single.is_file() else sorted((root / package).rglob("*.py"))
    windows = []
    for file in files:
        if not {"test", "tests"} & {*file.relative_to(root).parts}:
            lines = [s for line in file.read_text("utf-8").splitlines() if (s := line.strip())]
            starts = range(0, len(lines) - WINDOW + 1, WINDOW)
            windows += ["\n".join(lines[i : i + WINDOW]) for i in starts]
    if not windows:
        rule = f"find the sources of {package!r} in {root}"
        raise invalid("dataset", STDLIB, rule, "this Python has no standard library as files")
    return windows
