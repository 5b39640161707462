"""The table of tests/e2e/grids can be imported by its app's name, as Flower does."""

import sys
from pathlib import Path

import pytest

GRID_APP = Path(__file__).parent / "grids" / "grid_app"


@pytest.fixture
def grid_app(monkeypatch):
    """Give the app's modules: client_app and rows."""
    monkeypatch.syspath_prepend(str(GRID_APP))
    from grid_app import client_app, rows

    yield client_app, rows
    for name in [name for name in sys.modules if name.split(".")[0] == "grid_app"]:
        del sys.modules[name]
