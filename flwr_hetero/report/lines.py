"""What a line of a history may hold: it may come from anywhere."""

import json
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import Any


def parse(line: str) -> tuple[dict[str, Any] | None, str]:
    """Read a line; None, and why, if it is none that a run writes."""
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None, "is no round"
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        return None, "is no round"
    for key, shape in _SHAPES.items():
        if not _fits(record.get(key), shape):
            return None, f"has a {key} that no run writes"
    return record, ""


def _shared(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict whose keys are those of the other lines, which is most of their memory."""
    return {sys.intern(key): _names(value) for key, value in pairs}


def _names(value: Any) -> Any:
    is_list = isinstance(value, list) and value and isinstance(value[0], str)
    return [sys.intern(x) if isinstance(x, str) else x for x in value] if is_list else value


def _whole(digits: str) -> int:
    if len(digits) > 18:
        raise ValueError(f"{digits[:9]}... is no number of a run")
    return int(digits)


_DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=lru_cache(4096)(float), object_pairs_hook=_shared
)
_NUMBER, _TIER = {int, float, bool, type(None)}, range(10_000)
_TEXT = {str, type(None)}
_SHAPES: dict[str, Any] = {
    "selected": [_TEXT],
    "failures": [{"node": _TEXT, "reason": _TEXT}],
    "latency": {...: _NUMBER},
    "tifl": {
        "tiers": {...: _TIER},
        "latency": {...: _NUMBER},
        **{key: [_NUMBER] for key in ("tier_probs", "tier_chances", "credits", "tier_accuracy")},
    },
    "fedslice": {...: _NUMBER},
    "fedbuff": {"nodes": [_TEXT], "staleness": [_NUMBER], "age_s": [_NUMBER]},
}
"""What a line may hold, beside numbers: ``...`` stands for any key, and anything may be null."""


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a part of a line has its shape, or is missing."""
    if value is None:
        return True
    if isinstance(shape, list):
        return isinstance(value, list) and _all_fit(value, shape[0])
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if ... in shape:
            return _all_fit(value.values(), shape[...])
        return all(_fits(value.get(key), inner) for key, inner in shape.items())
    return type(value) in shape if isinstance(shape, set) else type(value) is int and value in shape


def _all_fit(values: Collection[Any], shape: Any) -> bool:
    if isinstance(shape, set):
        return set(map(type, values)) <= shape
    return all(_fits(value, shape) for value in values)
