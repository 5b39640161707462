import os
import signal
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero import cli
from flwr_hetero.fleet import processes
from flwr_hetero.fleet.processes import FleetFile, SuperNodeSpec


def main(arguments):
    return cli.main(["fleet", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["down", "--dir", "{}/none"], "dir must hold a fleet"),
        (["status", "--dir", "{}/none"], "dir must hold a fleet"),
        (["up", "--dir", "{}"], "dir must be empty or new"),
        (["up", "--dir", "{}/new", "--nodes", "0"], "--nodes must be a whole number"),
        (["up", "--dir", "{}/new", "--fleet", "warp"], "fleet must be a known name"),
        (["up", "--dir", "{}/new", "--cpu", "2"], "cpu must be a number in"),
        (["certificates", "{}/keys", "--node", "a/b"], "node must be a plain file name"),
    ],
)
def test_errors_are_one_line_and_a_status(tmp_path, capsys, arguments, message):
    (tmp_path / "something").touch()
    assert main([word.format(tmp_path) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_up_warns_of_other_users(capsys):
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "CAN RUN CODE AS YOU" in " ".join(capsys.readouterr().out.split())


def test_status_continues_stopped_processes(tmp_path, capsys):
    def state():
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    fleet = FleetFile(port=1, nodes=[SuperNodeSpec("node-0", cpu=0.5)])
    processes.prepare(tmp_path, fleet)
    fleet.save(tmp_path)
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    pid = processes.start(sleep, tmp_path, tmp_path / "logs" / "app.log", dict(os.environ))
    try:
        wait_until(lambda: processes.has_tag(pid, tmp_path), step_s=0.01)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state() == "T", step_s=0.01)
        assert main(["status", "--dir", str(tmp_path)]) == 0
        assert "ENDED, there are no limits" in capsys.readouterr().out
        assert state() != "T"
    finally:
        processes.end(tmp_path, grace_s=0.0)


# --- certificates ------------------------------------------------------------------


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_certificates_with_the_authority_key_offline(tmp_path, capsys):
    keys = tmp_path / "keys"
    assert main(["certificates", str(keys), "--host", "superlink.lan", "--node", "a", "c"]) == 0
    assert "goes to that device only" in capsys.readouterr().out
    (keys / "ca.key").rename(tmp_path / "offline.key")
    assert main(["certificates", str(keys), "--node", "b"]) == 0
    before = files(keys)
    assert {path + end for path in "abc" for end in ("", ".pub")} < before.keys()
    assert "ca.key" not in before
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 2
    assert "put ca.crt and ca.key there" in capsys.readouterr().err
    assert files(keys) == before
    (tmp_path / "offline.key").rename(keys / "ca.key")
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 0


def test_device_key_alone_needs_no_authority(tmp_path):
    assert main(["certificates", str(tmp_path / "keys"), "--node", "a"]) == 0
    assert files(tmp_path).keys() == {"a", "a.pub"}
