"""Files in one step or line by line, without following a link that someone else has left."""

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def drafted(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Write a file in one step: readers see the old one, which may be kept, or the new one."""
    draft = path.with_name(f"{path.name}.draft")
    # Of a process that was killed, or a link that would lead elsewhere.
    draft.unlink(missing_ok=True)
    with draft.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if previous is not None:
        with suppress(FileNotFoundError):
            path.replace(previous)
    draft.replace(path)


def replace(path: Path, content: bytes) -> None:
    """Write a whole file in one step."""
    with drafted(path) as file:
        file.write(content)


class GrowingFile:
    """Lines that are only added; its length and checksum, kept elsewhere, say what is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        self.checksum = 0

    def append(self, lines: Iterable[str]) -> None:
        """Add lines, which are on disk then; what was written and is not known of is cut off."""
        content = "".join(f"{line}\n" for line in lines).encode()
        # Windows has no such flag
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(self.path, flags, 0o666), "r+b") as file:
            # A process that was killed may have begun a line.
            file.truncate(self.length)
            file.seek(self.length)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.length += len(content)
        self.checksum = zlib.crc32(content, self.checksum)

    def read(self, length: int, checksum: int) -> list[str]:
        """Return the lines of that length and go on after them; ValueError if they are others."""
        content = b""
        if length:
            with self.path.open("rb") as file:
                content = file.read(length)
        if (len(content), zlib.crc32(content)) != (length, checksum):
            raise ValueError(f"{self.path.name} has been cut or changed")
        self.length = length
        self.checksum = checksum
        return content.decode().splitlines()
