"""The arrows of CONTRIBUTING.md: which folder may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flwr_hetero"
FORBIDDEN = {
    "core": ("flwr", "torch", "ray", "matplotlib", "sklearn", "flwr_hetero.strategy"),
    "strategy": ("torch", "ray", "matplotlib", "flwr_hetero.sampler", "flwr_hetero.task"),
    "sampler": ("flwr", "ray", "matplotlib", "flwr_hetero.strategy", "flwr_hetero.task"),
    "mod": ("torch", "flwr_hetero.strategy", "flwr_hetero.task"),
    "fleet": ("torch", "flwr_hetero.strategy", "flwr_hetero.task"),
    "report": ("torch", "flwr", "flwr_hetero.strategy", "flwr_hetero.task"),
    "task": ("ray", "matplotlib"),
}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_folder_imports_only_what_it_may(folder):
    files = list((PACKAGE / folder).rglob("*.py"))
    assert files
    wrong = {
        f"{path.name}: {module}"
        for path in files
        for module in imports_of(path)
        if any(is_below(module, package) for package in FORBIDDEN[folder])
    }
    assert not wrong


def test_core_imports_numpy_and_the_standard_library_only():
    allowed = {"numpy", "flwr_hetero", *sys.stdlib_module_names}
    wrong = {
        f"{path.name}: {module}"
        for path in (PACKAGE / "core").rglob("*.py")
        for module in imports_of(path)
        if module.split(".")[0] not in allowed
    }
    assert not wrong


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
