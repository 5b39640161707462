"""nginx/fleet-only.conf in front of a real SuperLink: devices come through, nothing else."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import wait_until

from flwr_hetero.fleet import processes

pytestmark = [pytest.mark.deploy, pytest.mark.nightly]
CONF = Path(__file__).parents[3] / "deploy" / "nginx" / "fleet-only.conf"


@pytest.fixture
def front(small_fleet, tmp_path):
    """Run nginx as this user; gives the port that devices dial."""
    nginx = shutil.which("nginx")
    if nginx is None or shutil.which("curl") is None:
        pytest.skip("nginx or curl is not installed")
    (port,) = processes.free_ports(1)
    keys = str(small_fleet.folder / "keys")
    address = small_fleet.file.address
    server = CONF.read_text().replace("listen 9092", f"listen 127.0.0.1:{port}")
    server = server.replace("127.0.0.1:8000", address).replace("/etc/flwr-hetero", keys)
    paths = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"pid {tmp_path}/pid;\ndaemon off;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{server}}}\n"
    )
    log = tmp_path / "nginx.log"
    # This is no process of the fleet: nginx overwrites its environment, and the tag with it.
    with log.open("wb") as out:
        process = subprocess.Popen(
            [nginx, "-c", str(conf), "-p", str(tmp_path)], stdout=out, stderr=out
        )
    try:
        wait_until(lambda: processes.listens(port) or process.poll() is not None, timeout_s=20)
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        process.terminate()  # the master ends its workers
        process.wait(timeout=20)


def test_supernodes_come_through_and_runs_do_not(small_fleet, front):
    old = small_fleet.file.node("node-0")
    small_fleet.end_process(old.pid, signal.SIGTERM)
    wait_until(lambda: small_fleet.online() == {"node-1"}, timeout_s=30)
    file = small_fleet.file
    file.node("node-0").superlink_port = front
    file.save(small_fleet.folder)
    small_fleet.start_node("node-0")
    small_fleet.wait_online(["node-0"])

    conf = small_fleet.folder / "home" / "config.toml"
    conf.write_text(conf.read_text().replace(small_fleet.file.address, f"127.0.0.1:{front}"))
    refused = small_fleet.flwr("supernode", "list", processes.CONNECTION, "--format", "json")
    assert '"success": true' not in refused.stdout
    certificate = small_fleet.folder / "keys" / "ca.crt"
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/"):
        assert status(f"https://127.0.0.1:{front}{path}", certificate) == "403", path


def status(url: str, certificate: Path) -> str:
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", certificate, url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
