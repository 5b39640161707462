"""Files that are written in one step, without following a link that someone else has left."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def drafted(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Write a file in one step: readers see the old one, which may be kept, or the new one."""
    draft = path.with_name(f"{path.name}.draft")
    # of a process that was killed, or a link that would lead elsewhere
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
