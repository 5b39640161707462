"""An app's run-config, checked before Flower sees it, which answers a mistyped key by a code."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr_hetero.errors import check_count, check_key, invalid

NUM_NODES = "num-supernodes"
"""Key of the federation-config: simulated nodes."""
AT_MOST_ALL = "clients-per-round"
"""Key of run-configs that no fleet can fulfil that is smaller."""


def check_run_config(
    app: Path, given: Sequence[str], federation: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the run-config that Flower would give the app; refuse keys and values it would not.

    Values are checked by the app's own rules: a class with ``from_run_config`` that its ServerApp's
    module has or imports. What is asked of the nodes must fit their number, where that is given.
    """
    from flwr_hetero._flwr import app_tables, parse_run_config

    components, defaults = app_tables(app)
    changed = parse_run_config(given)
    for key in changed:
        check_key("run-config", key, defaults)
    config = {**defaults, **changed}
    if rules := _rules(app, components["serverapp"].partition(":")[0]):
        rules.from_run_config(config)
    num_nodes = parse_run_config(federation).get(NUM_NODES)
    if num_nodes is not None:
        check_count(NUM_NODES, num_nodes, 1)
        wanted = changed.get(AT_MOST_ALL)
        if isinstance(wanted, int) and wanted > num_nodes:
            rule = f"be at most the number of nodes, {num_nodes}"
            raise invalid(AT_MOST_ALL, wanted, rule, "start more nodes or ask fewer")
    return config


def _rules(app: Path, module: str) -> Any:
    """Find the class that checks an app's run-config, the most derived of several; None if none."""
    sys.path.insert(0, str(app.resolve()))
    try:
        found = vars(import_module(module)).values()
    except ImportError as error:
        raise invalid("app", str(app), f"be importable ({module}: {error})") from error
    finally:
        sys.path.pop(0)
    classes = [
        kind for kind in found if isinstance(kind, type) and hasattr(kind, "from_run_config")
    ]
    return max(classes, key=lambda kind: len(kind.__mro__), default=None)
