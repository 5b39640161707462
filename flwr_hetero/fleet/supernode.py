"""Flower's SuperNode, ended when it gives its SuperLink up: ``python -m ... OPTIONS``."""

import signal
import traceback

from flwr_hetero.fleet import _flwr
from flwr_hetero.fleet.message_times import tell_times


def main() -> None:
    """Run ``flower-supernode``, and end it as SIGTERM does when it comes back."""
    if not _flwr.why_untried():
        tell_times()
    try:
        _flwr.run_command("flower-supernode")
    except Exception:
        traceback.print_exc()
    # A thread that serves its ClientApps keeps the process when the loop that talks to the
    # SuperLink is over, as by an expired certificate: nothing would start it again.
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
