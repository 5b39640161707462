"""Wait for other processes: so long that only a hang fails, however busy the machine is."""

import time


def wait_until(condition, timeout_s=300.0, step_s=0.05, meanwhile=lambda: None) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s"
        meanwhile()
        time.sleep(step_s)
