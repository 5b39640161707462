r"""Priorities of a batch (Eq. 8): derivatives of its losses along the aggregated gradient.

One pass with dual numbers has them, or the training step's own layers. A layer that is linear in
its parameters moves by ``layer(input; gbar)``; with :math:`\delta_i` the gradient at its output

.. math:: p_i = \sum_{layers} \langle \delta_i, \mathrm{layer}(a_i; \bar g) \rangle
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from flwr_hetero.client.weighted_loss import Loss, at_least_single, scoring
from flwr_hetero.errors import check_choice, invalid

Parameters: TypeAlias = Mapping[str, Tensor]
LINEAR_IN_PARAMETERS = (
    nn.Linear, _ConvNd, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase,
)  # fmt: skip
LAYERS = ("last", "all")
TOLERANCE = 0.01  # part by which the sum of the first priorities may be off


def sample_priorities(
    model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Tensor, direction: Parameters
) -> Tensor:
    r"""Compute the priority of each example of a batch (Eq. 8).

    .. math:: p_i = \bar g \cdot g_i = \frac{d}{dt} L_i(W + t \bar g) \Big|_{t=0}

    Signed, of shape (batch,), without dropout. ValueError if an argument does not fit or is not
    finite, or what moves goes through a layer without a forward mode in torch, such as LSTM.

    Parameters
    ----------
    model : nn.Module
        Left as it is, with its buffers and the global random state.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` with one loss per example.
    inputs, targets : Tensor, shape (batch, ...)
        The examples.
    direction : mapping of str to Tensor
        The aggregated gradient by parameter name; what is left out does not move.

    Examples
    --------
    >>> model, gradient = nn.Linear(2, 1, bias=False), {"weight": torch.tensor([[1.0, 2.0]])}
    >>> inputs, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)
    >>> loss = lambda outputs, targets: outputs[:, 0] - targets
    >>> sample_priorities(model, loss, inputs, targets, gradient)
    tensor([1., 4.])
    """
    own = dict(model.named_parameters())
    if not direction:
        raise invalid("direction", direction, "name at least one parameter")
    for name, part in direction.items():
        if name not in own or part.shape != own[name].shape:
            rule = f"be one of {[(n, tuple(p.shape)) for n, p in own.items()]}"
            raise invalid("direction", (name, tuple(part.shape)), rule)
    with undisturbed(model, inputs.device), torch.no_grad(), forward_ad.dual_level():
        tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, part in direction.items():
            # no forward mode of GroupNorm is for channels last, which kernels may bring along
            at = own[name].clone(memory_format=torch.contiguous_format)
            tensors[name] = forward_ad.make_dual(at, part.to(at))  # type: ignore[no-untyped-call]
        try:
            losses = loss_fn(functional_call(model, tensors, (inputs,)), targets)
        except NotImplementedError as error:
            rule = "be of layers that torch differentiates in forward mode"
            hint = "leave the parameters up to this layer out of the direction"
            raise invalid("model", str(error).split(" because")[0], rule, hint) from error
        if losses.shape != inputs.shape[:1]:
            rule = f"return one loss per example, shape ({len(inputs)},)"
            raise invalid("loss_fn", tuple(losses.shape), rule, 'build it with reduction="none"')
        values, tangent = forward_ad.unpack_dual(losses)  # type: ignore[no-untyped-call]
    found = torch.zeros_like(values) if tangent is None else tangent
    for argument, numbers in (("loss_fn", values), ("direction", found)):
        if len(bad := numbers[~numbers.isfinite()]):
            hint = "the model has diverged, lower the learning rate"
            raise invalid(argument, bad[:3].tolist(), "give finite numbers", hint)
    return found


def all_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    *,
    names: Collection[str] | None = None,
    batch_size: int = 512,
) -> tuple[NDArray[np.float64], dict[str, Tensor]]:
    """Compute every example's priority along the gradient of all of them (Eq. 7 and 8)."""
    counted = {n: p for n, p in model.named_parameters() if names is None or n in names}
    moving = {name: parameter for name, parameter in counted.items() if parameter.requires_grad}
    total = {name: at_least_single(torch.zeros_like(p)) for name, p in counted.items()}
    starts = range(0, len(inputs), batch_size)
    batches = [(inputs[i : i + batch_size], targets[i : i + batch_size]) for i in starts]
    with scoring(model):
        # Eq. 7: all gradients, before any priority
        for batch, batch_targets in batches:
            with torch.enable_grad():
                loss = loss_fn(model(batch), batch_targets).sum()
            gradients = torch.autograd.grad(loss, list(moving.values()))
            for name, part in zip(moving, gradients, strict=True):
                total[name] += part
        found = [sample_priorities(model, loss_fn, *batch, total) for batch in batches]
    return torch.cat(found).cpu().double().numpy(), total


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off dropout and fused kernels; put modes and random state back afterwards."""
    kind = nn.modules.dropout._DropoutNd
    modes = {m: m.training for m in model.modules() if isinstance(m, kind)}
    padded = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    ]
    hooks = [layer.register_forward_hook(_rest_of_padding) for layer in padded]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in modes:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            sdpa_kernel(SDPBackend.MATH),  # plain attention: the only one with a forward mode
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own rules
            yield
    finally:
        for hook in hooks:
            hook.remove()
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode


def _rest_of_padding(layer: nn.Embedding, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
    """Take the tangent of padding away, of which backward has no gradient."""
    is_padding = (arguments[0] == layer.padding_idx).unsqueeze(-1)
    still = forward_ad.unpack_dual(output).primal  # type: ignore[no-untyped-call]
    return torch.where(is_padding, still, output)


class LayerPriorities:
    """Sum up each example's priority during ``backward``, by hooks on layers."""

    def __init__(self, model: nn.Module, layers: str = "last") -> None:
        own = {m: dict(m.named_parameters(recurse=False)) for m in model.modules()}
        own = {layer: parameters for layer, parameters in own.items() if parameters}
        if not own:
            raise invalid("model", type(model).__name__, "have parameters")
        if check_choice("layers", layers, LAYERS) == "last":
            last = set(list(own.values())[-1].values())
            own = {layer: parts for layer, parts in own.items() if last & set(parts.values())}
        for layer in own:
            if not isinstance(layer, LINEAR_IN_PARAMETERS):
                rule = "be linear in their parameters (Linear, Conv, Embedding, normalisation)"
                hint = "take layers='last', or call sample_priorities"
                raise invalid("layers that priorities count", type(layer).__name__, rule, hint)
        # a parameter that layers share has one name, and one direction
        names = {p: name for name, p in model.named_parameters()}
        self._names = {layer: {k: names[p] for k, p in own[layer].items()} for layer in own}
        used = {name for parts in self._names.values() for name in parts.values()}
        self.parameters = {n: p for n, p in model.named_parameters() if n in used}
        self.direction = cast(Parameters, {})
        self._sums, self._whole = list[Tensor](), 0.0
        self._is_over = self._is_checked = False
        self._handles = [layer.register_forward_hook(self._on_forward) for layer in self._names]
        self._handles += [
            p.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, p in self.parameters.items()
            if p.requires_grad
        ]

    def _on_forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.direction:
            # what is there was another sampler's batch, or dropped
            if self._is_over:
                self._sums, self._whole, self._is_over = [], 0.0, False
            hook = partial(self._on_backward, layer, arguments[0].detach())
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_backward(self, layer: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        self._is_over = True
        if not self.direction:
            return
        # <delta_i, layer(a_i; gbar)>
        moving = {leaf: self.direction[name] for leaf, name in self._names[layer].items()}
        kind = next(iter(moving.values())).dtype
        inputs = inputs.to(kind) if inputs.is_floating_point() else inputs
        buffers = {
            name: b.to(kind, copy=True) if b.is_floating_point() else b.clone()
            for name, b in layer.named_buffers(recurse=False)
        }
        with torch.no_grad():
            moved = functional_call(layer, moving | buffers, (inputs,))
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                # a weight that another layer shares moves at the padding too
                moved = moved.masked_fill((inputs == layer.padding_idx).unsqueeze(-1), 0.0)
        self._sums.append((gradient.flatten(1).to(kind) * moved.flatten(1)).sum(1))

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        # gbar . G, which the first priorities must add up to
        if self._sums and not self._is_checked:
            self._whole += float((gradient.to_dense() * self.direction[name]).sum())

    def collect(self, size: int) -> Tensor | None:
        """Return the priorities of a batch, each times its loss's factor in ``backward``."""
        sums, whole = self._sums, self._whole
        self._sums, self._whole = [], 0.0
        if not sums or not self.direction:
            return None
        hint = "call sample_priorities"
        if lengths := {len(part) for part in sums} - {size}:
            rule = f"have the {size} examples in the first dimension of each layer that counts"
            raise invalid("model", lengths, rule, hint)
        found = reduce(torch.add, sums)
        if not self._is_checked:
            self._is_checked = True
            error = abs(float(found.sum()) - whole) / max(float(found.abs().sum()), 1e-30)
            if error > TOLERANCE:
                rule = "use parameters that priorities count in their layers only"
                raise invalid("model", f"a sum that is {error:.0%} off", rule, hint)
        return found

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
