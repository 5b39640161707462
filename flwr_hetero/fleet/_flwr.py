"""The internals of Flower's SuperNode that a warm node replaces.

Each is looked for in the installed version before it is replaced. Tried with flwr 1.41 to 1.43.
"""

import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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

PROCESS = "flwr-clientapp"  # name of a message's process
NODE = "flwr.supernode.start_client_internal"
SUPEREXEC = "flwr.supercore.superexec"
CLIENT_APP = "flwr.supernode.runtime.run_clientapp"
WARM = {
    f"{NODE}:subprocess.Popen": "",
    f"{NODE}:_pull_and_store_message": "receive:",
    f"{NODE}:_push_messages": "send:",
    f"{SUPEREXEC}.run_superexec:get_executor": "",
    f"{SUPEREXEC}.run_superexec:AutoExecPlugin.launch_task": "token: task:",
    f"{SUPEREXEC}.executor:SubprocessExecutor.launch": "spec:",
    f"{SUPEREXEC}.executor.types:ExecutionSpec": "task_type: token: insecure: parent_pid:",
    "flwr.supercore.tls:validate_and_resolve_root_certificates": "",
    f"{CLIENT_APP}:pull_task_input": "client: .Message, .Context, .Run, .Fab]",
    f"{CLIENT_APP}:push_task_output": "",
    f"{CLIENT_APP}:install_from_fab": "",
    f"{CLIENT_APP}:run_clientapp": "token: insecure: certificates: parent_pid:",
}
"""What a warm node uses of Flower, and what the signature of each function must contain."""
CONNECTION = "flwr.supernode.fleet_http_connection"
WATCHED = {
    f"{NODE}:_pull_and_store_message": "get_fab:",
    f"{NODE}:_push_messages": "state: send:",
    f"{CONNECTION}:NodeAuthHttpInterceptor.intercept": "call_next:",
    "flwr.common.constant:APP_DIR": "",
    "flwr.common.constant:FAB_HASH_TRUNCATION": "",
}
"""What a node that explains its faults uses of Flower."""


def why_not_warm() -> str:
    """Return what the installed Flower lacks of what a warm node uses; "" if nothing."""
    return _lacking(WARM)


def why_not_watched() -> str:
    """Return what it lacks of what a node that explains its faults uses; "" if nothing."""
    return _lacking(WATCHED)


def _lacking(parts: Mapping[str, str]) -> str:
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


def replace_in_node(sleep: Callable[[float], None], start: Callable[[Sequence[str]], Any]) -> None:
    """Let a SuperNode sleep, and start its SuperExec, in another way."""
    node: Any = import_module(NODE)
    node.time = with_replaced(node.time, sleep=sleep)
    node.subprocess = with_replaced(node.subprocess, Popen=start)


def time_messages(
    on_received: Callable[[str, float], None], on_sent: Callable[[str, float], None]
) -> None:
    """Report each message that a SuperNode receives or sends: its type, and the seconds."""
    node: Any = import_module(NODE)
    pull = node._pull_and_store_message
    push = node._push_messages

    def timed_pull(*, receive: Callable[[], Any], **kwargs: Any) -> int | None:
        message_types: list[str] = []

        def receive_message() -> Any:
            received = receive()
            if received is not None:
                message_types.append(received[0].metadata.message_type)
            return received

        start_s = time.monotonic()
        run_id: int | None = pull(receive=receive_message, **kwargs)
        if run_id is not None:
            on_received(message_types[0], time.monotonic() - start_s)
        return run_id

    def timed_push(*, send: Callable[..., Any], **kwargs: Any) -> None:
        # The time begins with the first send, after the wait for the reply.
        sends: list[tuple[str, float]] = []

        def send_message(message: Any, *args: Any) -> Any:
            sends.append((message.metadata.message_type, time.monotonic()))
            return send(message, *args)

        push(send=send_message, **kwargs)
        for message_type, start_s in sends[:1]:
            on_sent(message_type, time.monotonic() - start_s)

    node._pull_and_store_message = timed_pull
    node._push_messages = timed_push


def flwr_home() -> Path:
    """Return the folder in which Flower keeps apps and its state."""
    from flwr.supercore.utils import get_flwr_home

    return get_flwr_home()


def app_folders(fab: Any) -> list[Path]:
    """Return the folders in FLWR_HOME in which an app is installed, completely or not."""
    from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION

    return list((flwr_home() / APP_DIR).glob(f"*.{fab.hash_str[:FAB_HASH_TRUNCATION]}"))


def watch_node(faults: Any) -> None:
    """Report what a SuperNode receives, sends and is answered to the methods of an object.

    ``received(fab)`` gets each app before it is installed; ``replied(error, fab)`` the error of
    each reply, "" if there is none, and its app; and ``answered(status, error, date)`` each answer
    of the SuperLink, with status 0 if there is none.
    """
    node: Any = import_module(NODE)
    connection: Any = import_module(CONNECTION)
    pull = node._pull_and_store_message
    push = node._push_messages

    def watched_pull(*, get_fab: Callable[[str, int], Any], **kwargs: Any) -> Any:
        def get_and_report(fab_hash: str, run_id: int) -> Any:
            fab = get_fab(fab_hash, run_id)
            faults.received(fab)
            return fab

        return pull(get_fab=get_and_report, **kwargs)

    def watched_push(*, state: Any, send: Callable[..., Any], **kwargs: Any) -> None:
        def report_and_send(message: Any, *args: Any) -> Any:
            # An app whose signature was refused is not stored, nor its run.
            run = state.get_run(message.metadata.run_id)
            fab = run and state.get_fab(run.fab_hash)
            faults.replied(str(message.error.reason) if message.has_error() else "", fab)
            return send(message, *args)

        push(state=state, send=report_and_send, **kwargs)

    class WatchedRequests(connection.NodeAuthHttpInterceptor):  # type: ignore[misc]
        """Flower's signature of each request, with a report of its answer."""

        def intercept(self, context: Any, call_next: Callable[..., Any]) -> Any:
            try:
                response = super().intercept(context, call_next)
            except httpx.TransportError as error:
                faults.answered(0, str(error), "")
                raise
            text = response.text if response.is_error else ""
            faults.answered(response.status_code, text, response.headers.get("date", ""))
            return response

    node._pull_and_store_message = watched_pull
    node._push_messages = watched_push
    connection.NodeAuthHttpInterceptor = WatchedRequests


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


class App(NamedTuple):
    """An installed app: its id, version and hash, and a context for the data that it preloads."""

    fab: tuple[str, str, str]
    context: Context


def import_process() -> Any:
    """Import what the process of a message needs of Flower."""
    return import_module(CLIENT_APP)


def load_app(fab_id: str, fab_version: str, fab_hash: str) -> None:
    """Import an installed ClientApp; later loads in this process find it."""
    from flwr.clientapp.utils import get_load_client_app_fn

    get_load_client_app_fn("", None, True)(fab_id, fab_version, fab_hash)


def answer_message(
    spec: Any,
    on_end: Callable[[], object],
    await_order: Callable[..., None],
    handed_over: bytes | None = None,
) -> None:
    """Be the process of one message: pull it, run the ClientApp, push the reply, and exit.

    ``handed_over`` is None if this process has yet to install the app, and b"" if its parent has
    loaded the app. Otherwise, it is what another process has pulled and given away, while it
    waited in ``await_order(app, give)``. A process without the app also calls ``await_order()``
    before it pulls. ``on_end`` is called when reply and context are pushed.
    """
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    process = import_process()
    task = process.TaskIdentity
    pull = process.pull_task_input
    push = process.push_task_output
    install = process.install_from_fab
    pulled: list[Any] = []

    def pull_in_turn(client: Any) -> Any:
        if handed_over:
            ids, *task_input = pickle.loads(handed_over)
            task.task_id, task.run_id, task.node_id = ids
            return task_input
        if handed_over is None:
            await_order()
        task_input = pull(client)
        pulled.append(task_input)
        return task_input

    def give() -> bytes:
        message, context, run, fab = pulled[0]
        ids = (task.task_id, task.run_id, task.node_id)
        return pickle.dumps((ids, message, context, run, replace(fab, content=b"")))

    def install_and_wait(*args: Any, **kwargs: Any) -> None:
        if handed_over is not None:
            return
        install(*args, **kwargs)
        _, context, run, fab = pulled[0]
        configs = (dict(context.node_config), RecordDict(), dict(context.run_config))
        empty = Context(0, context.node_id, *configs)
        await_order(App((run.fab_id, run.fab_version, fab.hash_str), empty), give)
        pulled.clear()

    def push_and_report(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        on_end()

    process.pull_task_input = pull_in_turn
    process.push_task_output = push_and_report
    process.install_from_fab = install_and_wait
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
