"""`flwr run` with a home and ports of its own, whose processes are always ended."""

import subprocess

from flwr_hetero.fleet import processes


def flwr_run(app, home, config, federation, timeout_s=1800, **variables):
    """Run an app in a simulation to its end; return what it printed.

    Its processes are found by their tag. A run takes a minute or two; only a hang reaches the
    time-out.
    """
    ports = processes.free_ports(2)
    environment = processes.environment(home) | {
        processes.TAG: str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    command = [processes.BIN / "flwr", "run", app, "--stream", "--run-config", config]
    command += ["--federation-config", f"{federation} client-resources-num-cpus=1"]
    how = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
    try:
        done = subprocess.run(command, env=environment | variables, cwd=home, **how)
    finally:
        processes.end(home)
    return done.stdout + done.stderr
