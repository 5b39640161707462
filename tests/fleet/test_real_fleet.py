import shlex
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from flwr_hetero.fleet import RealFleet, named_fleet
from flwr_hetero.fleet.processes import FleetFile, SuperNodeSpec, prepare

FILE = FleetFile(port=1, nodes=[SuperNodeSpec("node-0", port=2), SuperNodeSpec("node-1", port=4)])


@pytest.fixture
def fleet(tmp_path):
    """A fleet of which nothing runs."""
    folder = tmp_path / "fleet"
    prepare(folder, FILE)
    FILE.save(folder)
    return RealFleet(folder)


@pytest.mark.parametrize("foreign", [(), ("results.txt",)])
def test_down_removes_its_own_files_only(fleet, foreign):
    left = ("state.db", "state.db-wal", "state.db-shm", "fleet.json.draft")  # by a hard end
    for name in (*left, *foreign):
        (fleet.folder / name).touch()
    (fleet.folder / "fleet.json").write_text("{")  # torn
    assert fleet.down() == 0
    assert fleet.folder.exists() == bool(foreign)
    assert tuple(path.name for path in fleet.folder.glob("*")) == foreign


def test_up_that_fails_leaves_what_down_can_end(tmp_path, monkeypatch):
    def fail(folder, fleet):
        (folder / "keys").mkdir()
        raise OSError("disk full")

    monkeypatch.setattr("flwr_hetero.fleet.processes.prepare", fail)
    fleet = RealFleet(tmp_path / "fleet")
    with pytest.raises(OSError, match="disk full"):
        fleet.up(named_fleet("uniform", 2))
    assert fleet.down() == 0
    assert not fleet.folder.exists()


def test_of_two_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """Both have seen that it is empty."""
    folder, began = tmp_path / "fleet", Barrier(2)
    touch, started = Path.touch, []

    def wait_and_touch(path, **settings):
        began.wait(30)
        touch(path, **settings)

    def prepare(folder, fleet):
        started.append(fleet)
        raise OSError("enough")

    def up():
        with pytest.raises((OSError, ValueError), match=r"enough|must be empty or new"):
            RealFleet(folder).up(named_fleet("uniform", 1))

    monkeypatch.setattr(Path, "touch", wait_and_touch)
    monkeypatch.setattr("flwr_hetero.fleet.processes.prepare", prepare)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(up) for _ in range(2)]:
            done.result()
    assert len(started) == 1
    assert RealFleet(folder).file == started[0]


@pytest.mark.parametrize("is_there", [True, False])
def test_folder_is_for_the_owner_only(tmp_path, monkeypatch, is_there):
    folder = tmp_path / "above" / "fleet"
    if is_there:
        folder.mkdir(mode=0o755, parents=True)
    seen = []

    def stop(self):
        seen.extend(path for path in folder.iterdir() if path.is_dir())
        raise RuntimeError("enough")

    monkeypatch.setattr(RealFleet, "start_superlink", stop)
    with pytest.raises(RuntimeError, match="enough"):
        RealFleet(folder).up(named_fleet("uniform", 1))
    assert {path.name for path in seen} == {"keys", "home", "logs", "homes"}
    for path in (folder, *seen):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"https_proxy": "http://proxy:3128"}, True),
        ({"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "example.org"}, True),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1"}, False),
    ],
)
@pytest.mark.parametrize(("num_nodes", "tiers", "clients"), [(1, 1, 1), (3, 3, 1), (7, 3, 2)])
def test_run_line_can_be_typed(tmp_path, monkeypatch, settings, needed, num_nodes, tiers, clients):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fleet = RealFleet(tmp_path / "my fleet")
    fleet.folder.mkdir()
    FleetFile(port=1, nodes=[SuperNodeSpec(f"node-{i}") for i in range(num_nodes)]).save(
        fleet.folder
    )
    words = shlex.split(fleet.run_line())
    assert words[0] == f"FLWR_HOME={fleet.folder}/home"
    assert any(word.startswith("no_proxy=") for word in words) is needed
    assert words[-6:-1] == ["flwr-hetero", "run", "apps/tifl", "fleet", "--run-config"]
    assert words[-1] == f"fleet='real' num-tiers={tiers} clients-per-round={clients}"


def test_online_nodes_are_those_the_superlink_names(fleet, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("flwr", timeout)

    assert fleet.online() == set()  # before registration
    (fleet.folder / "home" / "nodes.json").write_text("{}")
    monkeypatch.setattr(subprocess, "run", hang)
    assert fleet.online() == set()


def test_wait_online_without_a_superlink_fails(fleet):
    (fleet.folder / "logs" / "superlink.log").write_text("out of memory")
    with pytest.raises(RuntimeError, match=r"(?s)superlink did not come up.*out of memory"):
        fleet.wait_online(["node-0"], timeout_s=300)


def test_wait_online_names_the_node_that_ended(fleet, monkeypatch):
    (fleet.folder / "logs" / "node-1.log").write_text("refused")
    nodes = [SuperNodeSpec("node-0", pid=2), SuperNodeSpec("node-1", pid=3)]
    FleetFile(port=1, superlink_pid=1, nodes=nodes).save(fleet.folder)
    monkeypatch.setattr(fleet, "online", set)
    monkeypatch.setattr(fleet, "is_alive", lambda pid: pid != 3)
    with pytest.raises(RuntimeError, match=r"(?s)node-1 did not come up.*refused"):
        fleet.wait_online(["node-0", "node-1"], timeout_s=1)
