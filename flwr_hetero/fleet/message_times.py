"""The times that a SuperNode takes to receive and send, for the processes of its messages."""

import atexit
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flwr_hetero import keys
from flwr_hetero.fleet import _flwr


class MessageTimes:
    """A file with the receive time of a message and the last send time of its type."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._sent_s: dict[str, float] = {}

    def received(self, message_type: str, seconds: float) -> None:
        """Write the file for a message that has been received, in one step."""
        times = {keys.RECEIVE_TIME: seconds, keys.RECEIVED_AT: time.monotonic()}
        if message_type in self._sent_s:
            times[keys.SEND_TIME] = self._sent_s[message_type]
        draft = self.file.with_suffix(".draft")
        # On a full disk only the times are lost, not the message.
        with suppress(OSError):
            draft.write_text(json.dumps(times), encoding="utf-8")
            draft.replace(self.file)

    def sent(self, message_type: str, seconds: float) -> None:
        """Remember the time of a reply, and remove the file, which is not for the next message."""
        self._sent_s[message_type] = seconds
        with suppress(OSError):
            self.file.unlink(missing_ok=True)


def record_times(on_message: Callable[[], object] | None) -> None:
    """Write this SuperNode's times to a file for its processes; then report each message."""
    folder = os.devnull
    # Without a folder, the times cannot be written, but messages are still reported.
    with suppress(OSError):
        folder = tempfile.mkdtemp(prefix="flwr-hetero-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    times = MessageTimes(Path(folder, "times.json"))
    os.environ[keys.TIMES_FILE] = str(times.file)

    def on_received(message_type: str, seconds: float) -> None:
        times.received(message_type, seconds)
        if on_message is not None:
            on_message()

    _flwr.time_messages(on_received, times.sent)
