"""What real nodes need of the operating system, which only Linux has."""

import os
import platform
import signal


def why_not_here() -> str:
    """Return why this system cannot run real nodes; "" if it can."""
    has_all = hasattr(os, "fork") and hasattr(signal, "SIGSTOP") and platform.system() == "Linux"
    return "" if has_all else f"it needs forks, signals and /proc of Linux, not {platform.system()}"
