"""What deploy/ hands out: units, environment files, front and scripts, checked without a fleet."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy
DEPLOY = Path(__file__).parents[3] / "deploy"
BIN = Path(sys.executable).parent
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")


def run(*command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done


def settings_of(unit: Path) -> dict[str, str]:
    name = unit.stem.removeprefix("flower-")
    lines = (DEPLOY / "environment" / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def command_of(unit: Path) -> list[str]:
    text = unit.read_text().replace("\\\n", " ")
    return re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)[1].split()


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_valid_and_expose_little(unit, tmp_path):
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/flwr-hetero/bin/", f"{BIN}/"))
    done = run(ANALYZE, "verify", copy)
    assert unit.name not in done.stderr, done.stderr
    security = [ANALYZE, "security", "--offline=yes", unit]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    (level,) = re.findall(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(level) <= 4, done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_uses_options_and_variables_that_exist(unit):
    command = command_of(unit)
    options = {word for word in command if word.startswith("--")}
    program = command[1 : command.index(min(options, key=command.index))]
    text = run(BIN / Path(command[0]).name, *program, "--help").stdout
    assert len(options) >= 4
    assert options <= set(re.findall(r"--[a-z-]+", text))
    assert "--insecure" not in options
    variables = set(re.findall(r"\$\{(\w+)}", " ".join(command)))
    assert variables
    assert variables <= set(settings_of(unit))


def test_superlink_listens_to_its_own_machine_only():
    settings = settings_of(DEPLOY / "systemd" / "flower-superlink.service")
    assert settings["HOST"] == "127.0.0.1"
    front = (DEPLOY / "nginx" / "fleet-only.conf").read_text()
    assert f"proxy_pass https://127.0.0.1:{settings['PORT']};" in front
    assert re.findall(r"location (\S+)", front) == ["/v1/fleet/", "/"]


def test_script_makes_keys(tmp_path):
    options = ("--host", "localhost", "--node", "a")
    run(DEPLOY / "make-certificates", tmp_path / "keys", *options, env={"PYTHON": sys.executable})
    assert (tmp_path / "keys" / "nodes" / "a.pub").exists()


def test_container_copies_what_it_needs_and_keeps_its_state():
    text = (DEPLOY / "Containerfile").read_text()
    command = re.search(r"podman run (.+?)\n#\n", text, re.DOTALL)[1]
    [home] = re.findall(r"--env FLWR_HOME=(\S+)", command)
    assert f":{home}:" in command
    assert "--user $(id -u flwr):$(id -g flwr)" in command
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = [line.split() for line in text.splitlines() if line.startswith("COPY")]
    copied = [word for words in lines for word in words[1:-1]]
    assert {"pyproject.toml", "constraints.txt", *packages} <= set(copied)
    assert all((DEPLOY.parent / name).exists() for name in copied)
