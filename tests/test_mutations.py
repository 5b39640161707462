"""tests/mutations breaks code that is there: each of its patterns is found, once."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load():
    """Import the script, whose name has no suffix."""
    loader = SourceFileLoader("mutations", str(HERE / "mutations"))
    module = module_from_spec(spec_from_loader("mutations", loader))
    loader.exec_module(module)
    return module


SCRIPT = load()


@pytest.mark.parametrize("name", SCRIPT.MUTATIONS)
def test_pattern_is_found_once(name):
    path, old, new = SCRIPT.MUTATIONS[name]
    text = (SCRIPT.ROOT / "flwr_hetero" / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    assert old != new


def test_tests_that_are_to_find_them_are_there():
    assert all((SCRIPT.ROOT / path).exists() for path in SCRIPT.TESTS)
