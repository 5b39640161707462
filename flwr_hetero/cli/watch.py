"""The command ``watch``: the page of a run in progress, for browsers on this machine."""

import argparse
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from flwr_hetero.report.history import HISTORY, LOCK, MODEL

HOST = "127.0.0.1"
# Seconds between two looks at the run, and for which its end is served: pages ask every 2 s.
LOOK_S, LAST_S = 1.0, 6.0
# A run has stalled that adds no round for so long.
QUIET_S = 300.0
# States of a run, as its page notes them.
WAITING, RUNNING, ENDED = "No round yet.", "", "ended"
STALLED = "No new round for a while: the run has stalled, or waits for a slow node."
KILLED = "The run was killed: its process is gone. resume=true continues from its checkpoint."


def add(commands: Any) -> None:
    """Add the command to the command line."""
    text = "serve the page of a run to this machine, kept up to date"
    parser = commands.add_parser("watch", help=text, description=text)
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory (output-dir)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> None:
    page = LivePage(options.directory.expanduser().absolute())
    server = serve(page, options.port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    print(f"{address}  (ends with the run, or by Ctrl-C)", flush=True)
    try:
        while page.look() != ENDED:
            time.sleep(LOOK_S)
        print(f"The run has ended: {page.folder}", flush=True)
        time.sleep(LAST_S)
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
        server.server_close()


class LivePage:
    """The page's data as of the last change of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, ""
        self._version: object = None

    def look(self) -> str:
        """Read what is new; return the run's state."""
        from flwr_hetero.report.page import run_data

        state = state_of(self.folder)
        history = self.folder / HISTORY
        version = state, history.stat().st_size if state != WAITING else 0
        if version != self._version:
            data: dict[str, Any] = {"kind": "run", "title": self.folder.name, "tables": []}
            data = data if state == WAITING else run_data(self.folder)
            if state not in (RUNNING, ENDED):
                data["notes"] = [state]
            self.data, self._version = json.dumps(data, allow_nan=False), version
        return state


def state_of(folder: Path, now_s: float | None = None) -> str:
    """Return a run's state, by its files: its process holds the lock until it ends."""
    history, model = folder / HISTORY, folder / MODEL
    if not history.is_file() or not history.stat().st_size:
        return WAITING
    changed_s = history.stat().st_mtime
    if not _is_locked(folder / LOCK):
        ended = model.is_file() and model.stat().st_mtime >= changed_s
        return ENDED if ended else KILLED
    quiet_s = (time.time() if now_s is None else now_s) - changed_s
    return STALLED if quiet_s > QUIET_S else RUNNING


def _is_locked(path: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        # To look must not make the file.
        if path.exists():
            FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False


def serve(page: LivePage, port: int = 0) -> ThreadingHTTPServer:
    """Serve a run's page to this machine, from a thread."""
    from flwr_hetero.report.page import DATA, render

    answers: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html", lambda: render(json.loads(page.data))),
        f"/{DATA}": ("application/json", lambda: page.data),
    }

    class PageHandler(BaseHTTPRequestHandler):
        """Answers with the page, and with its data."""

        def do_GET(self) -> None:
            """Answer a browser of this machine."""
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            # A web page elsewhere may give this address a name of its own, and would read the run.
            if host not in (HOST, "localhost") or self.path not in answers:
                self.send_error(404)
                return
            kind, text = answers[self.path]
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the terminal for what matters."""

    page.look()
    server = ThreadingHTTPServer((HOST, port), PageHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server
