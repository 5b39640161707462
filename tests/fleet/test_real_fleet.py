import asyncio
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flwr_hetero.cli import main as report_main
from flwr_hetero.fleet import named_fleet
from flwr_hetero.fleet import processes as marked
from flwr_hetero.fleet import throttle as warden
from flwr_hetero.fleet.cli import main
from flwr_hetero.fleet.fleet_file import FleetFile, Node, nodes_of
from flwr_hetero.fleet.processes import environment, prepare, superlink_command, supernode_command
from flwr_hetero.fleet.real_fleet import RealFleet


def fleet_file(**changes):
    nodes = [Node("node-0", port=2, link_port=3, uplink_mbps=5.0), Node("node-1", cpu=0.5, port=4)]
    return FleetFile(**{"port": 1, "nodes": nodes} | changes)


def test_file_survives_saving(tmp_path):
    fleet = fleet_file(database=True, superlink_pid=7)
    fleet.save(tmp_path)
    assert FleetFile.load(tmp_path) == fleet
    assert json.loads((tmp_path / "fleet.json").read_text())["nodes"][1]["cpu"] == 0.5


def test_the_papers_fleet_keeps_its_ratios():
    cpus = [node.cpu for node in nodes_of(named_fleet("paper-5", 5))]
    assert cpus == [1.0, 0.5, 0.25, 0.125, 0.025]
    slow = [node.cpu for node in nodes_of(named_fleet("paper-5", 5), cpu=0.4)]
    assert slow == [0.4 * cpu for cpu in cpus]


@pytest.mark.parametrize(
    ("node", "needed"),
    [
        (Node("a"), False),
        (Node("a", cpu=0.9), True),
        (Node("a", downlink_mbps=1.0), True),
    ],
)
def test_a_warden_is_there_only_if_it_has_work(node, needed):
    assert fleet_file(nodes=[node]).needs_warden is needed


def test_commands_ask_for_tls_authentication_and_no_installing(tmp_path):
    fleet = fleet_file()
    superlink = superlink_command(tmp_path, fleet)
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} < set(superlink)
    assert "--insecure" not in superlink
    assert "--database" not in superlink
    assert "--database" in superlink_command(tmp_path, fleet_file(database=True))
    first, second = (supernode_command(tmp_path, fleet, node) for node in fleet.nodes)
    assert first[first.index("--superlink") + 1] == "127.0.0.1:3"  # through its link
    assert second[second.index("--superlink") + 1] == "127.0.0.1:1"
    assert second[second.index("--node-config") + 1] == "partition-id=1 num-partitions=2"
    for command in (first, second):
        assert {"--root-certificates", "--auth-supernode-private-key"} < set(command)
        assert "--allow-runtime-dependency-installation" not in command


def test_prepared_folder_has_all_that_the_commands_name(tmp_path):
    fleet = fleet_file()
    prepare(tmp_path, fleet)
    for command in (
        superlink_command(tmp_path, fleet),
        *(supernode_command(tmp_path, fleet, n) for n in fleet.nodes),
    ):
        for word in command[1:]:
            if word.startswith("/"):
                assert (tmp_path / word).is_file(), word


def test_down_removes_its_own_files_only(tmp_path):
    folder = tmp_path / "fleet"
    prepare(folder, fleet_file())
    fleet_file().save(folder)
    (folder / "results.txt").write_text("mine")
    assert RealFleet(folder).down() == 0
    assert [path.name for path in folder.iterdir()] == ["results.txt"]


def test_down_removes_an_empty_folder(tmp_path):
    folder = tmp_path / "fleet"
    folder.mkdir()
    fleet_file().save(folder)
    RealFleet(folder).down()
    assert not folder.exists()


def test_down_removes_what_a_hard_end_leaves(tmp_path):
    folder = tmp_path / "fleet"
    folder.mkdir()
    fleet_file().save(folder)
    for name in ("state.db", "state.db-wal", "state.db-shm", "fleet.json.draft"):
        (folder / name).touch()
    RealFleet(folder).down()
    assert not folder.exists()


def test_an_up_that_fails_at_once_leaves_what_down_can_end(tmp_path, monkeypatch):
    def fail(folder, fleet):
        (folder / "keys").mkdir()
        raise OSError("disk full")

    monkeypatch.setattr("flwr_hetero.fleet.processes.prepare", fail)
    fleet = RealFleet(tmp_path / "fleet")
    with pytest.raises(OSError, match="disk full"):
        fleet.up(named_fleet("uniform", 2))
    assert fleet.down() == 0
    assert not fleet.folder.exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_is_for_the_owner_only(tmp_path, monkeypatch, is_there):
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
    ("arguments", "message"),
    [
        (["down", "--dir", "{}/none"], "dir must hold a fleet"),
        (["status", "--dir", "{}/none"], "dir must hold a fleet"),
        (["up", "--dir", "{}"], "dir must be empty or new"),
        (["up", "--dir", "{}/new", "--nodes", "0"], "num_nodes must be a whole number"),
        (["up", "--dir", "{}/new", "--fleet", "warp"], "fleet must be a known name"),
        (["up", "--dir", "{}/new", "--cpu", "2"], "cpu must lie in"),
        (["certificates", "{}/keys", "--node", "a/b"], "node must be a plain file name"),
    ],
)
def test_errors_are_one_line_and_a_status(tmp_path, capsys, arguments, message):
    (tmp_path / "something").touch()
    assert main([word.format(tmp_path) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_packages_own_command_has_it_too(tmp_path, capsys):
    assert report_main(["fleet", "status", "--dir", str(tmp_path)]) == 2
    assert "flwr-hetero fleet: error: dir must hold a fleet" in capsys.readouterr().err


def test_certificates_for_devices_elsewhere(tmp_path, capsys):
    keys = tmp_path / "keys"
    assert main(["certificates", str(keys), "--host", "superlink.lan", "--node", "a", "b"]) == 0
    assert main(["certificates", str(keys), "--node", "c"]) == 0  # the same authority again
    assert sorted(path.name for path in (keys / "nodes").iterdir()) == [
        "a", "a.pub", "b", "b.pub", "c", "c.pub",
    ]  # fmt: skip
    assert "goes to that device only" in capsys.readouterr().out


def test_an_authority_whose_key_is_offline_takes_devices_and_signs_nothing(tmp_path, capsys):
    def files():
        return {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}

    keys = tmp_path / "keys"
    assert main(["certificates", str(keys), "--host", "superlink.lan", "--node", "a"]) == 0
    (keys / "ca.key").rename(tmp_path / "offline.key")
    assert main(["certificates", str(keys), "--node", "b"]) == 0
    assert not (keys / "ca.key").exists()
    before = files()
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 2
    assert "put ca.crt and ca.key there" in capsys.readouterr().err
    assert files() == before
    (tmp_path / "offline.key").rename(keys / "ca.key")
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 0


@pytest.fixture
def proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize("spelling", ["no_proxy", "NO_PROXY"])
def test_the_fleet_is_reached_without_a_proxy_and_so_are_the_users_own_hosts(
    tmp_path, proxy, spelling
):
    proxy.setenv(spelling, "example.org")
    made = environment(tmp_path / "home")
    for name in ("no_proxy", "NO_PROXY"):
        assert made[name] == "example.org,127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"https_proxy": "http://proxy:3128"}, True),
        ({"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "example.org"}, True),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "127.0.0.1"}, False),
    ],
)
def test_the_printed_line_can_be_typed_as_it_stands(tmp_path, proxy, settings, needed):
    for name, value in settings.items():
        proxy.setenv(name, value)
    fleet = RealFleet(tmp_path / "my fleet")
    words = shlex.split(fleet.run_line())
    assert words[0] == f"FLWR_HOME={fleet.folder}/home"
    assert any(word.startswith("no_proxy=") for word in words) is needed
    assert words[-5:] == ["flwr", "run", "apps/tifl", "fleet", "--stream"]


def test_nobody_is_online_before_registration(tmp_path):
    prepare(tmp_path, fleet_file())
    assert RealFleet(tmp_path).online() == set()


def test_nobody_is_online_if_the_superlink_says_nothing(tmp_path, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("flwr", timeout)

    prepare(tmp_path, fleet_file())
    (tmp_path / "home" / "nodes.json").write_text("{}")
    monkeypatch.setattr(subprocess, "run", hang)
    assert RealFleet(tmp_path).online() == set()


def test_without_a_superlink_nobody_is_waited_for(tmp_path):
    prepare(tmp_path, fleet_file())
    fleet_file().save(tmp_path)
    (tmp_path / "logs" / "superlink.log").write_text("out of memory")
    with pytest.raises(RuntimeError, match=r"(?s)superlink did not come up.*out of memory"):
        RealFleet(tmp_path).wait_online(["node-0"], timeout_s=300)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_whom_a_killed_warden_had_stopped_runs_on_when_status_says_so(tmp_path, capsys):
    prepare(tmp_path, fleet_file())
    fleet_file().save(tmp_path)
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    pid = marked.start(sleep, tmp_path, tmp_path / "logs" / "app.log", dict(os.environ))
    try:
        while not marked.has_mark(pid, tmp_path):
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) != "T":
            time.sleep(0.01)
        assert main(["status", "--dir", str(tmp_path)]) == 0
        assert "ENDED, there are no limits" in capsys.readouterr().out
        assert state_of(pid) != "T"
    finally:
        marked.end(tmp_path, grace_s=0.0)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_warden_looks_at_processes_of_its_fleet_only(tmp_path, monkeypatch, is_ours):
    looked = []
    slow = Node("node-0", cpu=0.5, pid=os.getpid())
    fleet_file(nodes=[slow]).save(tmp_path)
    monkeypatch.setattr(warden, "has_mark", lambda pid, folder: is_ours)
    monkeypatch.setattr(warden.Throttle, "look", lambda _, pid: looked.append(pid))
    monkeypatch.setattr(warden.Throttle, "release", lambda _, pid: looked.append(-pid))

    async def watch():
        await asyncio.wait_for(warden.keep_watch(tmp_path), timeout=0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(watch())
    assert set(looked) == ({slow.pid, -slow.pid} if is_ours else set())


def test_up_says_who_else_can_run_code(capsys):
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "CAN RUN CODE AS YOU" in " ".join(capsys.readouterr().out.split())


def test_a_devices_key_alone_makes_no_authority(tmp_path):
    assert main(["certificates", str(tmp_path / "keys"), "--node", "a"]) == 0
    made = {path.name for path in (tmp_path / "keys").rglob("*") if path.is_file()}
    assert made == {"a", "a.pub"}
