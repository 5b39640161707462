"""The reference is whole: every public name says what it does and is shown in use."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPERS = ("tifl", "biased_local_sgd", "cd_grab", "mercury", "pgd", "fedbuff")
PACKAGES = ("strategy", "sampler", "mod", "fleet", "report")


def public_names():
    """Yield module and name of all that is public: ``__all__``, or what an algorithm defines."""
    for package in PACKAGES:
        module = importlib.import_module(f"flwr_hetero.{package}")
        for name in getattr(module, "__all__", ()):
            yield module, name
    for paper in PAPERS:
        module = importlib.import_module(f"flwr_hetero.{paper}.algorithm")
        for name, value in vars(module).items():
            if (
                not name.startswith(("_", "check_"))
                and getattr(value, "__module__", "") == module.__name__
            ):
                yield module, name


NAMES = [pytest.param(m, n, id=f"{m.__name__[12:]}.{n}") for m, n in public_names()]


@pytest.fixture(scope="module")
def examples():
    """All code that CI runs to show how something is used: doctests, README, docs and apps."""
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "apps").rglob("*.py")]
    for path in (ROOT / "flwr_hetero").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        code += re.findall(r"^ *(?:>>>|\.\.\.) (.*)", text, flags=re.MULTILINE)
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        code += re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return set(re.findall(r"\w+", "\n".join(code)))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_name_is_explained_and_shown(module, name, examples):
    value = getattr(module, name)
    assert inspect.getdoc(value), "has no docstring"
    returned = isinstance(value, type) and issubclass(value, tuple)  # made by a function shown
    assert returned or name in examples, "is in no doctest and in no example"


def test_reference_builds_and_renders(tmp_path):
    render = pytest.importorskip("pdoc.render")
    render.configure(docformat="numpy", math=True, show_source=False, search=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        importlib.import_module("pdoc").pdoc("flwr_hetero", output_directory=tmp_path)
    for package in PACKAGES:
        page = tmp_path / "flwr_hetero" / f"{package}.html"
        for name in getattr(importlib.import_module(f"flwr_hetero.{package}"), "__all__", ()):
            assert f'id="{name}"' in page.read_text(encoding="utf-8")
    assert_rendered(tmp_path)
    assert all((tmp_path / "flwr_hetero" / paper / "algorithm.html").exists() for paper in PAPERS)


def assert_rendered(folder):
    """Check that references have text and that no formula is left as it was typed."""
    for path in folder.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        for found in re.finditer(
            r">References</h\d>(.*?)<(?:h\d|/div|/section)", page, flags=re.DOTALL
        ):
            assert re.search(r"\w{4}", re.sub(r"<[^>]+>", "", found[1])), (
                f"{path.name}: no reference"
            )
        assert ".. math::" not in page, f"{path.name}: a formula is not rendered"
        assert ".. [" not in page, f"{path.name}: a reference is not rendered"
