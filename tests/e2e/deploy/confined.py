"""Run a command under a unit's limits that need no systemd: ``confined.py UNIT COMMAND ...``.

For the system's Python with Debian's python3-seccomp: system calls and address families are
filtered, capabilities dropped for good, new files private.
"""

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

PR_CAPBSET_DROP = 24
LAST_CAPABILITY = 40


def system_calls(names):
    """Return what is in systemd's groups of system calls."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True
    ).stdout
    groups = dict(re.findall(r"^(@\S+)\n((?: .*\n)*)", listed, re.MULTILINE))
    calls = set(names)
    while nested := calls & groups.keys():
        calls -= nested
        for name in nested:
            calls.update(re.findall(r"^ +([^#\s]\S*)", groups[name], re.MULTILINE))
    return calls


def main(unit, command):
    """Limit this process, and become the command."""
    import seccomp  # not in a virtual environment

    settings = dict(re.findall(r"^(\w+)=(.*)$", Path(unit).read_text(), re.MULTILINE))
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["SystemCallErrorNumber"] == "EPERM"
    allowed = system_calls(settings["SystemCallFilter"].split())
    os.umask(int(settings["UMask"], 8))
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(LAST_CAPABILITY + 1):
        dropped = libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
        assert dropped, os.strerror(ctypes.get_errno())
    rules = seccomp.SyscallFilter(seccomp.ERRNO(1))  # EPERM; it sets no_new_privs too
    for name in allowed - {"socket"}:
        try:
            rules.add_rule(seccomp.ALLOW, name)
        except (RuntimeError, ValueError):  # a system call of another machine
            assert name not in ("read", "execve", "futex"), name
    for family in settings["RestrictAddressFamilies"].split():
        domain = seccomp.Arg(0, seccomp.EQ, getattr(socket, family))
        rules.add_rule(seccomp.ALLOW, "socket", domain)
    rules.load()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
