"""Settings of all tests: none may fail because the machine is busy."""

import gc
import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker has one core
settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")


@pytest.fixture(autouse=True)
def no_collection_per_reply(monkeypatch):
    """Keep Flower's QFedAvg and Bulyan from collecting garbage after each reply: 0.3 s a time."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
