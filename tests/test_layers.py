"""Which folder may import which: the table of CONTRIBUTING.md."""

import ast
import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flwr_hetero"
STUDIES = PACKAGE.with_name("flwr_hetero_studies")
PAPERS = ("tifl", "biased_local_sgd", "cd_grab", "mercury", "pgd")
BASE = ("keys", "errors", "records", "state_dict", "files", "_flwr")
FACES = ("strategy", "sampler", "mod")
LOWER = {*BASE, "exchange", "server", "client"}
ROOMS = {
    **{name: {*BASE} for name in BASE},
    "exchange": {*BASE},
    "server": {*BASE, "exchange", "report"},
    # what a mod of a method does for every app
    "client": {*BASE, "compression"},
    **dict.fromkeys(PAPERS, LOWER),
    "older": {*BASE, "exchange", "server"},
    "fleet": {*BASE, "client"},
    "report": {*BASE},
    "cli": {*BASE, "client", "report", "fleet"},
    "__main__": {"cli"},
    "__init__": set(),
}
METHODS = {path.parent.name for path in PACKAGE.glob("*/strategy.py")} - {*ROOMS}
"""Methods added since: each may import what a paper may."""
ROOMS |= dict.fromkeys(METHODS, LOWER)
ROOMS["slices"] = {*LOWER, "biased_local_sgd", "asynchronous"}
ROOMS |= {face: {*LOWER, *PAPERS, *METHODS} for face in FACES}
"""A room or file of the package, and which others it may import."""
UNWANTED = {
    "*/algorithm.py": r"(?!numpy\b|flwr_hetero\.errors\b)",
    "exchange/*": r"torch",
    "server/*": r"torch",
    "*/*strategy.py": r"torch",
    "tifl/*": r"torch",
    "*/*sampler.py": r"flwr\b",
}
"""Files, and which packages from outside they must not import (standard library apart)."""
COPIED = [path for path in sorted((PACKAGE.parent / "apps").iterdir()) if path.name != "fleet"]
"""Apps that people copy; ``fleet`` is the studies' own, with every method as a key."""
MODULE = '"flwr_hetero_studies'
"""How a string would name a module of the studies."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imports_of(path: Path) -> set[str]:
    """Name what a module imports, wherever the import stands: modules, else what is taken."""
    names = set()
    for node in ast.walk(ast.parse(source_of(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            full = {f"{start}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else start for name in full}
    return names


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """Name what each module of the package imports."""
    return {name: imports_of(path) for name, path in MODULES.items()}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_room_imports_what_it_may(room, arrows):
    allowed = ROOMS[room] | {room, "__init__"}
    modules = [name for name in arrows if room_of(name) == room]
    assert modules
    inside = {(n, to) for n in modules for to in arrows[n] if to.startswith(("flwr_hetero", "."))}
    assert not {arrow for arrow in inside if room_of(arrow[1]) not in allowed}


@pytest.mark.parametrize("pattern", UNWANTED)
def test_file_avoids_packages(pattern, arrows):
    files = [name for name, p in MODULES.items() if fnmatch(str(p.relative_to(PACKAGE)), pattern)]
    assert files
    imports = {(name, target) for name in files for target in arrows[name]}
    outside = {(n, to) for n, to in imports if to.split(".")[0] not in sys.stdlib_module_names}
    assert not {arrow for arrow in outside if re.match(UNWANTED[pattern], arrow[1])}


def test_package_does_not_import_its_studies(arrows):
    assert not {name for name, targets in arrows.items() if any("studies" in t for t in targets)}
    assert not [path for path in MODULES.values() if MODULE in source_of(path)]


@pytest.mark.parametrize("app", COPIED, ids=lambda app: app.name)
def test_app_can_be_copied(app):
    texts = [path.read_text(encoding="utf-8") for path in app.rglob("*.py")]
    assert len(texts) == 4
    assert sum(text.count("\n") for text in texts) <= 250
    assert not [text for text in texts if "flwr_hetero_studies" in text]


def test_apps_share_their_code():
    """Apps are copied one by one and repeat code: functions of one name must be the same."""
    sources = {}
    for app in COPIED:
        [path] = app.rglob("task.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name not in ("divide", "load_partition"):
                sources.setdefault(node.name, set()).add(ast.unparse(node))
    assert len(sources) > 5
    assert not [name for name, versions in sources.items() if len(versions) > 1]


def test_every_paper_has_an_algorithm():
    assert all((PACKAGE / paper / "algorithm.py").is_file() for paper in PAPERS)
    assert {room_of(name) for name in MODULES} <= set(ROOMS)


def test_no_import_circle(arrows):
    inside = {name: {t for t in targets if t in MODULES} for name, targets in arrows.items()}
    assert list(TopologicalSorter(inside).static_order())


TOTALS = {"flwr_hetero": 22_690, "flwr_hetero_studies": 15_070, "tests": 26_200}
"""Lines of Python that each part may have: what comes in makes room for itself."""
PAIR = re.compile(r"^ *\(?[\w.\[\]\"*]+, .* = ", re.MULTILINE)
MOST_PAIRS = 3.0
"""Assignments of several values to several names, of which a line has one each, in 1,000 lines."""


@pytest.mark.parametrize("part", TOTALS)
def test_the_house_does_not_grow(part):
    paths = (PACKAGE.parent / part).rglob("*.py")
    assert sum(source_of(path).count("\n") for path in paths) <= TOTALS[part]


@pytest.mark.parametrize("part", ["flwr_hetero", "tests"])
def test_a_line_says_one_thing(part):
    paths = list((PACKAGE.parent / part).rglob("*.py"))
    pairs = [
        node
        for path in paths
        if PAIR.search(source_of(path))  # parsing the others takes seconds
        for node in ast.walk(ast.parse(source_of(path)))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]
    lines = sum(source_of(path).count("\n") for path in paths)
    assert 1000 * len(pairs) / lines <= MOST_PAIRS


def test_no_class_name_twice():
    names = [
        name
        for path in [*PACKAGE.rglob("*.py"), *STUDIES.rglob("*.py")]
        for name in re.findall(r"(?m)^ *class (\w+)[(:]", source_of(path))
    ]
    assert "FedSlice" in names
    assert not {name for name, count in Counter(names).items() if count > 1}


HEAVY = "torch ray matplotlib plotly"
LIGHT = [
    ("import flwr_hetero.tifl.algorithm", f"{HEAVY} rich flwr pyarrow"),
    *(
        (f"shown([{words}'--help'])", f"{HEAVY} rich flwr pyarrow")
        for words in ("", "'watch', ", "'compare', ", "'fleet', 'up', ")
    ),
    ("import flwr_hetero.report", f"{HEAVY} rich"),
    ("import flwr_hetero.mod, flwr_hetero.strategy", HEAVY),
]
"""What is done, each after the ones before, and what must not have been imported by then."""
START = """
import sys
from contextlib import suppress

def shown(arguments):
    from flwr_hetero import cli

    with suppress(SystemExit):
        cli.main(arguments)
"""


def test_imports_stay_light():
    lines = [START]
    for number, (code, unwanted) in enumerate(LIGHT):
        lines += [code, f"print('loaded', {number}, {{*{unwanted.split()}}} & {{*sys.modules}})"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == [f"loaded {number} set()" for number in range(len(LIGHT))]
