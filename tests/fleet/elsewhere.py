"""The package as on systems without names of POSIX, or without /proc: ``FOLDER SYSTEM ...``.

Each system is a fork of this process. What others have imported by then keeps what it has, and this
package finds what it would find there.
"""

import asyncio  # noqa: F401
import multiprocessing.connection  # noqa: F401
import os
import pkgutil
import platform
import signal
import subprocess  # noqa: F401
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path

import filelock  # noqa: F401
import plotly.io  # noqa: F401
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline")
OF_POSIX = {
    os: (
        *("fork", "forkpty", "killpg", "getpgid", "setsid", "getuid", "geteuid", "getgid", "nice"),
        *("sysconf", "waitid", "WNOHANG", "WNOWAIT", "WEXITED", "P_PID", "O_NOFOLLOW", "uname"),
        *("O_DIRECTORY", "O_CLOEXEC", "getloadavg", "statvfs", "mkfifo", "chown", "fchmod"),
        *("sched_getaffinity", "sched_setaffinity", "register_at_fork", "ttyname", "wait3"),
    ),
    signal: (
        *("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD"),
        *("SIGPIPE", "SIGQUIT", "SIGTSTP", "alarm", "setitimer", "pause", "pthread_kill"),
    ),
    time: ("clock_gettime", "CLOCK_MONOTONIC", "CLOCK_BOOTTIME", "CLOCK_REALTIME", "tzset"),
}
OF_LINUX = {os: ("sched_getaffinity", "sched_setaffinity"), time: ("CLOCK_BOOTTIME",)}


def no_proc(event, arguments):
    """Fail as for a folder that is not there."""
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc/"):
        raise FileNotFoundError(arguments[0])


def become(system):
    """Take away what the other system does not have, and import all of the package."""
    for module, names in (OF_POSIX if system == "Windows" else OF_LINUX).items():
        for name in names:
            vars(module).pop(name, None)
    if system == "Windows":
        sys.modules.update(dict.fromkeys(MODULES))
        # there it is always set, and torch asks for it
        os.environ["USERNAME"] = "user"
    platform.system = lambda: system
    sys.addaudithook(no_proc)
    package = import_module("flwr_hetero")
    for found in pkgutil.walk_packages(package.__path__, "flwr_hetero."):
        if not found.name.endswith("__main__"):
            import_module(found.name)


def app():
    from flwr_hetero.mod import hetero

    app = ClientApp(mods=[hetero])

    @app.train()
    def train(message, context):
        model = torch.nn.Linear(2, 1)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in hetero.batches(torch.utils.data.DataLoader(data, batch_size=2), message):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict())}
        content["metrics"] = MetricRecord({"num-examples": 8})
        return Message(RecordDict(content), reply_to=message)

    return app


def run(folder, rounds, resume):
    from flwr_hetero.fleet import DeviceProfile, LocalGrid
    from flwr_hetero.strategy import FedSlice, Recorded

    grid = LocalGrid(app(), [DeviceProfile(1.0), DeviceProfile(0.5), DeviceProfile(0.25)])
    strategy = Recorded(FedSlice(FedAvg(fraction_evaluate=0.0)), run_dir=folder, resume=resume)
    initial = ArrayRecord(torch.nn.Linear(2, 1).state_dict())
    return strategy.start(grid, initial, num_rounds=rounds)


def check(system, folder):
    from flwr_hetero.cli import main
    from flwr_hetero.fleet import RealFleet, supernode

    run(folder, 2, resume=False)
    assert len(run(folder, 3, resume=True).train_metrics_clientapp) == 3
    assert b"\r" not in (folder / "history.jsonl").read_bytes()
    assert (folder / "report.html").stat().st_size
    assert main(["report", str(folder)]) == 0
    assert main(["doctor"]) == 0
    assert main(["fleet", "certificates", str(folder / "keys"), "--host", "a.example"]) == 0
    assert main(["fleet", "up", "--dir", str(folder / "fleet")]) == 2
    fleet = RealFleet(folder / "fleet")
    with pytest.raises(RuntimeError, match=f"of Linux, not {system}. LocalGrid emulates a fleet"):
        fleet.up(1)
    assert not fleet.folder.exists()
    assert system in supernode.why_cold([])


def check_all(folder, systems):
    for system in systems:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads, of which none holds a lock here
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            become(system)
            check(system, folder / system)
            return
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"{system} failed"


if __name__ == "__main__":
    warnings.simplefilter("error")
    check_all(Path(sys.argv[1]), sys.argv[2:])
