"""What the pages show must run, and their links must lead somewhere."""

import json
import re
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from flwr.app import Context, RecordDict

from flwr_hetero.fleet import LocalGrid, named_fleet
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.core.quiet import only_errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOK = ROOT / "docs" / "fleet.ipynb"
APPS = sorted((ROOT / "apps").glob("*/pyproject.toml"))
METHODS = [*sorted((ROOT / "flwr_hetero").glob("*/README.md")), ROOT / "deploy" / "README.md"]


def cells(kind: str) -> list[str]:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert "widgets" not in book["metadata"]
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.stem)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict = {}
    for number, block in enumerate(blocks(page)):
        block = block.replace(", 20)\n", ", 8)\n")  # rounds of the tutorial
        exec(compile(block, f"{page.name}, example {number + 1}", "exec"), names)
    if page.stem == "tutorial":
        said = capsys.readouterr().out
        assert re.search(r"FedSlice is [\d.]+x faster than FedAvg: ", said)
        assert (tmp_path / "first-fleet" / "FedSlice-0" / "report.html").is_file()


@pytest.mark.parametrize("strategy", ["fedavg", "fedslice"])
def test_app_of_the_tutorial_runs(strategy, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (tmp_path / "first_app").mkdir()
    for name, code in re.findall(r'title="first/(.+?)"\n(.*?)```', text, flags=re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    app = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    modules = [path.removesuffix(":app") for path in app["components"].values()]
    server, client = (import_module(module).app for module in modules)
    folder = tmp_path / "run"
    config = app["config"] | {"strategy": strategy, "output-dir": str(folder)}
    config["num-server-rounds"] = 3
    grid = LocalGrid(client, named_fleet(config["fleet"], 10), run_config=config)
    server(grid, Context(0, 0, {}, RecordDict(), config))
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.parent.name)
def test_strategies_and_imports_of_a_method_page_run(page, monkeypatch):
    monkeypatch.setattr(Wrapper, "start", create_autospec(Wrapper.start))
    names: dict = {"grid": None, "arrays": None}
    for block in blocks(page):
        lines = block.splitlines()
        if "mods=[hetero]" in block:  # the rest needs a message
            lines = [line for line in lines if line.startswith("from ")]
        exec(compile("\n".join(lines), page.parent.name, "exec"), names)


@pytest.mark.parametrize("num_rounds", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_notebook_runs_and_is_small(num_rounds, tmp_path, monkeypatch, capsys):
    """By day with fewer rounds than it shows: the tutorial runs much the same code in full."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert NOTEBOOK.stat().st_size < 60_000
    names: dict = {}
    whole = "".join(cells("code"))
    assert whole.count(", 20, seed)") == 2
    with only_errors():  # puts the level back that the notebook sets
        for number, text in enumerate(cells("code")):
            text = text.replace(", 20, seed)", f", {num_rounds}, seed)")
            exec(compile(text, f"cell {number + 1}", "exec"), names)
    pyplot.close("all")
    printed = capsys.readouterr().out
    assert "FedSlice" in printed
    if num_rounds == 20:
        book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        outputs = [output for cell in book["cells"] for output in cell.get("outputs", ())]
        assert printed in {"".join(output.get("text", "")) for output in outputs}
    assert list(tmp_path.glob("*/compare.html"))


def test_readme_is_short_and_has_examples():
    assert len(blocks(PAGES[0])) >= 2
    assert PAGES[0].read_text(encoding="utf-8").count("\n") <= 120


@pytest.mark.parametrize(
    "page",
    [*PAGES, *METHODS, *(app.with_name("README.md") for app in APPS), NOTEBOOK],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8") if page != NOTEBOOK else "\n".join(cells("markdown"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)", text)
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("path", APPS, ids=lambda path: path.parent.name)
def test_settings_of_an_app_are_its_defaults(path):
    config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| key \| default \|.*?\n\n", page, flags=re.DOTALL)
    shown = set()
    for row in filter(None, table.splitlines()[2:]):
        names, defaults = row.split("|")[1:3]
        names = re.findall(r"`([^`]+)`", names)
        defaults = defaults.split(",")
        for name, default in zip(names, defaults, strict=True):
            kind = float if isinstance(config[name], float) else str
            assert kind(default.strip(" `")) == kind(str(config[name]).lower())
            shown.add(name)
    assert "num-server-rounds" in shown
