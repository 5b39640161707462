"""The table of docs/apps.md is that of the apps as they are."""

import json
from pathlib import Path

from e2e.examples.methods import METHODS, REFUSED
from e2e.examples.running import APPS
from e2e.examples.table import made, parts

MEASURED = Path(__file__).parents[3] / "flwr_hetero_studies" / "cost" / "apps.json"


def test_page_has_the_table():
    _, table, _ = parts()
    assert table == made(json.loads(MEASURED.read_text(encoding="utf-8"))["overhead"])


def test_every_effect_has_an_overhead():
    found = json.loads(MEASURED.read_text(encoding="utf-8"))["overhead"]
    assert set(found) == set(APPS)
    for kind in found:
        assert set(found[kind]) == {name for name in METHODS if (kind, name) not in REFUSED}


def test_every_refusal_is_of_a_cell():
    assert set(REFUSED) < {(kind, name) for kind in APPS for name in METHODS}
