"""Recorded runs: their history, and a checkpoint that is one file, whole or absent."""

import json
import os
import random
from collections.abc import Collection, Mapping
from logging import INFO
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero._flwr import attributes_of, log
from flwr_hetero.errors import check_count
from flwr_hetero.server.rounds import Run
from flwr_hetero.server.wrapper import Wrapper
from flwr_hetero.state_dict import entries_below

FILE = "state.npz"
RESULTS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")

Settings = dict[str, Any]


def save_checkpoint(folder: Path, run: Run, initial: Mapping[int, Settings]) -> None:
    """Write the state of a run; ``initial`` is what :func:`plain_settings` found before it."""
    session = run.strategy.session
    arrays: dict[str, NDArray[Any]] = {f"model/{k}": v.numpy() for k, v in run.arrays.items()}
    strategies = []
    for number, strategy in enumerate(run.strategy.chain()):
        if isinstance(strategy, Wrapper):
            state: Mapping[str, Any] = strategy.state_dict()
        else:
            state = flower_state(strategy, initial[number])
        scalars = {key: v for key, v in state.items() if not isinstance(v, np.ndarray)}
        arrays |= {f"{number}/{key}": v for key, v in state.items() if key not in scalars}
        strategies.append({"type": type(strategy).__name__, "scalars": scalars})
    meta = {
        "round": run.round,
        "wall_s": run.wall_s,
        "virtual_s": session.clock.virtual_s,
        "accepted": session.accepted,
        "results": {
            kind: {number: dict(metrics) for number, metrics in getattr(run.result, kind).items()}
            for kind in RESULTS
        },
        "random": random.getstate(),
        "strategies": strategies,
    }
    path = folder / FILE
    draft = path.with_suffix(".draft")  # a crash leaves the previous checkpoint whole
    with draft.open("wb") as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_checkpoint(folder: Path, run: Run) -> bool:
    """Continue from the last checkpoint, if there is one."""
    path, session = folder / FILE, run.strategy.session
    if not path.is_file():
        return False
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        meta = json.loads(str(file["meta"]))
    chain = run.strategy.chain()
    saved, now = [s["type"] for s in meta["strategies"]], [type(s).__name__ for s in chain]
    if saved != now:
        raise ValueError(
            f"the checkpoint in {folder} is of {' > '.join(saved)}, this run is "
            f"{' > '.join(now)}: resume with the same strategies or choose another output-dir."
        )
    run.arrays = ArrayRecord({k: Array(v) for k, v in entries_below("model/", arrays).items()})
    run.round, run.wall_offset_s = int(meta["round"]), float(meta["wall_s"])
    session.arrays = run.arrays
    session.clock.virtual_s, session.accepted = float(meta["virtual_s"]), meta["accepted"]
    for kind in RESULTS:
        metrics = {int(r): MetricRecord(m) for r, m in meta["results"][kind].items()}
        setattr(run.result, kind, metrics)
    version, state, gauss = meta["random"]
    random.setstate((version, tuple(state), gauss))
    for number, strategy in enumerate(chain):
        state = meta["strategies"][number]["scalars"] | entries_below(f"{number}/", arrays)
        if isinstance(strategy, Wrapper):
            strategy.load_state_dict(state)
        else:
            load_flower_state(strategy, state)
    return True


# --- Flower's own strategies, which have no state_dict -------------------------------------


def plain_settings(strategy: Wrapper) -> dict[int, Settings]:
    """Note the settings of Flower's strategies in a composition, before the run changes them."""
    return {
        number: {k: v for k, v in attributes_of(inner).items() if _is_plain(v)}
        for number, inner in enumerate(strategy.chain())
        if not isinstance(inner, Wrapper)
    }


def flower_state(strategy: Strategy, initial: Settings) -> dict[str, Any]:
    """Collect what a Flower strategy carries from round to round: moments, last model, ..."""
    state: dict[str, Any] = {}
    for name, value in attributes_of(strategy).items():
        if isinstance(value, ArrayRecord):
            state |= {f"record/{name}/{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and _are_arrays(value.values()):
            state |= {f"dict/{name}/{key}": np.asarray(v) for key, v in value.items()}
        elif isinstance(value, list) and _are_arrays(value):
            state |= {f"list/{name}/{i:06d}": np.asarray(v) for i, v in enumerate(value)}
        elif isinstance(value, np.ndarray) or (
            _is_plain(value) and (name not in initial or initial[name] != value)
        ):
            state[f"value/{name}"] = value
    return state


def load_flower_state(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Give a Flower strategy back what :func:`flower_state` collected."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for entry, value in state.items():
        kind, name, *key = entry.split("/", 2)
        groups.setdefault((kind, name), {})["".join(key)] = value
    for (kind, name), values in groups.items():
        restored: Any = values.get("")
        if kind == "record":
            restored = ArrayRecord({key: Array(value) for key, value in values.items()})
        elif kind == "dict":
            restored = values
        elif kind == "list":
            restored = [values[key] for key in sorted(values)]
        setattr(strategy, name, restored)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _are_arrays(values: Collection[object]) -> bool:
    return bool(values) and all(isinstance(value, (np.ndarray, np.generic)) for value in values)


# --- the wrapper --------------------------------------------------------------------------


class RunKeeper(Protocol):
    """What :class:`Recorded` needs of a run directory; ``flwr_hetero.report`` has one."""

    @property
    def checkpoint_dir(self) -> Path:
        """Existing folder for the checkpoint."""

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add a round's line to the history."""

    def cut_after(self, last_round: int) -> None:
        """Drop lines of rounds after the one that a resumed run continues from."""

    def save_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the global model."""

    def finish(self) -> Any:
        """Build the report; returns where it is."""


class Recorded(Wrapper):
    """Record every round in a run directory; it goes outside all other wrappers.

    Parameters
    ----------
    strategy : Strategy, optional
        What runs; FedAvg if left out.
    run_dir : RunKeeper
        For instance ``flwr_hetero.report.RunDirectory("/data/runs/first", config)``.
    checkpoint_every : int
        Rounds between two checkpoints; the last round always gets one.
    resume : bool
        Continue from the directory's checkpoint, if there is one.

    Raises
    ------
    ValueError
        If ``checkpoint_every`` is below 1.

    Notes
    -----
    The checkpoint holds the model, the round, all metrics so far, the clock, the state of each
    wrapper and of Flower's strategy, and Python's generator, which Flower's sampling uses. It
    is replaced in one step, so a run that is killed continues from the last whole one.

    Examples
    --------
    >>> import tempfile
    >>> from flwr_hetero.report import RunDirectory
    >>> from flwr_hetero.strategy import TiFL
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     strategy = Recorded(TiFL(), run_dir=RunDirectory(f"{folder}/first", {"seed": 0}))
    """

    name: ClassVar[str] = "recorded"
    decides = frozenset({"the record"})
    outermost = True

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        run_dir: RunKeeper,
        checkpoint_every: int = 1,
        resume: bool = False,
    ) -> None:
        self.checkpoint_every = check_count("checkpoint_every", checkpoint_every, 1)
        super().__init__(strategy)
        self.run_dir, self.resume = run_dir, resume
        self._initial = plain_settings(self)
        self._begun = False

    def on_start(self, run: Run) -> None:
        """Continue from the checkpoint if that is wanted; a refused one changes nothing."""
        if self.resume and load_checkpoint(self.run_dir.checkpoint_dir, run):
            self.run_dir.cut_after(run.round)
            log(INFO, "Resumed after round %d", run.round)
        self._begun = True

    def on_round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Write the round's line and, if it is due, the checkpoint."""
        self.run_dir.append_round(record)
        if run.round % self.checkpoint_every == 0 or run.round == run.num_rounds:
            save_checkpoint(self.run_dir.checkpoint_dir, run, self._initial)

    def on_finish(self, run: Run) -> None:
        """Save the model and build the report, if the run has begun."""
        if not self._begun:
            return
        self.run_dir.save_model({name: array.numpy() for name, array in run.arrays.items()})
        log(INFO, "Run directory: %s", self.run_dir.finish())
