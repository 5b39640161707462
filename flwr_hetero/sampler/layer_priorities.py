r"""Priorities from the training step's own backward pass, for layers linear in their parameters.

The output of such a layer moves by ``layer(input; gbar)`` when its parameters move along
:math:`\bar g`, so with :math:`a` its input and :math:`\delta_i` the gradient at its output

.. math:: p_i = \sum_{layers} \langle \delta_i, \mathrm{layer}(a_i; \bar g) \rangle

Training computes both anyway: what is left is one more forward pass, layer by layer, or next to
nothing for the last layer alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from flwr_hetero.core.errors import invalid

LINEAR_IN_PARAMETERS = (
    nn.Linear,
    _ConvNd,
    nn.Embedding,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    _NormBase,
)
LAYERS = ("last", "all")


class Measured(NamedTuple):
    """What a backward pass says of each example, times the factor that its loss had in it.

    Parameters
    ----------
    priorities : Tensor, shape (batch,)
        Inner products with the direction.
    norms : Tensor, shape (batch,)
        Norms of the gradient at the output of the listened layer nearest to the loss. They
        bound the gradient norms up to a common factor.
    """

    priorities: Tensor
    norms: Tensor


class LayerPriorities:
    r"""Listen to layers and sum up each example's priority during ``backward``.

    Parameters
    ----------
    model : nn.Module
        Gets forward hooks on the listened layers until :meth:`close`.
    layers : {"last", "all"}
        The last layer (in order of registration) or every one. A parameter that the last
        layer shares with an earlier one counts where the last uses it.

    Raises
    ------
    ValueError
        If the model has no parameters, or a listened layer is not linear in its own.

    Notes
    -----
    BatchNorm in training mode couples the examples: :math:`\delta_i` then holds the pull of
    example i's activations on the other losses too.

    Examples
    --------
    >>> model, inputs = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> listener = LayerPriorities(model)
    >>> listener.direction = {"weight": torch.tensor([[1.0, 2.0]])}
    >>> losses = 3.0 * model(inputs)[:, 0]
    >>> losses.sum().backward()
    >>> listener.collect()
    Measured(priorities=tensor([ 3., 12.]), norms=tensor([3., 3.]))
    """

    def __init__(self, model: nn.Module, layers: str = "last") -> None:
        if layers not in LAYERS:
            raise invalid("layers", layers, f"be one of {LAYERS}", "last is the default")
        own = {
            n: m
            for n, m in model.named_modules()
            if next(m.parameters(recurse=False), None) is not None
        }
        if not own:
            rule, cure = "have parameters", "there is no gradient to follow: sample uniformly"
            raise invalid("model", type(model).__name__, rule, cure)
        listened = own if layers == "all" else dict([list(own.items())[-1]])
        for name, layer in listened.items():
            if not isinstance(layer, LINEAR_IN_PARAMETERS):
                rule = "be linear in its parameters (Linear, Conv, Embedding, normalisation)"
                cure = "listen to the last layer only, or call sample_priorities"
                raise invalid(f"layer {name!r}", type(layer).__name__, rule, cure)
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = {
            layer: {leaf: names[id(p)] for leaf, p in layer.named_parameters(recurse=False)}
            for layer in listened.values()
        }
        followed = {name for parts in self._names.values() for name in parts.values()}
        self.parameters = {n: p for n, p in model.named_parameters() if n in followed}
        self.direction: Mapping[str, Tensor] = {}
        self._sums: list[Tensor] = []
        self._norms: Tensor | None = None
        self._handles = [layer.register_forward_hook(self._listen) for layer in self._names]

    def _listen(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if not (output.requires_grad and self.direction):
            return
        inputs = arguments[0].detach()
        output.register_hook(partial(self._add, layer, inputs))  # type: ignore[no-untyped-call]

    def _add(self, layer: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        with torch.no_grad(), _parameters_of(layer, self._moving(layer)):
            moved = layer.forward(inputs)
        gradient = gradient.flatten(1)
        self._sums.append((gradient * moved.flatten(1)).sum(1))
        if self._norms is None:
            self._norms = gradient.norm(dim=1)

    def _moving(self, layer: nn.Module) -> dict[str, Tensor]:
        return {leaf: self.direction[name] for leaf, name in self._names[layer].items()}

    def collect(self) -> Measured | None:
        """Return what was measured since the last call, and forget it.

        Returns
        -------
        Measured or None
            None if there was no direction or no backward pass.
        """
        sums, self._sums = self._sums, []
        norms, self._norms = self._norms, None
        return None if norms is None else Measured(reduce(torch.add, sums), norms)

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def _parameters_of(layer: nn.Module, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Give a layer other parameters, and copies of its buffers, for the time of a pass."""
    own, buffers = layer._parameters, layer._buffers
    layer._parameters = cast(Any, {name: parameters.get(name) for name in own})
    layer._buffers = {name: None if b is None else b.clone() for name, b in buffers.items()}
    try:
        yield
    finally:
        layer._parameters, layer._buffers = own, buffers
