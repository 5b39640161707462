import gc

import pytest


@pytest.fixture(autouse=True)
def no_collection_per_reply(monkeypatch):
    """Keep Flower's QFedAvg and Bulyan from collecting garbage after each reply: 0.3 s a time."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)
