r"""Priorities from the training step's own backward pass, for layers linear in their parameters.

The output of such a layer moves by ``layer(input; gbar)`` when its parameters move along
:math:`\bar g`, so with :math:`a` its input and :math:`\delta_i` the gradient at its output

.. math:: p_i = \sum_{layers} \langle \delta_i, \mathrm{layer}(a_i; \bar g) \rangle

Training computes both anyway: what is left is one more forward pass, layer by layer, or next to
nothing for the last layer alone.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from flwr_hetero.client.weighted_loss import at_least_single, scoring
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.pgd.priorities import (
    Method,
    Parameters,
    double_backward,
    first_possible,
    undisturbed,
)

LINEAR_IN_PARAMETERS = (
    nn.Linear, _ConvNd, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase,
)  # fmt: skip
LAYERS = ("last", "all")
TOLERANCE = 0.05
"""Relative error at which the layers' sums count as wrong; layouts mistaken give 0.3 and more."""

_log = logging.getLogger(__name__)


class PriorityBatch(NamedTuple):
    """What a backward pass says of each example, times the factor that its loss had in it."""

    priorities: Tensor
    norms: Tensor


class Call(NamedTuple):
    """A call of a model, and the gradient at its output."""

    model: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    gradient: Tensor

    def output(self, tensors: Parameters | None = None) -> Tensor:
        """Call the model again, with other parameters and buffers."""
        own = {} if tensors is None else dict(tensors)
        found = functional_call(self.model, own, self.arguments, self.options)
        output = main_output(found)
        if output is None:
            raise RuntimeError("no output")
        return output


class LayerPriorities:
    r"""Sum up each example's priority during ``backward``, by hooks on the layers.

    The sums are right where each of the layers has the examples in its first dimension and is
    called as a module. The first batch measured is compared with forward mode, which needs
    neither; if they differ, forward mode takes over, with a warning.

    BatchNorm in training mode couples the examples: :math:`\delta_i` then holds the effect of
    example i's activations on the other losses too.
    """

    def __init__(self, model: nn.Module, layers: str = "last") -> None:
        check_choice("layers", layers, LAYERS)
        own = [(n, m) for n, m in model.named_modules() if list(m.parameters(recurse=False))]
        if not own:
            raise invalid("model", type(model).__name__, "have parameters")
        hooked = own if layers == "all" else own[-1:]
        for name, layer in hooked:
            if not isinstance(layer, LINEAR_IN_PARAMETERS):
                rule = "be linear in its parameters (Linear, Conv, Embedding, normalisation)"
                hint = "take layers='last', or call sample_priorities"
                raise invalid(f"layer {name!r}", type(layer).__name__, rule, hint)
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = {
            layer: {leaf: names[id(p)] for leaf, p in layer.named_parameters(recurse=False)}
            for _, layer in hooked
        }
        used = {name for parts in self._names.values() for name in parts.values()}
        self.parameters = {n: p for n, p in model.named_parameters() if n in used}
        self.layers = layers
        self.direction: Parameters = {}
        self.is_checked = self.by_forward_mode = False
        self._sums: list[Tensor] = []
        self._norms: Tensor | None = None
        self._last: nn.Module | None = None
        self._call: Call | None = None
        self._pass, self._pass_of_sums, self._pass_ended = 0, 0, False
        self._handles = [layer.register_forward_hook(self._on_forward) for layer in self._names]
        self._handles.append(model.register_forward_hook(self._on_output, with_kwargs=True))

    def _on_forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.direction and not self.by_forward_mode:
            if self._pass_ended:  # by a backward pass: this is a new batch
                self._pass, self._pass_ended = self._pass + 1, False
            hook = partial(self._on_backward, layer, arguments[0].detach(), self._pass)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_backward(self, layer: nn.Module, inputs: Tensor, number: int, gradient: Tensor) -> None:
        if not self.direction:
            return
        moving = {leaf: self.direction[name] for leaf, name in self._names[layer].items()}
        if number != self._pass_of_sums:  # what is there was another sampler's batch, or dropped
            self._sums, self._norms, self._pass_of_sums = [], None, number
        self._pass_ended = True
        kind = next(iter(moving.values())).dtype
        inputs = inputs.to(kind) if inputs.is_floating_point() else inputs
        with torch.no_grad(), _parameters_of(layer, moving):
            moved = layer.forward(inputs)
        gradient = gradient.flatten(1).to(kind)
        self._sums.append((gradient * moved.flatten(1)).sum(1))
        if self._norms is None or layer is self._last:  # a layer may be called several times
            norms = gradient.norm(dim=1)
            self._norms = norms if self._norms is None else torch.hypot(self._norms, norms)
            self._last = layer

    def _on_output(
        self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: object
    ) -> None:
        """Keep what forward mode needs: the call, and the gradient at its output."""
        found = main_output(output)
        needed = self.by_forward_mode or not self.is_checked
        if needed and self.direction and found is not None and found.requires_grad:

            def keep(gradient: Tensor) -> None:
                self._call = Call(model, arguments, options, gradient.detach())

            found.register_hook(keep)  # type: ignore[no-untyped-call]

    def collect(self, size: int | None = None) -> PriorityBatch | None:
        """Return what was measured since the last call, of a batch of this size, and clear it."""
        sums, norms, call, direction = self._sums, self._norms, self._call, self.direction
        self._sums, self._norms, self._call, self.direction = [], None, None, {}
        if not direction:
            return None
        misfit = any(len(part) != (size or len(sums[0])) for part in sums)
        if call is not None and not self.by_forward_mode:
            self._compare(call, direction, misfit)
        elif sums and not self.is_checked and self.layers == "all":
            self.is_checked = True
            _log.warning("layers='all' cannot be checked: the model is not called as a whole.")
        if self.by_forward_mode:
            found = None if call is None else measure(call, direction)
        else:
            found = (
                None if norms is None or misfit else PriorityBatch(reduce(torch.add, sums), norms)
            )
        self.direction = direction
        if misfit if found is None else len(found.norms) != (size or len(found.norms)):
            rule = f"have the {size} examples in its first dimension, and be called as a whole"
            raise invalid("model", [len(part) for part in sums], rule, "call sample_priorities")
        return found

    def _compare(self, call: Call, direction: Parameters, misfit: bool) -> None:
        """Let forward mode take over if the layers' sums are not what it finds, with a warning."""
        if not misfit and (self.is_checked or not call.gradient.isfinite().all()):
            return
        self.is_checked = True
        error = float("inf") if misfit else self._error(call, direction)
        self.by_forward_mode = not error <= TOLERANCE
        if self.by_forward_mode:
            wrong = "other lengths than the batch" if misfit else f"an error of {error:.0%}"
            _log.warning(
                "layers=%r does not measure this model's priorities (%s): in some layer the "
                "examples are not in the first dimension, or its parameters are used outside it. "
                "Forward mode takes over, at the price of a forward pass per batch measured.",
                self.layers, wrong,
            )  # fmt: skip

    def _error(self, call: Call, direction: Parameters) -> float:
        """Return the relative error of the layers' sums, in a pass of their own."""
        parameters = [p for p in call.model.parameters() if p.requires_grad]
        with independent(call):
            self.direction = direction
            try:
                output = call.output()
                product = (output * call.gradient.to(output)).sum()
                torch.autograd.grad(product, parameters, allow_unused=True)
            except RuntimeError:  # sums of other shapes, or a pass that allows no second one
                return float("inf")
            finally:
                sums, self._sums, self._norms, self._call = self._sums, [], None, None
                self.direction = {}
            try:  # forward mode costs a second when a process first uses it
                expected = derivative(call, direction, double_backward)
            except (NotImplementedError, RuntimeError):
                expected = derivative(call, direction)
        if not sums or any(part.shape != expected.shape for part in sums):
            return float("inf")
        difference = reduce(torch.add, sums) - expected
        return float(difference.norm() / expected.norm().clamp_min(1e-30))

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def main_output(output: object) -> Tensor | None:
    """Find the outputs, one per example: what the model returns, or the first tensor in it."""
    found = output.values() if isinstance(output, Mapping) else output
    parts = found if isinstance(found, Iterable) and not isinstance(found, Tensor) else [found]
    tensors = (part for part in parts if isinstance(part, Tensor))
    return next((t for t in tensors if t.ndim and t.is_floating_point()), None)


def derivative(call: Call, direction: Parameters, method: Method = first_possible) -> Tensor:
    """Multiply each example's output gradient by its output's derivative along a direction."""
    own = dict(call.model.named_parameters())
    point = {name: own[name].detach() for name in direction}
    seed = int(torch.randint(2**31, ()))

    def products(parameters: Parameters) -> Tensor:
        torch.manual_seed(seed)  # for random layers that have no module to switch off
        buffers = {name: buffer.clone() for name, buffer in call.model.named_buffers()}
        outputs = call.output({**parameters, **buffers})
        return (outputs * call.gradient.to(outputs)).flatten(1).sum(1)

    return method(products, point, {n: d.to(point[n]) for n, d in direction.items()})


def measure(call: Call, direction: Parameters) -> PriorityBatch:
    """Measure a batch by forward mode."""
    with undisturbed(call.model, call.gradient.device):
        found = at_least_single(derivative(call, direction))
    return PriorityBatch(found, call.gradient.flatten(1).to(found).norm(dim=1))


@contextmanager
def independent(call: Call) -> Iterator[None]:
    """Go into evaluation mode, with gradients: examples are independent, nothing is random."""
    device = call.gradient.device
    plain = torch.autocast(device.type, enabled=False)
    with scoring(call.model), undisturbed(call.model, device), plain, torch.enable_grad():
        yield


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
