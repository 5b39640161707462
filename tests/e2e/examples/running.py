"""Put a method into a copy of an app, as its user would, and run it on emulated nodes."""

import importlib
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dropin.patching import apply, changed_lines
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from recording import History

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper

HERE = Path(__file__).parent
DROPIN = HERE.parents[1] / "dropin"
FAST = DeviceProfile(4.0)
SLOW = DeviceProfile(1.0)
FLEET = [FAST, SLOW, FAST, SLOW]


class App(NamedTuple):
    """An app as its author wrote it, and what it needs beside flwr and NumPy."""

    title: str
    folder: Path
    package: str
    needs: tuple[str, ...]
    initial: str = ""
    """The model of the first round, in Python; without one the app has a server's half."""
    strategy: str = "FedAvg(fraction_evaluate=0.0)"
    taken: str = "import numpy as np"


TORCH = ("torch",)
LIGHTNING = ("pytorch_lightning", "torch")
TRAINER = ("transformers", "accelerate", "torch")
OF_TASK = "from {package} import task"
APPS = {
    "torch": App(
        "plain torch loop", DROPIN / "quickstart", "quickstart", TORCH, strategy="FedAvg()"),
    "scikit-learn": App(
        "scikit-learn", HERE / "scikit_learn", "sklearn_app", ("sklearn",),
        "[np.zeros((10, 64)), np.zeros(10)]"),
    "xgboost": App(
        "XGBoost bagging", HERE / "xgboost", "xgboost_app", ("xgboost",),
        "[np.frombuffer(b'', np.uint8)]", "FedXgbBagging(fraction_evaluate=0.0)"),
    "lightning": App(
        "Lightning", HERE / "lightning", "lightning_app", LIGHTNING,
        "task.Classifier().state_dict()", taken=OF_TASK),
    "hugging-face": App(
        "HF Trainer", HERE / "hugging_face", "hugging_face_app", TRAINER,
        "task.make_model().state_dict()", taken=OF_TASK),
}  # fmt: skip

SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import {kind}
{taken}

app = ServerApp()


@app.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    strategy = {strategy}
    strategy.start(grid, ArrayRecord({initial}), num_rounds=rounds)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
description = "{title}"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "flwr-hetero"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
"""


def write(app: App, folder: Path) -> None:
    """Copy an app, and write what is alike in all but the first."""
    shutil.copytree(app.folder, folder, dirs_exist_ok=True)
    if app.initial:
        kind = app.strategy.partition("(")[0]
        taken = app.taken.format(package=app.package)
        words = app._asdict() | {"kind": kind, "taken": taken}
        (folder / app.package / "__init__.py").touch()
        (folder / app.package / "server_app.py").write_text(SERVER.format(**words))
        name = app.package.replace("_", "-")
        (folder / "pyproject.toml").write_text(PROJECT.format(**words, name=name))


# --- both halves of a method ----------------------------------------------------------------


def node_half(app: App, half: str) -> str | None:
    """Return the diff of the node's half; None if there is none for this app."""
    for path in (HERE / "halves" / app.folder.name / f"{half}.diff", DROPIN / f"{half}.diff"):
        if path.exists() and (path.parent != DROPIN or app.folder.parent == DROPIN):
            parts = ("\n" + path.read_text(encoding="utf-8")).split("\n--- ")[1:]
            own = [f"--- {part}\n" for part in parts if "server_app.py" not in part.splitlines()[0]]
            return "".join(own)
    return None


def server_half(app: App, wrapped: str) -> str:
    """Return the diff of the server's half: two lines, alike in all apps."""
    name = wrapped.partition("(")[0]
    taken = f"from flwr.serverapp.strategy import {app.strategy.partition('(')[0]}\n"
    path = f"{app.package}/server_app.py"
    return (
        f"--- a/{path}\n+++ b/{path}\n@@ @@\n {taken}+from flwr_hetero.strategy import {name}\n"
        f"@@ @@\n-    strategy = {app.strategy}\n+    strategy = {wrapped.format(app.strategy)}\n"
    )


def line_counts(app: App, wrapped: str | None, half: str | None) -> tuple[int, int]:
    """Count the lines changed on the server and on the node."""
    server = changed_lines(server_half(app, wrapped)) if wrapped else 0
    return server, changed_lines(node_half(app, half) or "") if half else 0


# --- less data ----------------------------------------------------------------------------


@cache
def all_digits() -> dict[str, Any]:
    """Read the digits once: scikit-learn reads a file of text each time."""
    from sklearn.datasets import load_digits

    return load_digits()


@contextmanager
def few_digits(count: int) -> Iterator[None]:
    """Put fewer digits in place of load_digits."""
    from sklearn import datasets
    from sklearn.utils import Bunch

    few = Bunch(**{key: all_digits()[key][:count] for key in ("data", "target", "images")})

    def load(return_X_y: bool = False) -> Any:
        return (few.data, few.target) if return_X_y else few

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", load)
        yield


# --- a run ----------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a run leaves behind."""

    grid: LocalGrid
    records: list[dict[str, Any]]
    cpu_s: float
    """CPU time of server and nodes, evaluation on the nodes left out."""

    def state(self, node: int, kind: str = "scalars") -> Any:
        """Return what is kept of a node's sampler."""
        return self.grid.context(1000 + node).state[f"flwr-hetero.sampler.{kind}"]


@contextmanager
def changed(app: App, folder: Path, *diffs: str | None) -> Iterator[dict[str, Any]]:
    """Make a copy of an app with a method in it, that can be imported; give its run-config."""
    write(app, folder)
    for diff in filter(None, diffs):
        apply(diff, folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        yield tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == app.package]:
            del sys.modules[name]


def run(
    app: App,
    folder: Path,
    wrapped: str | None = None,
    half: str | None = None,
    rounds: int = 3,
    fleet: list[DeviceProfile] = FLEET,
    num_digits: int = 400,
    diff: str | None = None,
) -> Seen:
    """Run both apps on emulated nodes, and see the history; ``diff`` may have both halves."""
    halves = server_half(app, wrapped) if wrapped else diff, node_half(app, half) if half else None
    with changed(app, folder, *halves) as config, few_digits(num_digits):
        if "torch" in app.needs:
            importlib.import_module("torch").manual_seed(0)
        client = importlib.import_module(f"{app.package}.client_app").app
        server = importlib.import_module(f"{app.package}.server_app").app
        config |= {"num-server-rounds": rounds}
        evaluating = [0.0]
        records = []
        grid = LocalGrid(timed(client, evaluating), fleet, run_config=config)
        with watched(records):
            began_s = time.process_time()
            server(grid=grid, context=Context(1, 1, {}, RecordDict(), config))
            cpu_s = time.process_time() - began_s
    return Seen(grid, records, cpu_s - sum(evaluating))


def timed(client: ClientApp, evaluating: list[float]) -> Callable[[Message, Context], Message]:
    """Note the CPU time of a ClientApp's evaluations."""

    def answer(message: Message, context: Context) -> Message:
        began_s = time.process_time()
        reply = client(message, context)
        if message.metadata.message_type == "evaluate":
            evaluating.append(time.process_time() - began_s)
        return reply

    return answer


def train_once(app: App, folder: Path, half: str, arrays: ArrayRecord) -> Message:
    """Send one training instruction to a node, and return its reply."""
    with changed(app, folder, node_half(app, half)) as run_config, few_digits(400):
        client = importlib.import_module(f"{app.package}.client_app").app
        grid = LocalGrid(client, FLEET, run_config=run_config)
        config = ConfigRecord({"server-round": 1, "lr": 0.1})
        message = Message(RecordDict({"arrays": arrays, "config": config}), 1000, "train")
        (reply,) = grid.send_and_receive([message])
    return reply


@contextmanager
def watched(records: list[dict[str, Any]]) -> Iterator[None]:
    """Collect the history of any run that begins."""
    start = Wrapper.start

    def start_watched(self, *args, **kwargs):
        if self.outer is None and not isinstance(self, History):
            self = History(self)
            self.records = records
        return start(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wrapper, "start", start_watched)
        yield
