"""What real nodes need of the system: only Linux has all of it."""

import os
import platform
import signal


def why_not_here() -> str:
    """Return why this system runs no fleet of processes; "" if it can."""
    # processes are forked, stopped by signals and found in /proc; macOS has no /proc
    has_all = hasattr(os, "fork") and hasattr(signal, "SIGSTOP") and platform.system() == "Linux"
    return "" if has_all else f"it needs forks, signals and /proc of Linux, not {platform.system()}"


def check_linux(what: str) -> None:
    """Refuse what this system cannot do, before any of it is done."""
    if why := why_not_here():
        raise RuntimeError(f"{what} cannot run here: {why}. LocalGrid emulates a fleet anywhere.")
