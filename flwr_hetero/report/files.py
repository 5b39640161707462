"""The files of a run directory: their names, and writing them whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

CONFIG = "config.json"
HISTORY = "history.jsonl"
MODEL = "model.safetensors"
REPORT = "report.html"
CHECKPOINT = "checkpoint"


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step: readers see the old one or the new one.

    Parameters
    ----------
    path : Path
        The file; its folder must exist.
    content : bytes
        All of it.
    """
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the settings of a run.

    Parameters
    ----------
    directory : str or Path
        A run directory.

    Returns
    -------
    dict
        ``settings``, ``versions``, ``started`` and more; empty if there is nothing to read.
    """
    try:
        facts = json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
