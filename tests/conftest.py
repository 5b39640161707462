"""Settings of all tests: none may fail because the machine is busy."""

import gc
import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one core
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")

LONG = ("e2e", "studies", "report", "fleet", "slices")
"""Folders of long files: the first to run, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(items):
    """Run the folders of long files first, in this order."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: min((order.get(p, 99) for p in item.path.parts), default=99))


@pytest.fixture(autouse=True)
def no_collection_per_reply(monkeypatch):
    """Keep Flower's QFedAvg and Bulyan from collecting garbage after each reply: 0.3 s a time."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
