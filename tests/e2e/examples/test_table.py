"""The table of docs/apps.md is that of the apps as they are."""

from e2e.examples.methods import METHODS, REFUSED
from e2e.examples.running import APPS
from e2e.examples.table import made, parts

from flwr_hetero_studies.cost.apps import overheads


def test_page_has_the_table():
    _, table, _ = parts()
    assert table == made(overheads())


def test_every_effect_has_an_overhead():
    found = overheads()
    assert set(found) == set(APPS)
    for kind in found:
        assert set(found[kind]) == {name for name in METHODS if (kind, name) not in REFUSED}


def test_every_refusal_is_of_a_cell():
    assert set(REFUSED) < {(kind, name) for kind in APPS for name in METHODS}
