"""The arrows of CONTRIBUTING.md: which folder may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flwr_hetero"
EVERYWHERE = {"numpy", "flwr_hetero.keys", *sys.stdlib_module_names}
RECORDS = {f"flwr_hetero.{name}" for name in ("payload", "resharding_records", "sample_lists")}
ALLOWED = {
    "core": set(),
    "strategy": {"core", "flwr"} | RECORDS,
    "sampler": {"core", "torch"},
    "mod": {"core", "flwr"} | RECORDS,
    "fleet": {"core", "mod", "flwr", "cryptography"},
    "report": {"core", "matplotlib", "rich", "safetensors", "flwr_hetero.__version__"},
    "task": {"core", "strategy", "sampler", "mod", "fleet", "report", "flwr", "torch"}
    | {"flwr_datasets", "pyarrow", "sklearn", "torchvision", "PIL"},
}
"""CONTRIBUTING.md's table; beside it stand packages without which a folder can do nothing."""
EXCEPTIONS = {
    "mod/device_facts.py": {"jtop"},  # on a Jetson only
    "report/cli.py": {"flwr_hetero.fleet"},  # the command line's `fleet`, when it is asked for
}
LOOSE = {"__init__": set(), "keys": set(), "payload": {"flwr"}} | {
    name: {"flwr", "flwr_hetero.core"} for name in ("resharding_records", "sample_lists")
}


def imports_of(source: str) -> set[str]:
    """Name what a module imports: of this package its folders and modules, else the package."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names |= {f"{start}.{alias.name}" for alias in node.names}
    return {_part(name) for name in names}


def _part(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] in ("", "flwr_hetero") else parts[:1])


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_it_may(folder):
    files = list((PACKAGE / folder).rglob("*.py"))
    assert files
    own = {f"flwr_hetero.{name}" if name in ALLOWED else name for name in ALLOWED[folder]}
    allowed = EVERYWHERE | own | {f"flwr_hetero.{folder}"}
    wrong = {
        f"{path.name}: {name}"
        for path in files
        for name in imports_of(path.read_text(encoding="utf-8")) - allowed
        if name not in EXCEPTIONS.get(f"{folder}/{path.name}", ())
    }
    assert not wrong


@pytest.mark.parametrize("module", sorted(LOOSE))
def test_a_module_beside_the_folders_imports_only_what_it_may(module):
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert not imports_of(source) - EVERYWHERE - LOOSE[module]


def test_no_folder_and_no_module_is_left_out():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ALLOWED)
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(LOOSE)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from flwr_hetero import strategy", "flwr_hetero.strategy"),
        ("from flwr_hetero.strategy import TiFL", "flwr_hetero.strategy"),
        ("import flwr_hetero.strategy.tifl as t", "flwr_hetero.strategy"),
        ("import flwr_hetero", "flwr_hetero"),
        ("from .. import strategy", "."),
        ("def f():\n    from torch.nn import Linear", "torch"),
    ],
)
def test_every_way_to_import_is_seen(source, found):
    assert imports_of(source) == {found}
    assert found not in EVERYWHERE


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("flwr_hetero", ("torch", "ray", "flwr", "matplotlib")),
        ("flwr_hetero.core", ("torch", "ray", "flwr")),
        ("flwr_hetero.strategy", ("torch", "ray", "matplotlib")),
    ],
)
def test_import_stays_light(module, unwanted):
    code = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
