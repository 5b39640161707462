"""What deploy/ hands out: units, environment files, front and scripts, checked without a fleet."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

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


def check_options(command):
    """Check that a command has options, that they exist, and that it is a secure one."""
    options = [word.partition("=")[0] for word in command if word.startswith("--")]
    first = next(i for i, word in enumerate(command) if word.startswith("--"))
    text = run(BIN / Path(command[0]).name, *command[1:first], "--help").stdout
    assert len(options) >= 4
    assert set(options) <= set(re.findall(r"--[a-z-]+", text))
    assert "--insecure" not in options


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_uses_options_and_variables_that_exist(unit):
    command = command_of(unit)
    check_options(command)
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
    [entry] = re.findall(r"^ENTRYPOINT (.+)$", text.replace("\\\n", " "), re.MULTILINE)
    script = json.loads(entry)[2].split()
    assert script[:3] == ["exec", "flwr-hetero", "supernode"]
    check_options(script[1:])
    assert {'"$SUPERLINK"', '"$NODE_CONFIG"', '"$@"'} <= {*script}


def test_compose_file_agrees_with_itself_and_the_readme():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    superlink = services["superlink"]
    build = superlink["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    check_options([*superlink["entrypoint"], *superlink["command"]])
    options = dict(word.removeprefix("--").partition("=")[::2] for word in superlink["command"])
    assert superlink["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    readme = (DEPLOY / "README.md").read_text()
    [made] = re.findall(r"make-certificates \$FLEET/keys --host (.+) --node (.+)", readme)
    hosts, nodes = (words.split() for words in made)
    assert services.keys() == {"superlink", *nodes}
    assert {"superlink", "localhost", "127.0.0.1"} <= set(hosts)
    keys = ["ca.crt", "superlink.crt", "superlink.key", *(f"nodes/{node}" for node in nodes)]
    folders = re.search(r"mkdir (\$FLEET.+)", readme)[1].replace("$FLEET/", "").split()
    partitions = set()
    for name, service in services.items():
        assert service["image"] == superlink["image"]
        mounts = [volume.split(":") for volume in service["volumes"]]
        inside = {target for _, target, *_ in mounts}
        for source, _, *mode in mounts:
            made_by_readme = source.removeprefix("${FLEET}/")
            is_key = made_by_readme.removeprefix("keys/") in keys
            assert is_key == (mode == ["ro"])
            assert is_key or made_by_readme in folders
        assert service["environment"]["HOME"] in inside
        if name in nodes:
            assert f"${{FLEET}}/keys/nodes/{name}:/keys/node.key:ro" in service["volumes"]
            # what the image's command reads
            assert {"/keys/ca.crt", "/keys/node.key"} <= inside
            assert service["environment"]["SUPERLINK"] == f"superlink:{options['port']}"
            partitions.add(service["environment"]["NODE_CONFIG"])
        else:
            files = {value for option, value in options.items() if option.startswith("ssl")}
            assert files <= inside
    assert partitions == {f"partition-id={i} num-partitions=2" for i in range(2)}
