"""The record of a study, with a line of JSON for each run: reading, writing, grouping."""

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from flwr_hetero.errors import invalid

RESULTS = "results.jsonl"
Case = dict[str, Any]
"""What identifies a run: ``experiment``, ``name``, and all settings that matter."""
Line = dict[str, Any]
"""A run, with ``case``, ``seed``, ``metrics``, ``curve`` and ``versions``."""


def files_of(folder: Path) -> tuple[Path, Path]:
    return folder / f"{RESULTS}.xz", folder / RESULTS


def read(folder: Path) -> list[Line]:
    """Read a study's results, of which there may be none."""
    packed, plain = files_of(folder)
    try:
        # The plain file has the lines that were appended since the last packing.
        text = lzma.decompress(packed.read_bytes()).decode() if packed.exists() else ""
        text += plain.read_text(encoding="utf-8") if plain.exists() else ""
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise invalid("results", str(folder), f"hold the lines of runs ({error})") from error


def append(folder: Path, line: Line) -> Line:
    """Add a line to the plain file, and return it as it will be read, with lists for tuples."""
    _, plain = files_of(folder)
    plain.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line)
    with plain.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    return cast(Line, json.loads(text))


def pack(folder: Path, lines: Iterable[Line] | None = None) -> None:
    """Pack a record, or the lines that replace it, into one file."""
    packed, plain = files_of(folder)
    # The same lines must give the same bytes, so that a record changes only with its lines.
    every = read(folder) if lines is None else lines
    text = "".join(json.dumps(line) + "\n" for line in every)
    packed.write_bytes(lzma.compress(text.encode(), preset=6 | lzma.PRESET_EXTREME))
    # Remove it last: if the process is killed before, lines exist twice, which does no harm.
    plain.unlink(missing_ok=True)


def key_of(line: Mapping[str, Any]) -> str:
    return json.dumps([line["case"], line["seed"]], sort_keys=True)


def of(lines: Iterable[Line], **wanted: Any) -> list[Line]:
    """Take the lines whose case has these values."""
    items = wanted.items()
    return [line for line in lines if all(line["case"].get(key) == v for key, v in items)]


def by(lines: Iterable[Line], *keys: str) -> dict[Any, list[Line]]:
    """Group lines by values of their cases, in order of appearance."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        # Cases without a key are one group.
        values = tuple(line["case"].get(key) for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(line)
    return groups


def metric(lines: Iterable[Line], name: str) -> list[float]:
    return [line["metrics"][name] for line in lines]


def by_seed(lines: Iterable[Line]) -> dict[int, Line]:
    return {line["seed"]: line for line in lines}


def pairs(lines: Iterable[Line], base: Iterable[Line]) -> list[tuple[Line, Line]]:
    """Pair lines with those of a base that have the same seed."""
    bases = by_seed(base)
    return [(line, bases[line["seed"]]) for line in lines if line["seed"] in bases]


def seeds(lines: Iterable[Line]) -> list[int]:
    return sorted({line["seed"] for line in lines})


def software(lines: Iterable[Line], *names: str) -> str:
    """Write the versions that the lines were made with."""
    texts = {}
    for line in lines:
        chosen = [f"{k} {v}" for k, v in line["versions"].items() if k in names or not names]
        texts[", ".join(chosen)] = True
    return "; ".join(text for text in texts if text)
