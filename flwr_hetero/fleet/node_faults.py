"""Faults of a real node, each of which becomes one line in its log, with the remedy."""

import logging
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from flwr_hetero.fleet import _flwr

REPEAT_S = 60.0  # a node that keeps failing repeats the first cause after so many seconds
INSTALL_S = 2.0  # longest time in which another node is expected to install an app
MOST_AHEAD_S = 3.0  # Flower allows 5 s, and the SuperLink gives its time in whole seconds
MOST_BEHIND_S = 300.0
UNAUTHORIZED = 401
SERVER_ERROR = 500
NEW_CERTIFICATE = "flwr-hetero fleet certificates DIR --host NAME"
HINTS = {
    r"Errno (28|122)\b|No usable temporary directory": "the disk of this node is full: free some "
    "space for FLWR_HOME and temporary files, for instance by deleting old apps in FLWR_HOME/apps",
    r"Errno (13|30)\b": "this user may not write there: give the folder to it, or set FLWR_HOME",
    r"certificate is not yet valid": "the SuperLink's certificate is not valid yet by the clock of "
    "this device ({now}): set the clock",
    r"certificate has expired": "the SuperLink's certificate has expired by the clock of this "
    f"device ({{now}}): set the clock, or if it is right, make a new one: {NEW_CERTIFICATE}",
    r"(IP address|Hostname) mismatch": "the SuperLink's certificate is not for the address in "
    f"--superlink: use one of its names, or make a new one: {NEW_CERTIFICATE}",
    r"CERTIFICATE_VERIFY_FAILED": "the SuperLink's certificate was not signed by the authority in "
    "--root-certificates: copy the ca.crt of the SuperLink's authority to this device",
    r'"code": ?2004\b': "the SuperLink does not accept this node's key: wait a minute if the "
    "node was killed just now, or else register the key: flwr supernode register KEY.pub",
}
"""What to do about an error, by a pattern of its text. The first pattern that matches counts."""

_log = logging.getLogger("flwr")


def explain(error: str) -> str:
    """Return what an error means and what to do about it; "" if that is not known."""
    for pattern, hint in HINTS.items():
        if re.search(pattern, error):
            return hint.replace("{now}", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    return ""


def explain_refusal(date: str, now_s: float) -> str:
    """Return why the SuperLink refused a signed request, by the date in its answer."""
    # A proxy may leave out the date.
    ahead_s = now_s - parsedate_to_datetime(date).timestamp() if date else 0.0
    if -MOST_BEHIND_S < ahead_s < MOST_AHEAD_S:
        return "the SuperLink no longer knows this node: register its key again"
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"the clock of this device is {abs(ahead_s):.0f} s {direction} the SuperLink's: set it"


def why_not_writable(folder: Path) -> str:
    """Return why no file can be written to a folder, and what to do about it; "" if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return f"FLWR_HOME ({folder}) cannot be used: {explain(str(error)) or error}"
    return ""


def is_whole(folder: Path, content: bytes) -> bool:
    """Return whether a folder has all files of an app, whose bundle is given."""
    with ZipFile(BytesIO(content)) as bundle:
        for info in bundle.infolist():
            # Flower does not install the bundle's own checksums.
            if info.is_dir() or info.filename.startswith(".info/"):
                continue
            path = folder / info.filename
            if not path.is_file() or zlib.crc32(path.read_bytes()) != info.CRC:
                return False
    return True


def remove_half_installed(fab: Any, wait_s: float = INSTALL_S) -> None:
    """Remove an app that is not installed completely, since Flower would never complete it."""
    for folder in _flwr.app_folders(fab):
        try:
            if is_whole(folder, fab.content):
                continue
            # Another node with the same FLWR_HOME may be installing the app at this moment.
            time.sleep(wait_s)
            if not is_whole(folder, fab.content):
                shutil.rmtree(folder)
                _log.warning("removed %s, a half-installed app, which is installed again", folder)
        except (OSError, BadZipFile) as error:
            _log.error("%s cannot be checked or removed: remove it by hand (%s)", folder, error)


class Failures:
    """Failures in a row of one kind: their causes go to the log, the first one repeatedly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.succeeded()

    def succeeded(self) -> None:
        """Forget all failures."""
        self._first = ""
        self._last = ""
        self._count = 0
        self._logged_s = 0.0

    def failed(self, cause: str) -> None:
        """Log a cause that is new, and the first one again if it was logged long ago."""
        now_s = self._clock()
        self._count += 1
        if not self._first:
            self._first = cause
            self._logged_s = now_s
        if cause != self._last:
            _log.error("%s", cause)
            self._last = cause
        if now_s >= self._logged_s + REPEAT_S:
            _log.error("failed %d times in a row. The first cause: %s", self._count, self._first)
            self._logged_s = now_s


class NodeFaults:
    """What goes wrong on a SuperNode and between it and its SuperLink."""

    def __init__(self) -> None:
        self.messages = Failures()
        self.requests = Failures()
        self.is_refused = False

    def watch(self) -> None:
        """Watch the SuperNode of this process."""
        _flwr.watch_node(self)
        threading.excepthook = self._thread_failed

    def received(self, fab: Any) -> None:
        """Mend an app before it is used: power may have been lost while it was installed."""
        remove_half_installed(fab)

    def replied(self, error: str, fab: Any) -> None:
        """Explain the error in a reply, if it has one, and mend the app that it came from."""
        if not error:
            self.messages.succeeded()
            return
        self.messages.failed(explain(error) or f"a message failed: {error}")
        if fab is not None:
            remove_half_installed(fab, wait_s=0.0)

    def answered(self, status: int, text: str, date: str) -> None:
        """Explain an answer of the SuperLink that is an error; 0 stands for no answer."""
        hint = explain(text)
        if status == UNAUTHORIZED:
            self.is_refused = True
            self.requests.failed(explain_refusal(date, time.time()))
        elif hint:
            self.requests.failed(hint)
        elif not status or status >= SERVER_ERROR:
            self.requests.failed(f"a request to the SuperLink failed: {text}")
        else:
            # Other errors are the end of a run or the like.
            self.requests.succeeded()

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        # The heartbeat of a node that was refused fails too, with a long traceback.
        if self.is_refused:
            _log.error("%s", failure.exc_value)
        else:
            threading.__excepthook__(failure)
