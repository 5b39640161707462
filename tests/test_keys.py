"""Names on the wire: each once, and no record that an app might have, too."""

import ast
import re
from collections import Counter
from pathlib import Path

from flwr_hetero import keys

PACKAGE = Path(keys.__file__).parent
NAMES = {name: value for name, value in vars(keys).items() if name.isupper()}
NO_RECORD = {"PREFIX", "EXAMPLES_HIDDEN", "PACKED"}
"""Of the names that begin with the prefix: itself, a metric, and a serialisation."""
AS_RECORD = r"(?:(?:content|state|records)\)?(?:\[|\.\w+\()|config_in\([\w.]+, )keys\.([A-Z_]+)"
"""How the package reads and writes records of messages and of a node's state."""


def test_no_key_is_defined_twice():
    tree = ast.parse(Path(keys.__file__).read_text(encoding="utf-8"))
    assigned = [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]
    values = [value for value in NAMES.values() if isinstance(value, str)]
    assert set(assigned) == set(NAMES)
    for found in (assigned, values):
        assert not [each for each, count in Counter(found).items() if count > 1]


def test_every_record_has_the_prefix():
    prefixed = {n for n, v in NAMES.items() if isinstance(v, str) and v.startswith(keys.PREFIX)}
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    used = {name for text in texts for name in re.findall(AS_RECORD, text)}
    assert used == prefixed - NO_RECORD
