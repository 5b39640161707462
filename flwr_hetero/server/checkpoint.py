"""Recorded runs: their history, and checkpoints to resume from."""

import json
import os
import random
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.errors import invalid
from flwr_hetero.report.trackers import Trackers, check_trackers
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import entries_below

FILE, PREVIOUS = "state.npz", "previous.npz"
RESULTS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def save_checkpoint(folder: Path, run: Run) -> None:
    """Write the state of a run."""
    fleet = run.fleet
    arrays: dict[str, NDArray[Any]] = {f"model/{k}": v.numpy() for k, v in run.arrays.items()}
    strategies = []
    for number, strategy in enumerate(run.strategy.chain()):
        is_ours = isinstance(strategy, Wrapper)
        state: Mapping[str, Any] = strategy.state_dict() if is_ours else flower_state(strategy)
        scalars = {key: v for key, v in state.items() if not isinstance(v, np.ndarray)}
        arrays |= {f"{number}/{key}": v for key, v in state.items() if key not in scalars}
        strategies.append({"type": type(strategy).__name__, "scalars": scalars})
    meta = {
        "round": run.round,
        "wall_s": run.wall_s,
        "virtual_s": fleet.clock.virtual_s,
        "accepted": fleet.accepted,
        "examples": fleet.examples,
        "norms": fleet.norms,
        "results": {
            kind: {number: dict(metrics) for number, metrics in getattr(run.result, kind).items()}
            for kind in RESULTS
        },
        "random": random.getstate(),
        "strategies": strategies,
    }
    path = folder / FILE
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    # the one before is kept, in case that this one cannot be read
    with suppress(FileNotFoundError):
        path.replace(folder / PREVIOUS)
    draft.replace(path)


def load_checkpoint(folder: Path, run: Run) -> None:
    """Continue from the last checkpoint that can be read; ValueError if this run cannot."""
    path, meta, arrays = read_checkpoint(folder)
    try:
        _check_fit(meta, arrays, run)
        _restore(meta, arrays, run)
    except (ValueError, KeyError, TypeError) as error:
        hint = "resume the run as it was started, or start another one in a folder of its own"
        raise ValueError(f"this run cannot go on from {path}: {error}: {hint}.") from error


def read_checkpoint(folder: Path) -> tuple[Path, dict[str, Any], dict[str, NDArray[Any]]]:
    """Read the last checkpoint, or the one before if that cannot be read."""
    reasons = []
    for path in (folder / FILE, folder / PREVIOUS):
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as entries:
                arrays = {name: entries[name] for name in entries.files}
            return path, dict(json.loads(str(arrays.pop("meta")))), arrays
        # a damaged file may raise anything
        except Exception as error:
            reasons.append(f"{path.name}: {error}")
            log(WARNING, "Checkpoint %s cannot be read: %s", path, error)
    hint = "put back a copy of it, or leave resume out to start a run in another folder"
    raise ValueError(f"no checkpoint in {folder} can be read ({'; '.join(reasons)}): {hint}.")


def _check_fit(meta: dict[str, Any], arrays: dict[str, NDArray[Any]], run: Run) -> None:
    """Refuse a checkpoint of other strategies or of another model, or with a model of NaN."""
    chain = run.strategy.chain()
    saved, now = [s["type"] for s in meta["strategies"]], [type(s).__name__ for s in chain]
    if saved != now:
        raise ValueError(f"it is of {' > '.join(saved)}, this run is {' > '.join(now)}")
    model = entries_below("model/", arrays)
    # trees grow
    if not trains_trees(chain[-1]):
        mine = {key: (tuple(array.shape), array.dtype) for key, array in run.arrays.items()}
        theirs = {key: (array.shape, str(array.dtype)) for key, array in model.items()}
        for key in [key for key in mine | theirs if mine.get(key) != theirs.get(key)][:1]:
            shown = [" ".join(map(str, x[key])) if key in x else "missing" for x in (theirs, mine)]
            raise ValueError(f"its model has {key} {shown[0]}, this run's {shown[1]}")
    bad = [k for k, v in model.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
    if bad:
        raise ValueError(f"its model holds NaN or infinity in {bad[0]}, training has diverged")


def _restore(meta: dict[str, Any], arrays: dict[str, NDArray[Any]], run: Run) -> None:
    fleet = run.fleet
    run.arrays = ArrayRecord({k: Array(v) for k, v in entries_below("model/", arrays).items()})
    run.round, run.wall_offset_s = int(meta["round"]), float(meta["wall_s"])
    fleet.clock.virtual_s, fleet.accepted = float(meta["virtual_s"]), meta["accepted"]
    fleet.examples, fleet.norms = meta.get("examples", {}), meta.get("norms", {})
    for kind in RESULTS:
        found = meta["results"][kind].items()
        setattr(run.result, kind, {int(number): MetricRecord(m) for number, m in found})
    version, state, gauss = meta["random"]
    random.setstate((version, tuple(state), gauss))
    for number, strategy in enumerate(run.strategy.chain()):
        state = meta["strategies"][number]["scalars"] | entries_below(f"{number}/", arrays)
        if isinstance(strategy, Wrapper):
            strategy.load_state_dict(state)
        else:
            load_flower_state(strategy, state)


# --- Flower's own strategies, which have no state_dict -------------------------------------
def flower_state(strategy: Strategy) -> dict[str, Any]:
    """Collect the numbers and arrays of a strategy: moments, last model, clipping norm, ..."""
    state: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, ArrayRecord):
            state |= {f"record/{name}/{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and _are_arrays(value.values()):
            state |= {f"dict/{name}/{key}": np.asarray(v) for key, v in value.items()}
        elif isinstance(value, list) and _are_arrays(value):
            state |= {f"list/{name}/{i:06d}": np.asarray(v) for i, v in enumerate(value)}
        elif isinstance(value, (int, float, np.ndarray)):
            state[f"value/{name}"] = value
    return state


def load_flower_state(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Give a Flower strategy back what :func:`flower_state` collected."""
    for kind, name in dict.fromkeys(tuple(entry.split("/")[:2]) for entry in state):
        parts = entries_below(f"{kind}/{name}/", state)
        restored: Any = parts
        if kind == "record":
            restored = ArrayRecord({key: Array(value) for key, value in parts.items()})
        elif kind == "list":
            restored = [parts[key] for key in sorted(parts)]
        elif kind == "value":
            restored = state[f"value/{name}"]
        setattr(strategy, name, restored)


def _are_arrays(values: Collection[object]) -> bool:
    return bool(values) and all(isinstance(value, (np.ndarray, np.generic)) for value in values)


class Recorded(Wrapper):
    """Record every round in a run directory; it goes outside all other wrappers.

    A run that is killed continues from the last whole checkpoint, and learns again which nodes are
    silent. SIGTERM ends a run as Ctrl-C does, with a report; its exit code is 143. ValueError for a
    ``run_dir`` that cannot be used, or by ``start`` for a checkpoint that it cannot go on from.

    Parameters
    ----------
    strategy : Strategy, optional
        What runs; FedAvg if left out.
    run_dir : str, Path or RunDirectory
        Absolute path, or for instance ``flwr_hetero.report.RunDirectory("/data/first", config)``.
    resume : bool
        Continue from the directory's last checkpoint that can be read.
    trackers : sequence of str
        Where each round's figures go besides: "tensorboard", "mlflow", "wandb".

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     strategy = Recorded(run_dir=f"{folder}/first")
    """

    name: ClassVar[str] = "recorded"
    decides = frozenset({"the record"})
    outermost = True

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        run_dir: Any,
        resume: bool = False,
        trackers: Sequence[str] = (),
    ) -> None:
        self.tracker_names = check_trackers(trackers)
        super().__init__(strategy)
        if isinstance(run_dir, str | Path):
            from flwr_hetero.report.run_dir import RunDirectory

            run_dir = RunDirectory(run_dir, resume=resume, argument="run_dir")
        if not hasattr(run_dir, "append_round"):
            raise invalid("run_dir", run_dir, "be an absolute path or a RunDirectory")
        if getattr(run_dir, "resume", resume) != resume:
            raise invalid("resume", resume, "be the same for Recorded and for its RunDirectory")
        self.run_dir, self.resume = run_dir, resume
        self._begun, self.trackers = False, Trackers()

    def on_start(self, run: Run) -> None:
        """Continue from the checkpoint if that is wanted; a refused one changes nothing."""
        _catch_sigterm()
        if self.resume:
            load_checkpoint(self.run_dir.checkpoint_dir, run)
            self.run_dir.cut_after(run.round)
            log(INFO, "Resumed after round %d", run.round)
        self.trackers.open(self.tracker_names, self.run_dir.checkpoint_dir)
        self._begun = True

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Write the round's line and the checkpoint."""
        self.run_dir.append_round(record)
        self.trackers.log(record)
        save_checkpoint(self.run_dir.checkpoint_dir, run)

    def on_finish(self, run: Run) -> None:
        """Save the model and build the report, if the run has begun."""
        try:
            if self._begun:
                self.run_dir.save_model({k: v.numpy() for k, v in run.arrays.items()})
                log(INFO, "Run directory: %s", self.run_dir.finish())
        finally:
            self.trackers.close()
            self.run_dir.close()
            if signal.getsignal(signal.SIGTERM) is _end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _catch_sigterm() -> None:
    """Let SIGTERM end the run in order, unless the program has a handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    # a second one ends the process at once
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
