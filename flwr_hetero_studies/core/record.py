"""The record of a study: a line of JSON for each run, packed; reading, writing, grouping."""

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from flwr_hetero.errors import invalid

RESULTS = "results.jsonl"
Case = dict[str, Any]
"""Names a run: ``experiment``, ``name``, and all settings that matter."""
Line = dict[str, Any]
"""``case``, ``seed``, ``metrics``, ``curve`` and ``versions``."""


def files_of(folder: Path) -> tuple[Path, Path]:
    return folder / f"{RESULTS}.xz", folder / RESULTS


def read(folder: Path) -> list[Line]:
    """Read a study's results; none if there are none."""
    packed, plain = files_of(folder)
    try:
        # what was appended since the last packing comes after what is packed
        text = lzma.decompress(packed.read_bytes()).decode() if packed.exists() else ""
        text += plain.read_text(encoding="utf-8") if plain.exists() else ""
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise invalid("results", str(folder), f"hold the lines of runs ({error})") from error


def append(folder: Path, line: Line) -> Line:
    """Add a line to the plain file, and return it as it will be read."""
    _, plain = files_of(folder)
    plain.parent.mkdir(parents=True, exist_ok=True)
    # as it will be read: what is a tuple in a case comes back as a list
    text = json.dumps(line)
    with plain.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    return cast(Line, json.loads(text))


def pack(folder: Path, lines: Iterable[Line] | None = None) -> None:
    """Pack a record, or what is to take its place, into one file."""
    packed, plain = files_of(folder)
    # packing the same lines gives the same bytes, so that a record has no idle changes
    every = read(folder) if lines is None else lines
    text = "".join(json.dumps(line) + "\n" for line in every)
    packed.write_bytes(lzma.compress(text.encode(), preset=6 | lzma.PRESET_EXTREME))
    # only now: a run that is ended before has its lines twice, not never
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
        # a case that lacks a key is a group of its own
        values = tuple(line["case"].get(key) for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(line)
    return groups


def metric(lines: Iterable[Line], name: str) -> list[float]:
    return [line["metrics"][name] for line in lines]


def by_seed(lines: Iterable[Line]) -> dict[int, Line]:
    return {line["seed"]: line for line in lines}


def pairs(lines: Iterable[Line], base: Iterable[Line]) -> list[tuple[Line, Line]]:
    known = by_seed(base)
    return [(line, known[line["seed"]]) for line in lines if line["seed"] in known]


def seeds(lines: Iterable[Line]) -> list[int]:
    return sorted({line["seed"] for line in lines})


def software(lines: Iterable[Line], *names: str) -> str:
    """Name the versions that the lines were made with."""
    found = [{k: v for k, v in x["versions"].items() if k in names or not names} for x in lines]
    texts = dict.fromkeys(", ".join(f"{k} {v}" for k, v in each.items()) for each in found)
    return "; ".join(text for text in texts if text)
