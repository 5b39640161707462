import shlex
import stat
import subprocess

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


def test_wait_online_says_how_many_are_there(fleet, monkeypatch, caplog):
    seen = [set(), set(), {"node-0"}, {"node-0", "node-1"}]
    monkeypatch.setattr(fleet, "online", lambda: seen.pop(0))
    monkeypatch.setattr(fleet, "is_alive", lambda pid: True)
    monkeypatch.setattr("flwr_hetero.fleet.real_fleet.time.sleep", lambda seconds: None)
    with caplog.at_level("INFO", logger="flwr"):
        fleet.wait_online(["node-0", "node-1"])
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"{count} of 2 SuperNodes are online" for count in (0, 1)]


@pytest.mark.parametrize("foreign", [(), ("results.txt",)])
def test_down_removes_its_own_files_only(fleet, foreign):
    left = ("state.db", "state.db-wal", "state.db-shm")  # by a hard end
    for name in (*left, *foreign):
        (fleet.folder / name).touch()
    assert fleet.down() == 0
    assert fleet.folder.exists() == bool(foreign)
    assert tuple(path.name for path in fleet.folder.glob("*")) == foreign
    with pytest.raises(ValueError, match="dir must hold a fleet"):
        fleet.down()


@pytest.mark.parametrize("is_there", [True, False])
def test_up_that_fails_leaves_what_down_can_end(tmp_path, monkeypatch, is_there):
    folder = tmp_path / "above" / "fleet"
    if is_there:
        folder.mkdir(mode=0o755, parents=True)

    def stop(self):
        raise RuntimeError("enough")

    monkeypatch.setattr(RealFleet, "start_superlink", stop)
    fleet = RealFleet(folder)
    for error, match in ((RuntimeError, "enough"), (ValueError, "dir must be empty or new")):
        with pytest.raises(error, match=match):
            fleet.up(named_fleet("uniform", 2))
    made = [path for path in folder.iterdir() if path.is_dir()]
    assert {path.name for path in made} == {"keys", "home", "logs", "homes"}
    for path in (folder, *made):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert fleet.down() == 0
    assert not folder.exists()


@pytest.mark.parametrize(("num_nodes", "tiers", "clients"), [(1, 1, 1), (3, 3, 1), (7, 3, 2)])
def test_run_line_can_be_typed(tmp_path, monkeypatch, num_nodes, tiers, clients):
    monkeypatch.setenv("no_proxy", "example.org")
    fleet = RealFleet(tmp_path / "my fleet")
    fleet.folder.mkdir()
    nodes = [SuperNodeSpec(f"node-{i}") for i in range(num_nodes)]
    FleetFile(port=1, nodes=nodes).save(fleet.folder)
    assert shlex.split(fleet.run_line()) == [
        *(f"FLWR_HOME={fleet.folder}/home", "no_proxy=example.org,127.0.0.1,localhost"),
        *("flwr-hetero", "run", "apps/tifl", "fleet", "--run-config"),
        f"fleet='real' num-tiers={tiers} clients-per-round={clients}",
    ]


def test_online_nodes_are_those_the_superlink_names(fleet, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("flwr", timeout)

    assert fleet.online() == set()  # before registration
    (fleet.folder / "home" / "nodes.json").write_text('{"7": "node-0", "8": "node-1"}')
    listed = '{"nodes": [{"node-id": "%s", "status": "%s"}, {"node-id": "9", "status": "online"}]}'
    for word, names in (("online", {"node-1"}), ("offline", set())):
        told = subprocess.CompletedProcess((), 0, listed % ("8", word))
        monkeypatch.setattr(subprocess, "run", lambda *_, told=told, **__: told)
        assert fleet.online() == names
    monkeypatch.setattr(subprocess, "run", hang)
    assert fleet.online() == set()


@pytest.mark.parametrize("ended", ["superlink", "node-1"])
def test_wait_online_names_what_has_ended(fleet, monkeypatch, ended):
    (fleet.folder / "logs" / f"{ended}.log").write_text("out of memory")
    pids = {"superlink": 1, "node-0": 2, "node-1": 3}
    nodes = [SuperNodeSpec(name, pid=pids[name]) for name in ("node-0", "node-1")]
    FleetFile(port=1, superlink_pid=1, nodes=nodes).save(fleet.folder)
    monkeypatch.setattr(fleet, "online", set)
    monkeypatch.setattr(fleet, "is_alive", lambda pid: pid != pids[ended])
    with pytest.raises(RuntimeError, match=rf"(?s){ended} did not come up.*out of memory"):
        fleet.wait_online(["node-0", "node-1"])
