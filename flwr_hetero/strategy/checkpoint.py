"""Everything a run needs to continue, in one file that is whole or not there."""

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_hetero.core.entries import entries_below
from flwr_hetero.strategy.rounds import Run
from flwr_hetero.strategy.wrapper import Wrapper

FILE = "state.npz"

Arrays = dict[str, NDArray[Any]]
Scalars = dict[str, Any]


def save_checkpoint(folder: Path, run: Run, fresh: Mapping[int, Scalars]) -> Path:
    """Write the state of a run; a crash while writing leaves the previous one.

    Parameters
    ----------
    folder : Path
        Where ``state.npz`` is replaced.
    run : Run
        Model, round, results, clock and the states of all strategies are saved.
    fresh : mapping of int to dict
        From :func:`plain_settings` at the start of the run: settings of Flower's strategies
        that have not changed since are not state.

    Returns
    -------
    Path
        The file.
    """
    arrays: Arrays = {f"model/{name}": array.numpy() for name, array in run.arrays.items()}
    meta: Scalars = {
        "round": run.round,
        "wall_s": run.wall_s,
        "virtual_s": run.strategy.session.virtual_s,
        "accepted": run.strategy.session.accepted,
        "results": {kind: _metrics(getattr(run.result, kind)) for kind in _RESULTS},
        "random": random.getstate(),
        "strategies": [],
    }
    for number, strategy in enumerate(run.strategy.chain()):
        state = (
            strategy.state_dict()
            if isinstance(strategy, Wrapper)
            else _flower_state(strategy, fresh[number])
        )
        own = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
        arrays |= {f"{number}/{key}": value for key, value in own.items()}
        scalars = {key: value for key, value in state.items() if key not in own}
        meta["strategies"].append({"type": type(strategy).__name__, "scalars": scalars})
    path = folder / FILE
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return path


def load_checkpoint(folder: Path, run: Run) -> bool:
    """Continue from the last checkpoint, if there is one.

    Parameters
    ----------
    folder : Path
        As given to :func:`save_checkpoint`.
    run : Run
        Its model, round, results, clock and strategies are set.

    Returns
    -------
    bool
        Whether there was a checkpoint.

    Raises
    ------
    ValueError
        If the checkpoint belongs to other strategies.
    """
    path = folder / FILE
    if not path.is_file():
        return False
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        meta = json.loads(str(file["meta"]))
    chain = list(run.strategy.chain())
    saved, now = [s["type"] for s in meta["strategies"]], [type(s).__name__ for s in chain]
    if saved != now:
        raise ValueError(
            f"the checkpoint in {folder} is of {' > '.join(saved)}, this run is "
            f"{' > '.join(now)}: resume with the same strategies or choose another output-dir."
        )
    run.arrays = ArrayRecord({k: Array(v) for k, v in entries_below("model/", arrays).items()})
    run.round, run.wall_offset_s = int(meta["round"]), float(meta["wall_s"])
    run.strategy.session.virtual_s = float(meta["virtual_s"])
    run.strategy.session.accepted = meta.get("accepted", {})
    for kind in _RESULTS:
        rounds = {int(r): MetricRecord(m) for r, m in meta["results"][kind].items()}
        setattr(run.result, kind, rounds)
    version, state, gauss = meta["random"]
    random.setstate((version, tuple(state), gauss))
    for number, strategy in enumerate(chain):
        state = meta["strategies"][number]["scalars"] | entries_below(f"{number}/", arrays)
        if isinstance(strategy, Wrapper):
            strategy.load_state_dict(state)
        else:
            _set_flower_state(strategy, state)
    return True


def plain_settings(strategy: Wrapper) -> dict[int, Scalars]:
    """Note the settings of Flower's own strategies in a nest, before the run changes them.

    Parameters
    ----------
    strategy : Wrapper
        The outermost one.

    Returns
    -------
    dict of int to dict
        Position in the nest to attribute and value.
    """
    return {
        number: {k: v for k, v in vars(inner).items() if _is_plain(v)}
        for number, inner in enumerate(strategy.chain())
        if not isinstance(inner, Wrapper)
    }


_RESULTS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


def _metrics(rounds: Mapping[int, MetricRecord]) -> dict[int, dict[str, Any]]:
    return {number: dict(record) for number, record in rounds.items()}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _flower_state(strategy: Strategy, fresh: Scalars) -> dict[str, Any]:
    """Collect what a Flower strategy carries from round to round: moments, last model, ..."""
    state: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, np.ndarray):
            state[f"array/{name}"] = value
        elif isinstance(value, ArrayRecord):
            state |= {f"record/{name}/{key}": array.numpy() for key, array in value.items()}
        elif isinstance(value, dict) and _all_arrays(value.values()):
            state |= {f"dict/{name}/{key}": np.asarray(v) for key, v in value.items()}
        elif isinstance(value, list) and _all_arrays(value):
            state |= {f"list/{name}/{i:06d}": np.asarray(v) for i, v in enumerate(value)}
        elif _is_plain(value) and (name not in fresh or fresh[name] != value):
            state[f"plain/{name}"] = value
    return state


def _all_arrays(values: Any) -> bool:
    found = list(values)
    return bool(found) and all(isinstance(value, (np.ndarray, np.generic)) for value in found)


def _set_flower_state(strategy: Strategy, state: Mapping[str, Any]) -> None:
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for name, value in state.items():
        kind, attribute, *key = name.split("/", 2)
        groups.setdefault((kind, attribute), {})["".join(key)] = value
    for (kind, attribute), values in groups.items():
        restored: Any = values.get("")
        if kind == "record":
            restored = ArrayRecord({key: Array(value) for key, value in values.items()})
        elif kind == "dict":
            restored = values
        elif kind == "list":
            restored = [values[key] for key in sorted(values)]
        setattr(strategy, attribute, restored)
