"""How long a SuperNode receives and sends, passed to the processes of its messages."""

import atexit
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flwr_hetero import keys
from flwr_hetero.fleet import _flwr


class MessageTimes:
    """Tell how long a message was received, and how long the last reply of its type was sent."""

    def __init__(self, file: Path) -> None:
        self.file, self._sent_s = file, dict[str, float]()

    def received(self, kind: str, took_s: float) -> None:
        """Write the file of a message that is there, in one step."""
        times = {keys.RECEIVE_TIME: took_s, keys.RECEIVED_AT: time.monotonic()}
        if kind in self._sent_s:
            times[keys.SEND_TIME] = self._sent_s[kind]
        draft = self.file.with_suffix(".draft")
        # a full disk costs the times, not the message
        with suppress(OSError):
            draft.write_text(json.dumps(times), encoding="utf-8")
            draft.replace(self.file)

    def sent(self, kind: str, took_s: float) -> None:
        """Remember a reply's time; what was written is not true of the next message."""
        self._sent_s[kind] = took_s
        with suppress(OSError):
            self.file.unlink(missing_ok=True)


def tell_times() -> None:
    """Tell the processes that this SuperNode starts of its times, in a folder of their own."""
    with suppress(OSError):
        folder = tempfile.mkdtemp(prefix="flwr-hetero-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        times = MessageTimes(Path(folder, "times.json"))
        os.environ[keys.TIMES_FILE] = str(times.file)
        _flwr.time_messages(times.received, times.sent)
