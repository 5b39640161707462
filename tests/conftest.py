"""Settings of all tests: none may fail because the machine is busy."""

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one core
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")

TESTS = Path(__file__).parent
LONG = (
    *("e2e", "server", "conformance", "slices", "attacks", "client", "fleet", "tifl"),
    *("studies", "mercury", "test_readme.py"),
)
"""Folders and files of the longest tests, in the order in which they run.

A worker runs whole files, so that a long one at the end would leave the others idle.
"""
NIGHTLY_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.nightly", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Skip helpers, which hold no doctests, and by day the files whose tests are all nightly.

    Both would be imported for nothing, in each worker.
    """
    name = collection_path.name
    if collection_path.suffix != ".py" or name == "conftest.py":
        return None
    if not name.startswith("test_"):
        return True
    is_by_day = "not nightly" in config.option.markexpr
    if is_by_day and NIGHTLY_FILE.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


def pytest_collection_modifyitems(items):
    """Run the longest tests first, and the package's doctests last."""

    def place(item):
        parts = item.path.relative_to(TESTS).parts if TESTS in item.path.parents else ()
        return min((LONG.index(part) for part in parts if part in LONG), default=len(LONG))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Wait for no disk, and let no round go without a checkpoint because the machine is busy."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr("flwr_hetero.server.checkpoint.ALWAYS_S", float("inf"))
    # Flower's QFedAvg and Bulyan collect garbage after each reply: 0.3 s a time
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
