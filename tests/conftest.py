"""Settings of all tests: none may fail because the machine is busy."""

import gc
import os
import re

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one core
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")

LONG = ("e2e", "studies", "report", "fleet", "slices")
"""Folders of long files: the first to run, so that no worker is left with one at the end."""


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
    """Run the folders of long files first, in this order."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: min((order.get(p, 99) for p in item.path.parts), default=99))


@pytest.fixture(autouse=True)
def no_collection_per_reply(monkeypatch):
    """Keep Flower's QFedAvg and Bulyan from collecting garbage after each reply: 0.3 s a time."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
