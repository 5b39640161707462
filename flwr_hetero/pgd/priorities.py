r"""Priorities of a batch (Eq. 8): derivatives of its losses along the aggregated gradient.

One forward pass with dual numbers computes them, or the training step does. The output of a layer
that is linear in its parameters moves by ``layer(input; gbar)``. With :math:`\delta_i` the gradient
at this output,

.. math:: p_i = \sum_{layers} \langle \delta_i, \mathrm{layer}(a_i; \bar g) \rangle
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, TypeAlias

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
Gradients: TypeAlias = Mapping[str, Tensor | None]
LINEAR_IN_PARAMETERS = (
    nn.Linear, _ConvNd, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase,
)  # fmt: skip
LAYERS = ("last", "all")
TOLERANCE = 0.01  # largest relative error of the sum of the first priorities


def sample_priorities(
    model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Tensor, direction: Parameters
) -> Tensor:
    r"""Compute the priority of each example of a batch (Eq. 8).

    .. math:: p_i = \bar g \cdot g_i = \frac{d}{dt} L_i(W + t \bar g) \Big|_{t=0}

    Signed, of shape (batch,), without dropout. ValueError if an argument does not fit or is not
    finite, or if a layer that the direction affects has no forward mode in torch, such as LSTM.

    Parameters
    ----------
    model : nn.Module
        It is not changed, nor are its buffers and the global random state.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` with one loss per example.
    inputs, targets : Tensor, shape (batch, ...)
        The examples.
    direction : mapping of str to Tensor
        The aggregated gradient by parameter name, or a part of it.

    Examples
    --------
    >>> model, gradient = nn.Linear(2, 1, bias=False), {"weight": torch.tensor([[1.0, 2.0]])}
    >>> inputs, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)
    >>> loss = lambda outputs, targets: outputs[:, 0] - targets
    >>> sample_priorities(model, loss, inputs, targets, gradient)
    tensor([1., 4.])
    """
    parameters = dict(model.named_parameters())
    if not direction:
        raise invalid("direction", direction, "name at least one parameter")
    for name, part in direction.items():
        if name not in parameters or part.shape != parameters[name].shape:
            rule = f"be one of {[(n, tuple(p.shape)) for n, p in parameters.items()]}"
            raise invalid("direction", (name, tuple(part.shape)), rule)
    with undisturbed(model, inputs.device), torch.no_grad(), forward_ad.dual_level():
        tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, part in direction.items():
            # GroupNorm has no forward mode for the memory format channels last.
            value = parameters[name].clone(memory_format=torch.contiguous_format)
            dual = forward_ad.make_dual(value, part.to(value))  # type: ignore[no-untyped-call]
            tensors[name] = dual
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
    priorities = torch.zeros_like(values) if tangent is None else tangent
    for argument, numbers in (("loss_fn", values), ("direction", priorities)):
        bad = numbers[~numbers.isfinite()]
        if len(bad):
            hint = "the model has diverged, lower the learning rate"
            raise invalid(argument, bad[:3].tolist(), "give finite numbers", hint)
    return priorities


def all_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    *,
    names: Collection[str] | None = None,
    batch_size: int = 512,
) -> tuple[NDArray[np.float64], dict[str, Tensor]]:
    """Compute all examples' priorities along the sum of their gradients (Eq. 7 and 8).

    Returns the priorities (num_samples,), and the sum by parameter name; ``names`` restricts both
    to some parameters.
    """
    counted = {n: p for n, p in model.named_parameters() if names is None or n in names}
    trained = {name: parameter for name, parameter in counted.items() if parameter.requires_grad}
    total = {name: at_least_single(torch.zeros_like(p)) for name, p in counted.items()}
    starts = range(0, len(inputs), batch_size)
    batches = [(inputs[i : i + batch_size], targets[i : i + batch_size]) for i in starts]
    with scoring(model):
        # Eq. 7: the sum must be complete before the first priority is computed.
        for batch_inputs, batch_targets in batches:
            with torch.enable_grad():
                loss = loss_fn(model(batch_inputs), batch_targets).sum()
            gradients = torch.autograd.grad(loss, list(trained.values()))
            for name, part in zip(trained, gradients, strict=True):
                total[name] += part
        parts = [sample_priorities(model, loss_fn, *batch, total) for batch in batches]
    return torch.cat(parts).cpu().double().numpy(), total


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off dropout and fused kernels; restore modes and random state afterwards."""
    dropout = nn.modules.dropout._DropoutNd
    modes = {m: m.training for m in model.modules() if isinstance(m, dropout)}
    padded = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    ]
    hooks = [layer.register_forward_hook(_freeze_padding) for layer in padded]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in modes:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            sdpa_kernel(SDPBackend.MATH),  # the only attention kernel with a forward mode
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", DeprecationWarning)  # from inside torch
            yield
    finally:
        for hook in hooks:
            hook.remove()
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode


def _freeze_padding(layer: nn.Embedding, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
    """Remove the tangent at padding, where backward has no gradient either."""
    is_padding = (arguments[0] == layer.padding_idx).unsqueeze(-1)
    primal = forward_ad.unpack_dual(output).primal  # type: ignore[no-untyped-call]
    return torch.where(is_padding, primal, output)


class LayerPriorities:
    """Sum up each example's priority during ``backward``, by hooks on layers."""

    def __init__(self, model: nn.Module, layers: str = "last") -> None:
        parts_of = {m: dict(m.named_parameters(recurse=False)) for m in model.modules()}
        parts_of = {layer: parts for layer, parts in parts_of.items() if parts}
        if not parts_of:
            raise invalid("model", type(model).__name__, "have parameters")
        if check_choice("layers", layers, LAYERS) == "last":
            # Another layer may share parameters with the last one.
            last = set(list(parts_of.values())[-1].values())
            parts_of = {layer: p for layer, p in parts_of.items() if last & set(p.values())}
        for layer in parts_of:
            if not isinstance(layer, LINEAR_IN_PARAMETERS):
                rule = "be linear in their parameters (Linear, Conv, Embedding, normalisation)"
                hint = "take layers='last', or call sample_priorities"
                raise invalid("layers that priorities count", type(layer).__name__, rule, hint)
        # A parameter that layers share has one name in the model, and one direction.
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._names = {
            layer: {leaf: names[parameter] for leaf, parameter in parts.items()}
            for layer, parts in parts_of.items()
        }
        used = {name for parts in self._names.values() for name in parts.values()}
        self.parameters = {n: p for n, p in model.named_parameters() if n in used}
        self.direction: Parameters = {}
        self._clear()
        self._is_checked = False
        self._handles = [layer.register_forward_hook(self._on_forward) for layer in self._names]
        self._handles += [
            p.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, p in self.parameters.items()
            if p.requires_grad
        ]

    def _clear(self) -> None:
        # Priorities of the batch by layer, and gbar . G, which they should add up to.
        self._sums: list[Tensor] = []
        self._expected_sum = 0.0
        # Whether the backward pass of the batch has begun.
        self._is_over = False

    def _on_forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.direction:
            # Sums that were not collected belong to a dropped batch or to another sampler.
            if self._is_over:
                self._clear()
            hook = partial(self._on_backward, layer, arguments[0].detach())
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_backward(self, layer: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        """Add the inner products of delta_i and layer(a_i; gbar)."""
        self._is_over = True
        if not self.direction:
            return
        moving = {leaf: self.direction[name] for leaf, name in self._names[layer].items()}
        dtype = next(iter(moving.values())).dtype
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        buffers = {
            name: b.to(dtype, copy=True) if b.is_floating_point() else b.clone()
            for name, b in layer.named_buffers(recurse=False)
        }
        with torch.no_grad():
            moved = functional_call(layer, moving | buffers, (inputs,))
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                # Padding has no gradient, but a shared weight has a direction there too.
                moved = moved.masked_fill((inputs == layer.padding_idx).unsqueeze(-1), 0.0)
        self._sums.append((gradient.flatten(1).to(dtype) * moved.flatten(1)).sum(1))

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if self._sums and not self._is_checked:
            self._expected_sum += float((gradient.to_dense() * self.direction[name]).sum())

    def collect(self, size: int) -> Tensor | None:
        """Return the priorities of a batch, each times the factor of its loss in ``backward``."""
        sums = self._sums
        expected = self._expected_sum
        self._clear()
        if not sums or not self.direction:
            return None
        hint = "call sample_priorities"
        lengths = {len(part) for part in sums} - {size}
        if lengths:
            rule = f"have the {size} examples in the first dimension of each layer that counts"
            raise invalid("model", lengths, rule, hint)
        priorities = reduce(torch.add, sums)
        # The sums differ if a parameter is used outside its layer.
        if not self._is_checked:
            self._is_checked = True
            size_of_all = max(float(priorities.abs().sum()), 1e-30)
            error = abs(float(priorities.sum()) - expected) / size_of_all
            if error > TOLERANCE:
                rule = "use parameters that priorities count in their layers only"
                raise invalid("model", f"a sum that is {error:.0%} off", rule, hint)
        return priorities

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


class AggregatedGradient:
    """Keep the sum of all N examples' gradients, along which priorities are taken (Eq. 9)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters = dict(parameters)
        self.num_samples = num_samples
        self.total = {n: at_least_single(torch.zeros_like(p)) for n, p in parameters.items()}
        # Number of examples that the total covers. It follows Eq. 9 too, and corrects the total as
        # Adam corrects its moments.
        self.covered = 0.0

    @property
    def scale(self) -> float:
        """Factor from ``total`` to a sum over all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.covered else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The sum over N examples; zeros before the first batch."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to the devices of the parameters."""
        for name, parameter in self.parameters.items():
            self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int, gradients: Gradients) -> None:
        """Add the mean gradient of a batch (Alg. 1, l. 22)."""
        self.to_device()
        # Eq. 9: gbar <- (1 - n / N) gbar + n g
        num_new = min(num_new, self.num_samples)
        kept_share = 1 - num_new / self.num_samples
        for name, total in self.total.items():
            total.mul_(kept_share)
            mean_gradient = gradients[name]
            if mean_gradient is not None:
                total.add_(mean_gradient, alpha=num_new)
        self.covered = kept_share * self.covered + num_new
