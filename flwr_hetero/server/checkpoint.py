"""Recorded runs: their history, and checkpoints to resume from."""

import json
import random
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import log, trains_trees
from flwr_hetero.errors import check_count, check_number, clean, invalid
from flwr_hetero.exchange.context import Votes
from flwr_hetero.exchange.nodes import online_nodes
from flwr_hetero.files import GrowingFile, drafted
from flwr_hetero.records import view_array
from flwr_hetero.report.prometheus import FailingNodes
from flwr_hetero.report.trackers import Trackers, check_trackers
from flwr_hetero.server.loop import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import UnsavedState, entries_below, three_numbers

FILE, PREVIOUS, METRICS = "state.npz", "previous.npz", "metrics.jsonl"
RESULTS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
SHARE = 0.05
"""The most of a run's time that checkpoints take."""
ALWAYS_S = 2.0
"""Seconds of a run that checkpoints may take whatever their share of its time is."""
MAX_WHY = 500
"""Largest number of characters of the reason why a checkpoint is refused."""
HINT = "resume the run as it was started, or start another one in a folder of its own"


class Checkpoints:
    """The state of a run after its rounds, and beside it the metrics of all rounds.

    Where a checkpoint takes long, because of the fleet or the model, some rounds have none.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        self.metrics = GrowingFile(folder / METRICS)
        # By kind: the number of entries in the file of metrics.
        self.written = dict.fromkeys(RESULTS, 0)
        self.initial = [settings_of(strategy) for strategy in run.strategy.chain()]
        self.unsaved = UnsavedState()
        # Seconds that the last checkpoint took, and all of this process.
        self._last_s = 0.0
        self._spent_s = 0.0
        self._has_said = False

    def save_if_due(self, run: Run) -> None:
        """Save the last round, and others as long as checkpoints keep to their share of time."""
        is_last = run.round >= run.num_rounds or run.fleet.stop_reason is not None
        began_s = time.monotonic()
        most_s = ALWAYS_S + SHARE * (began_s - run.started_s)
        if not is_last and self._spent_s + self._last_s > most_s:
            if not self._has_said:
                self._has_said = True
                lost_s = self._last_s / SHARE
                text = (
                    "A checkpoint takes %.1f s: some %ss have none, and a resume may repeat %.0f s"
                )
                log(INFO, text, self._last_s, run.unit, lost_s)
            return
        self.save(run)
        self._last_s = time.monotonic() - began_s
        self._spent_s += self._last_s

    def save(self, run: Run) -> None:
        """Add the metrics that are new, then replace the state."""
        for text in self.unsaved.warnings(run.strategy.wrappers(), Wrapper):
            log(WARNING, "%s", text)
        fleet = run.fleet
        arrays: dict[str, NDArray[Any]] = {
            f"model/{k}": view_array(v) for k, v in run.arrays.items()
        }
        strategies = []
        for number, strategy in enumerate(run.strategy.chain()):
            is_ours = isinstance(strategy, Wrapper)
            state: Mapping[str, Any] = strategy.state_dict() if is_ours else flower_state(strategy)
            scalars = {key: v for key, v in state.items() if not isinstance(v, np.ndarray)}
            arrays |= {f"{number}/{key}": v for key, v in state.items() if key not in scalars}
            kept = {"type": type(strategy).__name__, "initial": self.initial[number]}
            strategies.append(kept | {"scalars": scalars})
        self.metrics.append(self._new_metrics(run))
        meta = {
            "round": run.round,
            "wall_s": run.wall_s,
            "virtual_s": fleet.clock.virtual_s,
            "examples": fleet.examples,
            "times_s": fleet.times_s,
            "nodes": fleet.nodes.state(),
            "norms": fleet.norms,
            "most_usual": fleet.most_usual,
            "left_out": fleet.votes.to_json(),
            "cut": sorted(fleet.cut),
            "known_metrics": fleet.metrics,
            "usual_names": fleet.usual_names,
            "metrics": [self.metrics.length, self.metrics.checksum],
            "random": random.getstate(),
            "strategies": strategies,
        }
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        # The last checkpoint is kept, in case this one cannot be read.
        with drafted(self.folder / FILE, self.folder / PREVIOUS) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def _new_metrics(self, run: Run) -> list[str]:
        """Return the lines of the metrics that are newer than the last checkpoint."""
        lines = []
        for kind in RESULTS:
            entries: dict[int, MetricRecord] = getattr(run.result, kind)
            new = list(islice(reversed(entries.items()), len(entries) - self.written[kind]))
            lines += [json.dumps([kind, number, dict(found)]) for number, found in reversed(new)]
            self.written[kind] = len(entries)
        return lines

    def load(self, run: Run) -> None:
        """Continue from the last readable checkpoint; ValueError if it does not fit this run."""
        path, meta, arrays = self._read()
        try:
            _check_fit(meta, arrays, run)
            self._restore(meta, arrays, run)
        # A file that someone else has written may contain anything.
        except Exception as error:
            why = f"{error}" if isinstance(error, ValueError) else repr(error)
            text = f"this run cannot go on from {path}: {clean(why, MAX_WHY)}: {HINT}."
            raise ValueError(text) from error

    def _read(self) -> tuple[Path, dict[str, Any], dict[str, NDArray[Any]]]:
        """Read the last checkpoint with its metrics, or the previous one if that fails."""
        reasons = []
        for path in (self.folder / FILE, self.folder / PREVIOUS):
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as entries:
                    arrays = {name: entries[name] for name in entries.files}
                written = arrays.pop("meta")
                # Older versions wrote it as text, with the metrics of all rounds.
                old = written.dtype.kind == "U"
                meta = dict(json.loads(str(written) if old else written.tobytes()))
                if "results" not in meta:
                    meta["results"] = {kind: {} for kind in RESULTS}
                    for line in self.metrics.read(*meta["metrics"]):
                        kind, number, metrics = json.loads(line)
                        meta["results"][kind][number] = metrics
                return path, meta, arrays
            # A damaged file may raise any error.
            except Exception as error:
                reasons.append(f"{path.name}: {clean(str(error))}")
                log(WARNING, "Checkpoint %s cannot be read: %s", path, clean(str(error)))
        hint = "put back a copy of it, or leave resume out to start a run in another folder"
        text = f"no checkpoint in {self.folder} can be read ({'; '.join(reasons)}): {hint}."
        raise ValueError(text)

    def _restore(self, meta: dict[str, Any], arrays: dict[str, NDArray[Any]], run: Run) -> None:
        fleet = run.fleet
        run.arrays = ArrayRecord({k: Array(v) for k, v in entries_below("model/", arrays).items()})
        run.round = check_count("round", meta["round"])
        run.wall_offset_s = check_number("wall_s", meta["wall_s"], "[0, inf)")
        run.logged_s = check_number("virtual_s", meta["virtual_s"], "[0, inf)")
        fleet.clock.virtual_s = run.logged_s
        fleet.queue = None
        fleet.votes = Votes.from_json(meta.get("left_out", ()))
        fleet.cut = set(map(str, meta.get("cut", ())))
        fleet.usual_names = {kind: str(name) for kind, name in meta.get("usual_names", {}).items()}
        fleet.metrics = {
            kind: {node: {n: v if v is None else float(v) for n, v in x.items()} for node, x in own}
            for kind, own in ((k, x.items()) for k, x in meta.get("known_metrics", {}).items())
        }
        fleet.examples = {
            kind: {name: (float(first), float(last)) for name, (first, last) in own.items()}
            for kind, own in meta.get("examples", {}).items()
        }
        fleet.times_s = {
            kind: {name: float(took_s) for name, took_s in own.items()}
            for kind, own in meta.get("times_s", {}).items()
        }
        fleet.nodes.load_state(meta.get("nodes", {}), online_nodes(run.grid))
        fleet.norms = {node: three_numbers(own) for node, own in meta.get("norms", {}).items()}
        fleet.most_usual = three_numbers(meta.get("most_usual", fleet.most_usual))
        for kind in RESULTS:
            found = {int(n): MetricRecord(m) for n, m in meta["results"][kind].items()}
            setattr(run.result, kind, found)
            self.written[kind] = len(found) if self.metrics.length else 0
        version, state, gauss = meta["random"]
        random.setstate((version, tuple(state), gauss))
        for number, strategy in enumerate(run.strategy.chain()):
            saved = meta["strategies"][number]
            state = saved["scalars"] | entries_below(f"{number}/", arrays)
            if isinstance(strategy, Wrapper):
                strategy.load_state_dict(state)
            else:
                initial = saved.get("initial", {})
                self.initial[number] |= load_flower_state(strategy, state, initial)


def _check_fit(meta: dict[str, Any], arrays: dict[str, NDArray[Any]], run: Run) -> None:
    """Refuse a checkpoint of other strategies or of another model, or a model with NaN."""
    chain = run.strategy.chain()
    saved = [s["type"] for s in meta["strategies"]]
    now = [type(s).__name__ for s in chain]
    if saved != now:
        raise ValueError(f"it is of {' > '.join(saved)}, this run is {' > '.join(now)}")
    model = entries_below("model/", arrays)
    # Trees grow, so that their arrays have no fixed shape.
    if not trains_trees(chain[-1]):
        mine = {key: (tuple(array.shape), array.dtype) for key, array in run.arrays.items()}
        theirs = {key: (array.shape, str(array.dtype)) for key, array in model.items()}
        for key in [key for key in mine | theirs if mine.get(key) != theirs.get(key)][:1]:
            shown = [" ".join(map(str, x[key])) if key in x else "missing" for x in (theirs, mine)]
            raise ValueError(f"its model has {key} {shown[0]}, this run's {shown[1]}")
    bad = [k for k, v in model.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
    if bad:
        raise ValueError(f"its model holds NaN or infinity in {bad[0]}, training has diverged")


# --- Flower's own strategies, which have no state_dict -------------------------------------
KINDS = {
    **{"record": (ArrayRecord,), "dict": (dict,), "list": (list,)},
    "value": (int, float, np.ndarray),
}


def flower_state(strategy: Strategy) -> dict[str, Any]:
    """Return the numbers and arrays of a strategy, such as moments and the clipping norm."""
    state: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, ArrayRecord):
            state |= {f"record/{name}/{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and _are_arrays(value.values()):
            state |= {f"dict/{name}/{key}": np.asarray(v) for key, v in value.items()}
        elif isinstance(value, list) and _are_arrays(value):
            state |= {f"list/{name}/{i:06d}": np.asarray(v) for i, v in enumerate(value)}
        elif isinstance(value, KINDS["value"]):
            state[f"value/{name}"] = value
    return state


def settings_of(strategy: Strategy) -> dict[str, float]:
    """Return the numbers in a strategy of Flower's before a run, as the user set them."""
    if isinstance(strategy, Wrapper):
        return {}
    return {name: value for name, value in vars(strategy).items() if isinstance(value, int | float)}


def load_flower_state(
    strategy: Strategy, state: Mapping[str, Any], initial: Mapping[str, Any]
) -> dict[str, Any]:
    """Restore in a Flower strategy what :func:`flower_state` returned.

    ``initial`` are the numbers before the run. A number that has not changed since is a setting, of
    which the value of today is used. The others are restored. The first values are returned.
    """
    owner = type(strategy).__name__
    began = dict[str, Any]()
    for kind, name in dict.fromkeys(tuple(entry.split("/")[:2]) for entry in state):
        now = getattr(strategy, name, None)
        parts = entries_below(f"{kind}/{name}/", state)
        fits = isinstance(now, (*KINDS[kind], type(None))) and not name.startswith("__")
        if not (fits and (kind == "value" or _are_arrays(parts.values()))):
            raise ValueError(f"it has {name} of {owner} as a {kind}")
        restored: Any = parts
        if kind == "record":
            restored = ArrayRecord({key: Array(value) for key, value in parts.items()})
        elif kind == "list":
            restored = [parts[key] for key in sorted(parts)]
        elif kind == "value":
            restored = state[f"value/{name}"]
        if name in initial:
            began[name] = first = initial[name]
            if restored == first:
                began[name] = now
                if now != first:
                    log(INFO, "%s: %s is %s from now on, was %s", owner, name, now, first)
                continue
            if now != first:
                text = "%s: %s=%s has no effect in a resumed run, which goes on with %s"
                log(WARNING, text, owner, name, now, restored)
        setattr(strategy, name, restored)
    return began


def _are_arrays(values: Collection[object]) -> bool:
    return bool(values) and all(isinstance(value, (np.ndarray, np.generic)) for value in values)


class Recorded(Wrapper):
    """Record every round in a run directory; put it around all other wrappers.

    A run that was killed continues from the last whole checkpoint. There is one for each round, but
    fewer if they would take more than 5 % of the run's time. Nodes with other ids than before
    are asked for their names. SIGTERM ends a run as Ctrl-C does, with a report and exit code 143.
    ValueError for a ``run_dir`` that cannot be used, or from ``start`` for a checkpoint that does
    not fit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     strategy = Recorded(run_dir=f"{folder}/first")

    Parameters
    ----------
    strategy : Strategy, optional
        The strategy that runs; FedAvg if left out.
    run_dir : str, Path or RunDirectory
        Absolute path, or for instance ``flwr_hetero.report.RunDirectory("/data/first", config)``.
    resume : bool
        Whether to continue from the last readable checkpoint in the directory.
    trackers : sequence of str
        Other places for the figures of each round: "tensorboard", "mlflow", "wandb",
        "prometheus".
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
        self.trackers = check_trackers(trackers)
        super().__init__(strategy)
        if isinstance(run_dir, str | Path):
            from flwr_hetero.report.run_dir import RunDirectory

            run_dir = RunDirectory(run_dir, resume=resume, argument="run_dir")
        if not hasattr(run_dir, "append_round"):
            raise invalid("run_dir", run_dir, "be an absolute path or a RunDirectory")
        if getattr(run_dir, "resume", resume) != resume:
            raise invalid("resume", resume, "be the same for Recorded and for its RunDirectory")
        self.run_dir = run_dir
        self.resume = resume
        self._begun = False
        self._trackers = Trackers()
        self._failing_nodes = FailingNodes()
        self.checkpoints: Checkpoints | None = None

    def on_start(self, run: Run) -> None:
        """Continue from the checkpoint if ``resume`` is set; a refused one changes nothing."""
        _catch_sigterm()
        self.checkpoints = Checkpoints(self.run_dir.checkpoint_dir, run)
        if self.resume:
            self.checkpoints.load(run)
            self.run_dir.cut_after(run.round)
            log(INFO, "Resumed after round %d", run.round)
        self._trackers.open(self.trackers, self.run_dir.checkpoint_dir)
        self._begun = True

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Write the line of the round and the checkpoint."""
        self.run_dir.append_round(record)
        self._trackers.log(record)
        self._failing_nodes.look(record)
        if self.checkpoints:
            self.checkpoints.save_if_due(run)

    def on_finish(self, run: Run) -> None:
        """Save the model and build the report, if the run has begun."""
        try:
            if self._begun:
                self.run_dir.save_model({k: view_array(v) for k, v in run.arrays.items()})
                log(INFO, "Run directory: %s", self.run_dir.finish())
        finally:
            self._trackers.close()
            self.run_dir.close()
            if signal.getsignal(signal.SIGTERM) is _end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _catch_sigterm() -> None:
    """Let SIGTERM end the run in order, unless the program has its own handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: object) -> None:
    # A second signal ends the process at once.
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
