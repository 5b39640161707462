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


def test_certificates_with_the_authority_key_offline(tmp_path, capsys):
    def files():
        return {path.name: path.read_bytes() for path in keys.rglob("*") if path.is_file()}

    keys = tmp_path / "keys"
    assert main(["certificates", str(keys), "--node", "x"]) == 0
    assert files().keys() == {"x", "x.pub"}  # a device's key alone needs no authority
    assert main(["certificates", str(keys), "--host", "superlink.lan", "--node", "a", "c"]) == 0
    assert "goes to that device only" in capsys.readouterr().out
    (keys / "ca.key").rename(tmp_path / "offline.key")
    assert main(["certificates", str(keys), "--node", "b"]) == 0
    before = files()
    assert {path + end for path in "abcx" for end in ("", ".pub")} < before.keys()
    assert "ca.key" not in before
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 2
    assert "put ca.crt and ca.key there" in capsys.readouterr().err
    assert files() == before
    (tmp_path / "offline.key").rename(keys / "ca.key")
    assert main(["certificates", str(keys), "--host", "superlink.lan"]) == 0
