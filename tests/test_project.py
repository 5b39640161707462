"""Metadata that must agree: of the package, its apps, and the workflows."""

import tomllib
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from packaging.requirements import Requirement

from flwr_hetero import __version__
from flwr_hetero._flwr import TRIED_WITH

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FLWR = next(text for text in PROJECT["dependencies"] if Requirement(text).name == "flwr")


def test_version_is_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == cited["version"] == __version__


# flwr's own use of pathspec
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("app", sorted((ROOT / "apps").iterdir()), ids=lambda app: app.name)
def test_app_has_what_the_hub_asks_for(app):
    table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    project = table["project"]
    hub = table["tool"]["flwr"]["app"]
    assert (project["name"], project["version"]) == (app.name, PROJECT["version"])
    assert project["license"] == {"file": "LICENSE"}
    assert (app / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (hub["fab-format-version"], hub["flwr-version-target"]) == (1, TRIED_WITH)
    assert project["dependencies"] == [FLWR]
    # else Flower installs what flwr needs, before each run and in front of ours
    assert table["tool"]["uv"]["exclude-dependencies"] == ["flwr"]
    # what `flwr run` sends to the SuperLink, without which each run would fail
    with ZipFile(BytesIO(build_fab_from_disk(app))) as archive:
        files = set(archive.namelist())
    modules = [path.partition(":")[0] for path in hub["components"].values()]
    assert {f"{module.replace('.', '/')}.py" for module in modules} < files


def test_workflows_run_what_people_run():
    def steps(name, job):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
        job = yaml.safe_load(text)["jobs"][job]
        return [step.get("run") for step in job["steps"]], job

    run, tests = steps("tests", "tests")
    assert ".ci/run" in run
    assert "mkdocs build" in steps("docs", "build")[0]
    pythons = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text]
    assert tests["strategy"]["matrix"]["python"] == pythons
