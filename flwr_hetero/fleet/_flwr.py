"""Flower's node from inside: the places that a warm node takes. Tried with flwr 1.41.0."""

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, RecordDict
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import RUNTIME_DEPENDENCY_INSTALL as RUNTIME_DEPENDENCY_INSTALL
from flwr.supercore.constant import TaskType
from flwr.supercore.tls import validate_and_resolve_root_certificates

from flwr_hetero._flwr import TRIED_WITH

PROCESS = "flwr-clientapp"
"""Name of a message's process."""


def why_untried() -> str:
    """Return why the places below may not be there; "" in the versions that were tried."""
    found = version("flwr")
    # patch releases keep them
    is_tried = found.split(".")[:2] == TRIED_WITH.split(".")[:2]
    return "" if is_tried else f"flwr is {found}, the warm one was tried with {TRIED_WITH}"


def run_command(name: str) -> None:
    """Run one of Flower's commands in this process, with its arguments."""
    (command,) = entry_points(group="console_scripts", name=name)
    sys.argv[0] = name
    command.load()()


class Shim:
    """A module of which some names are replaced, for one of its users."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# --- the SuperNode: it asks the SuperLink for messages, and waits for a reply -----------------


def replace_in_node(
    sleep: Callable[[float], None],
    on_message: Callable[[], None],
    start: Callable[[Sequence[str]], Any],
) -> None:
    """Let a SuperNode sleep, tell of a message, and start its SuperExec, in another way."""
    node: Any = import_module("flwr.supernode.start_client_internal")
    pull = node._pull_and_store_message

    def pull_and_tell(*args: Any, **kwargs: Any) -> int | None:
        run_id: int | None = pull(*args, **kwargs)
        if run_id is not None:
            on_message()
        return run_id

    node._pull_and_store_message = pull_and_tell
    node.time = Shim(node.time, sleep=sleep)
    node.subprocess = Shim(node.subprocess, Popen=start)


# --- SuperExec: it asks the SuperNode for tasks, and has an executor start processes ----------


def run_superexec(
    launch: Callable[[int, Any], None], sleep: Callable[[float], None], close: Callable[[], None]
) -> None:
    """Run Flower's SuperExec; messages for ClientApps are launched by ``launch(run_id, spec)``."""
    from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor
    from flwr.supercore.superexec.plugin import AutoExecPlugin

    class WarmExecutor(SubprocessExecutor):
        """Launch what is no ClientApp, or needs packages of its own, as Flower does."""

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
        """Tell the executor the run of a task."""

        def launch_task(self, token: str, task: Any) -> LaunchResult:
            executor.run_id = task.run_id
            return super().launch_task(token, task)

    executor = WarmExecutor()
    superexec: Any = import_module("flwr.supercore.superexec.run_superexec")
    superexec.get_executor = lambda *_, **__: executor
    superexec.AutoExecPlugin = WarmPlugin
    superexec.time = Shim(superexec.time, sleep=sleep)
    run_command("flower-superexec")


# --- a ClientApp's process ----------------------------------------------------------------------


class App(NamedTuple):
    """An app as it is installed, and the settings of the node and of a run."""

    fab: tuple[str, str, str]
    """Its id, version and hash."""
    node_id: int
    node_config: dict[str, Any]
    run_config: dict[str, Any]


def import_process() -> None:
    """Import what the process of a message needs of Flower."""
    import_module("flwr.supernode.runtime.run_clientapp")


def load_app(fab_id: str, fab_version: str, fab_hash: str) -> None:
    """Import a ClientApp that is installed; later loads in this process find it."""
    get_load_client_app_fn("", None, True)(fab_id, fab_version, fab_hash)


def answer_message(
    spec: Any,
    on_end: Callable[[], object],
    await_order: Callable[..., None],
    given: bytes | None = None,
) -> None:
    """Be the process of one message: pull it, run the ClientApp, push the reply; then exit.

    ``given`` is b"" where the app is loaded, or what was pulled by another process, which ended in
    ``await_order(app, give)``. That is called without either before a process pulls.
    ``on_end`` is called when reply and context are pushed.
    """
    process: Any = import_module("flwr.supernode.runtime.run_clientapp")
    pull, push, install = (
        process.pull_task_input,
        process.push_task_output,
        process.install_from_fab,
    )
    task = process.TaskIdentity
    pulled: list[Any] = []

    def pull_in_turn(client: Any) -> Any:
        if given:
            (task.task_id, task.run_id, task.node_id), *found = pickle.loads(given)
            return found
        if given is None:
            await_order()
        found = pull(client)
        pulled.append(found)
        return found

    def give() -> bytes:
        message, context, run, fab = pulled[0]
        ids = task.task_id, task.run_id, task.node_id
        return pickle.dumps((ids, message, context, run, replace(fab, content=b"")))

    def install_and_wait(*args: Any, **kwargs: Any) -> None:
        # its files are those that were loaded
        if given is not None:
            return
        install(*args, **kwargs)
        _, context, run, fab = pulled[0]
        configs = dict(context.node_config), dict(context.run_config)
        found = App((run.fab_id, run.fab_version, fab.hash_str), context.node_id, *configs)
        await_order(found, give)
        pulled.clear()

    def push_and_tell(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        on_end()

    process.pull_task_input, process.push_task_output = pull_in_turn, push_and_tell
    process.install_from_fab = install_and_wait
    sys.argv[0] = PROCESS
    # what ps and the kernel's log call it
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS, encoding="utf-8")
    process.run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        ),
        parent_pid=spec.parent_pid,
    )


def new_context(node_id: int, node_config: dict[str, Any], run_config: dict[str, Any]) -> Context:
    """Make a context without a run, for what is loaded before one."""
    return Context(0, node_id, node_config, RecordDict(), run_config)


# --- the SuperNode's own times ----------------------------------------------------------------


def time_messages(
    on_received: Callable[[str, float], None], on_sent: Callable[[str, float], None]
) -> None:
    """Tell how long a SuperNode receives a message, and sends a reply: its type, and seconds."""
    node: Any = import_module("flwr.supernode.start_client_internal")
    pull, push = node._pull_and_store_message, node._push_messages

    def timed_pull(*, receive: Callable[[], Any], **kwargs: Any) -> int | None:
        kinds: list[str] = []

        def receive_message() -> Any:
            found = receive()
            kinds.extend([] if found is None else [found[0].metadata.message_type])
            return found

        began_s = time.monotonic()
        run_id: int | None = pull(receive=receive_message, **kwargs)
        if run_id is not None:
            on_received(kinds[0], time.monotonic() - began_s)
        return run_id

    def timed_push(*, send: Callable[..., Any], **kwargs: Any) -> None:
        # without the wait for the reply, which comes before
        begun: list[tuple[str, float]] = []

        def send_message(message: Any, *args: Any) -> Any:
            begun.append((message.metadata.message_type, time.monotonic()))
            return send(message, *args)

        push(send=send_message, **kwargs)
        for kind, began_s in begun[:1]:
            on_sent(kind, time.monotonic() - began_s)

    node._pull_and_store_message, node._push_messages = timed_pull, timed_push
