"""A node's torch optimizers: momentum goes on from slice to slice, as the pass over the data."""

import sys
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from numpy.typing import NDArray

from flwr_hetero import keys
from flwr_hetero.client.handler import current_handler, say_once

MOST_BYTES = 1 << 30
"""Flower gives an app's process its node's state in one message, of 2 GiB at most."""
_hooked: set[int] = set()
"""Modules ``torch.optim.optimizer`` that call us; one, but for tests that import torch again."""


def wants_state(message: object) -> bool:
    """Return whether the server asks the node to go on with its optimizers."""
    records = message.content.config_records.values() if isinstance(message, Message) else ()
    return any(record.get(keys.KEEP_OPTIMIZER) is True for record in records)


class KeptOptimizers:
    """The optimizers of a message, in the order of their first steps.

    A new one begins with the state that its predecessor of the last message had. One that has a
    state of its own keeps that.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._seen = context, list[Any]()
        optim: Any = sys.modules.get("torch.optim.optimizer")
        if optim is not None and id(optim) not in _hooked:
            optim.register_optimizer_step_pre_hook(_before_step)
            _hooked.add(id(optim))

    def see(self, optimizer: Any) -> None:
        """Note an optimizer that is about to step; give it its state before its first step."""
        if optimizer in self._seen:
            return
        self._seen.append(optimizer)
        kept = self._context.state.array_records.get(keys.OPTIMIZER)
        # some make a state before the first step; one that the app itself carries on is not new
        has_own = any(state and state.get("step") != 0 for state in optimizer.state.values())
        if kept is not None and not has_own:
            _load(optimizer, kept, len(self._seen) - 1)

    def save(self) -> None:
        """Keep the states of all optimizers seen in the node's state."""
        arrays: dict[str, NDArray[Any]] = {}
        for number, optimizer in enumerate(self._seen):
            try:
                flat = _flat(optimizer)
            except (TypeError, RuntimeError) as error:
                kind = type(optimizer).__name__
                say_once(f"{kind} begins anew with each message, its state cannot be kept: {error}")
                continue
            if all(np.isfinite(array).all() for array in flat.values()):  # else it never recovers
                arrays |= {f"{number}/{name}": array for name, array in flat.items()}
        size = sum(array.nbytes for array in arrays.values())
        if size > MOST_BYTES:
            what = f"their {size / 1e9:.1f} GB are too much"
            say_once(f"optimizers begin anew with each message: {what}")
            arrays = {}
        if self._seen:
            kept = {name: Array(array) for name, array in arrays.items()}
            self._context.state[keys.OPTIMIZER] = ArrayRecord(kept)


def _before_step(optimizer: Any, _args: object, _kwargs: object) -> None:
    """Tell the message that is being answered; torch calls this before each step."""
    work: Any = getattr(current_handler(), "work", None)
    if work is not None and work.optimizers is not None:
        work.optimizers.see(optimizer)


def _load(optimizer: Any, kept: ArrayRecord, number: int) -> None:
    """Give an optimizer the state of one before, if that is of the same parameters."""
    import torch

    shapes, state = _shapes(optimizer), dict[int, dict[str, Any]]()
    for name, array in kept.items():
        of, index, shape, key = name.split("/", 3)
        if int(of) != number:
            continue
        if shapes[int(index) : int(index) + 1] != [shape]:
            say_once("an optimizer is of another model than in the last message: it begins anew")
            return
        state.setdefault(int(index), {})[key] = torch.from_numpy(array.numpy().copy())
    if state:  # rates and the like stay those of the new one
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _flat(optimizer: Any) -> dict[str, NDArray[Any]]:
    """Return an optimizer's state, by parameter, its shape and name; TypeError if not of arrays."""
    shapes, arrays = _shapes(optimizer), dict[str, NDArray[Any]]()
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if value is not None:
                arrays[f"{index}/{shapes[index]}/{key}"] = _as_array(value)
    return arrays


def _shapes(optimizer: Any) -> list[str]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return ["x".join(map(str, param.shape)) for param in params]


def _as_array(value: Any) -> NDArray[Any]:
    if isinstance(value, (bool, int, float)):
        return np.asarray(value)
    if not hasattr(value, "detach"):
        raise TypeError(f"it has a {type(value).__name__}")
    tensor = value.detach().cpu()
    is_brain = str(tensor.dtype) == "torch.bfloat16"  # NumPy has none
    return np.asarray((tensor.float() if is_brain else tensor).numpy())
