"""Flower's SuperNode, ended when it gives its SuperLink up: ``python -m ... OPTIONS``."""

import signal
import traceback
from importlib.metadata import entry_points


def main() -> None:
    """Run ``flower-supernode``, and end it as SIGTERM does when it comes back."""
    (command,) = entry_points(group="console_scripts", name="flower-supernode")
    try:
        command.load()()
    except Exception:
        traceback.print_exc()
    # A thread that serves its ClientApps keeps the process when the loop that talks to the
    # SuperLink is over, as by an expired certificate: nothing would start it again.
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
