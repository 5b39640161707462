"""The internals of Flower's SuperNode that this package watches, and that a warm node replaces.

Each is looked for in the installed version before it is replaced. Tried with flwr 1.41 to 1.43.
"""

import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import flwr
import httpx
from flwr.app import Context, RecordDict

from flwr_hetero.files import replace

PROCESS = "flwr-clientapp"  # name of a message's process
NODE = "flwr.supernode.start_client_internal"
CONNECTION = "flwr.supernode.fleet_http_connection"
SUPEREXEC = "flwr.supercore.superexec"
CLIENT_APP = "flwr.supernode.runtime.run_clientapp"
WATCHED = {
    f"{NODE}:_pull_and_store_message": "state: node_config: receive:",
    f"{NODE}:_push_messages": "send:",
    f"{NODE}:get_fused_config_from_fab": "fab_file: run:",
    f"{CONNECTION}:NodeAuthHttpInterceptor.intercept": "call_next:",
    "flwr.common.constant:APP_DIR": "",
    "flwr.common.constant:FAB_HASH_TRUNCATION": "",
}
"""What a node that explains its faults uses of Flower, and what each signature must contain."""
WARM = WATCHED | {
    f"{NODE}:subprocess.Popen": "",
    f"{SUPEREXEC}.run_superexec:get_executor": "",
    f"{SUPEREXEC}.run_superexec:AutoExecPlugin.launch_task": "token: task:",
    f"{SUPEREXEC}.executor:SubprocessExecutor.launch": "spec:",
    f"{SUPEREXEC}.executor.types:ExecutionSpec": "task_type: token: insecure: parent_pid:",
    f"{CLIENT_APP}:push_task_output": "",
    f"{CLIENT_APP}:install_from_fab": "fab_file: skip_prompt:",
    f"{CLIENT_APP}:run_clientapp": "token: insecure: certificates: parent_pid:",
    "flwr.supercore.tls:validate_and_resolve_root_certificates": "",
}
"""What a warm node uses of it."""


def lacking(parts: Mapping[str, str]) -> str:
    """Return what the installed Flower lacks of what is used; "" if nothing."""
    for name, contents in parts.items():
        try:
            part: Any = resolve_name(name)
        except (ImportError, AttributeError):
            return f"flwr {flwr.__version__} has no {name}"
        text = str(signature(part)) if contents else ""
        missing = [content for content in contents.split() if content not in text]
        if missing:
            return f"{name} of flwr {flwr.__version__} has no {missing[0]!r} in {text}"
    return ""


def run_command(name: str) -> None:
    """Run one of Flower's commands in this process, with the arguments in ``sys.argv``."""
    (command,) = entry_points(group="console_scripts", name=name)
    sys.argv[0] = name
    command.load()()


def with_replaced(module: Any, **replaced: Any) -> SimpleNamespace:
    """Return the names of a module, some of them replaced, for one of its users."""
    return SimpleNamespace(**vars(module) | replaced)


def flwr_home() -> Path:
    """Return the folder in which Flower keeps apps and its state."""
    from flwr.supercore.utils import get_flwr_home

    return get_flwr_home()


class App(NamedTuple):
    """An app that was pulled for a run, and a context without state for the data it preloads."""

    fab_id: str
    version: str
    fab_hash: str
    content: bytes
    context: Context

    def folders(self) -> list[Path]:
        """Return the folders in which the app is installed, completely or not."""
        from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION

        return list((flwr_home() / APP_DIR).glob(f"*.{self.fab_hash[:FAB_HASH_TRUNCATION]}"))

    def save(self, file: Path) -> None:
        """Write the app to a file, from which another process reads it."""
        replace(file, pickle.dumps(self))

    @classmethod
    def read(cls, file: Path) -> "App":
        """Read an app that was saved."""
        app: App = pickle.loads(file.read_bytes())
        return app

    def load(self) -> None:
        """Install and import the app; later loads in this process find it."""
        from flwr.clientapp.utils import get_load_client_app_fn

        import_process().install_from_fab(self.content, skip_prompt=True)
        get_load_client_app_fn("", None, True)(self.fab_id, self.version, self.fab_hash)


# --- the SuperNode ---------------------------------------------------------------------------


def replace_in_node(sleep: Callable[[float], None], start: Callable[[Sequence[str]], Any]) -> None:
    """Let a SuperNode sleep, and start its SuperExec, in another way."""
    node: Any = import_module(NODE)
    node.time = with_replaced(node.time, sleep=sleep)
    node.subprocess = with_replaced(node.subprocess, Popen=start)


def watch_node(watcher: Any) -> None:
    """Report what a SuperNode receives, sends and is answered to the methods of an object.

    ``fetched(run_id, app)`` gets each new run, after Flower has verified its app and before its
    first message may begin; ``received(message, seconds)`` and ``replied(message, seconds)`` each
    message and reply; and ``answered(status, error, date)`` each answer of the SuperLink, with
    status 0 if there is none.
    """
    node: Any = import_module(NODE)
    connection: Any = import_module(CONNECTION)
    pull = node._pull_and_store_message
    push = node._push_messages
    read_config = node.get_fused_config_from_fab

    def watched_pull(
        *, state: Any, node_config: Any, receive: Callable[[], Any], **kwargs: Any
    ) -> Any:
        messages = []

        def receive_message() -> Any:
            received = receive()
            if received is not None:
                messages.append(received[0])
            return received

        # Flower calls it once for each new run.
        def report_app(fab_file: bytes, run: Any) -> Any:
            config = read_config(fab_file, run)
            context = Context(0, state.get_node_id(), dict(node_config), RecordDict(), dict(config))
            fab = (run.fab_id, run.fab_version, run.fab_hash, fab_file)
            watcher.fetched(run.run_id, App(*fab, context))
            return config

        node.get_fused_config_from_fab = report_app
        start_s = time.monotonic()
        run_id = pull(state=state, node_config=node_config, receive=receive_message, **kwargs)
        if run_id is not None:
            watcher.received(messages[0], time.monotonic() - start_s)
        return run_id

    def watched_push(*, send: Callable[..., Any], **kwargs: Any) -> None:
        # The time begins with the first send, after the wait for the reply.
        sends = []

        def send_message(message: Any, *args: Any) -> Any:
            sends.append((message, time.monotonic()))
            return send(message, *args)

        push(send=send_message, **kwargs)
        for message, start_s in sends:
            watcher.replied(message, time.monotonic() - start_s)

    class WatchedRequests(connection.NodeAuthHttpInterceptor):  # type: ignore[misc]
        """Flower's signature of each request, with a report of its answer."""

        def intercept(self, context: Any, call_next: Callable[..., Any]) -> Any:
            try:
                response = super().intercept(context, call_next)
            except httpx.TransportError as error:
                watcher.answered(0, str(error), "")
                raise
            text = response.text if response.is_error else ""
            watcher.answered(response.status_code, text, response.headers.get("date", ""))
            return response

    node._pull_and_store_message = watched_pull
    node._push_messages = watched_push
    connection.NodeAuthHttpInterceptor = WatchedRequests


# --- the launcher and the processes of messages ------------------------------------------------


def run_superexec(
    launch: Callable[[int, Any], None], sleep: Callable[[float], None], close: Callable[[], None]
) -> None:
    """Run Flower's SuperExec, but launch ClientApps by ``launch(run_id, spec)``."""
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor
    from flwr.supercore.superexec.plugin import AutoExecPlugin

    class WarmExecutor(SubprocessExecutor):
        """Launch as Flower does what is no ClientApp, or needs packages of its own."""

        run_id = 0

        def launch(self, spec: Any) -> LaunchResult:
            if spec.task_type is not TaskType.CLIENT_APP or spec.runtime_dependency_install:
                return super().launch(spec)
            try:
                launch(self.run_id, spec)
            except OSError:
                return super().launch(spec)
            return LaunchResult.accepted()

        def close(self) -> None:
            close()

    class WarmPlugin(AutoExecPlugin):
        """Give the executor the id of a task's run, which its spec does not have."""

        def launch_task(self, token: str, task: Any) -> LaunchResult:
            executor.run_id = task.run_id
            return super().launch_task(token, task)

    executor = WarmExecutor()
    superexec: Any = import_module(f"{SUPEREXEC}.run_superexec")
    superexec.get_executor = lambda *_, **__: executor
    superexec.AutoExecPlugin = WarmPlugin
    superexec.time = with_replaced(superexec.time, sleep=sleep)
    run_command("flower-superexec")


def import_process() -> Any:
    """Import what the process of a message needs of Flower."""
    return import_module(CLIENT_APP)


def answer_message(spec: Any, on_end: Callable[[], object], *, is_loaded: bool) -> None:
    """Be the process of one message: pull it, run the ClientApp, push the reply, and exit.

    ``is_loaded``: the app is installed and imported. ``on_end`` is called when reply and context
    are pushed.
    """
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    process = import_process()
    push = process.push_task_output

    def push_and_report(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        on_end()

    process.push_task_output = push_and_report
    if is_loaded:
        process.install_from_fab = lambda *_, **__: None
    sys.argv[0] = PROCESS
    # Processes show this name in ps and in the kernel's log.
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS, encoding="utf-8")
    path = spec.root_certificates_path
    process.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=validate_and_resolve_root_certificates(path, spec.insecure),
        parent_pid=spec.parent_pid,
    )
