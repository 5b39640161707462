"""The reference is whole: every public name says what it does and is shown in use."""

import importlib
import inspect
import re
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
PAPERS = ("slices", "tifl", "biased_local_sgd", "cd_grab", "mercury", "pgd", "asynchronous")
PACKAGES = ("strategy", "sampler", "mod", "older", "fleet", "report")


def public_names():
    """Yield module and name of all that is public: ``__all__``, or what an algorithm defines."""
    for package in PACKAGES:
        module = importlib.import_module(f"flwr_hetero.{package}")
        for name in getattr(module, "__all__", ()):
            yield module, name
    for paper in PAPERS:
        module = importlib.import_module(f"flwr_hetero.{paper}.algorithm")
        for name, value in vars(module).items():
            is_its_own = getattr(value, "__module__", "") == module.__name__
            if is_its_own and not name.startswith(("_", "check_")):
                yield module, name


NAMES = [pytest.param(m, n, id=f"{m.__name__[12:]}.{n}") for m, n in public_names()]


@pytest.fixture(scope="module")
def examples():
    """All code that CI runs to show how something is used: doctests, README, docs and apps."""
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "apps").rglob("*.py")]
    for path in (ROOT / "flwr_hetero").rglob("*.py"):
        code += re.findall(r"(?m)^ *(?:>>>|\.\.\.) (.*)", path.read_text(encoding="utf-8"))
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        code += re.findall(r"(?s)```python\n(.*?)```", page.read_text(encoding="utf-8"))
    return set(re.findall(r"\w+", "\n".join(code)))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_name_is_explained_and_shown(module, name, examples):
    value = getattr(module, name)
    assert inspect.getdoc(value), "has no docstring"
    returned = isinstance(value, type) and issubclass(value, tuple)  # made by a function shown
    assert returned or name in examples, "is in no doctest and in no example"


@pytest.mark.nightly
def test_site_builds_strictly_and_loads_nothing(tmp_path, monkeypatch):
    """Pages, links and the API reference; a warning of mkdocs or pdoc ends the build.

    The workflow that publishes the site builds it at each push, too.
    """
    config = importlib.import_module("mkdocs.config")
    build = importlib.import_module("mkdocs.commands.build")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="(?!pdoc)")
        build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    api = tmp_path / "api" / "flwr_hetero"
    for package in PACKAGES:
        page = (api / f"{package}.html").read_text(encoding="utf-8")
        for name in getattr(importlib.import_module(f"flwr_hetero.{package}"), "__all__", ()):
            assert f'id="{name}"' in page
    assert all((api / paper / "algorithm.html").exists() for paper in PAPERS)
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"(?s)>References</h\d>(.*?)<(?:h\d|/div|/section)", text):
            assert re.search(r"\w{4}", re.sub(r"<[^>]+>", "", found)), f"{path.name}: no reference"
        is_raw = re.search(r"\.\. (?:math::|\[)", text) if "api" in path.parts else "$$" in text
        assert not is_raw, f"{path.name}: a formula or reference is not rendered"
        assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=.?(?:https?:)?//", text), path
        links = re.findall(r'(?:href|src)="?(?![\w+.-]+:|/|#)([^"#? >]+)', text)
        lost = {link for link in links if not (path.parent / unquote(link)).exists()}
        assert not lost, f"{path.relative_to(tmp_path)} links to what is not there: {lost}"
    assert "<math" in (tmp_path / "objectives.html").read_text(encoding="utf-8")
