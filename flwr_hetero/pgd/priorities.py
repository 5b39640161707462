r"""Priorities of a batch (Eq. 8): derivatives of its losses along the aggregated gradient.

One pass with dual numbers has them, or the training step's own layers. A layer that is linear in
its parameters moves by ``layer(input; gbar)``; with :math:`\delta_i` the gradient at its output

.. math:: p_i = \sum_{layers} \langle \delta_i, \mathrm{layer}(a_i; \bar g) \rangle
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias, cast

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

NO_FORWARD_MODE = ("implemented", "not support", "view size is not compatible")
"""What torch says of layers without a forward mode; the last of GroupNorm on channels last."""
LINEAR_IN_PARAMETERS = (
    nn.Linear, _ConvNd, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase,
)  # fmt: skip
LAYERS = ("last", "all")
NUM_PROBES, TOLERANCE = 8, 0.05
"""Random sums of losses that check the layers' priorities, and the relative error allowed."""

_log = logging.getLogger(__name__)


def sample_priorities(
    model: nn.Module, loss_fn: Loss, inputs: Tensor, targets: Tensor, direction: Parameters
) -> Tensor:
    r"""Compute the priority of each example of a batch (Eq. 8).

    .. math:: p_i = \bar g \cdot g_i = \frac{d}{dt} L_i(W + t \bar g) \Big|_{t=0}

    Parameters
    ----------
    model : nn.Module
        Left as it is: mode, parameters, gradients, buffers and global random state.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` with one loss per example.
    inputs, targets : Tensor, shape (batch, ...)
        The examples.
    direction : mapping of str to Tensor
        The aggregated gradient by parameter name; a parameter that is left out counts as
        not moving (the last layer alone is cheaper and ranks much the same).

    Returns
    -------
    Tensor, shape (batch,)
        Signed priorities, detached. In training mode they contain an example's effect on the
        statistics of BatchNorm, as the training step does; dropout is off.

    Raises
    ------
    ValueError
        If ``direction`` does not fit the model or is not finite, if ``loss_fn`` does not return
        one finite loss per example, or if what moves goes through a layer without a forward
        mode in torch: LSTM, EmbeddingBag, ``weight_norm``.

    Examples
    --------
    >>> model, gradient = nn.Linear(2, 1, bias=False), {"weight": torch.tensor([[1.0, 2.0]])}
    >>> inputs, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2)
    >>> loss = lambda outputs, targets: outputs[:, 0] - targets
    >>> sample_priorities(model, loss, inputs, targets, gradient)
    tensor([1., 4.])
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not direction:
        raise invalid("direction", direction, "name at least one parameter")
    for name, part in direction.items():
        if name not in shapes:
            raise invalid("direction", name, f"use the model's parameter names {list(shapes)}")
        if tuple(part.shape) != shapes[name]:
            rule = f"have the shape {shapes[name]} of the parameter"
            raise invalid(f"direction[{name!r}]", tuple(part.shape), rule)

    def losses_at(tensors: Parameters) -> Tensor:
        losses = loss_fn(functional_call(model, dict(tensors), (inputs,)), targets)
        if losses.shape != inputs.shape[:1]:
            rule = f"return one loss per example, shape ({len(inputs)},)"
            raise invalid("loss_fn", tuple(losses.shape), rule, 'build it with reduction="none"')
        return finite("loss_fn", losses, "return finite losses")

    priorities = derivative(model, losses_at, direction, inputs.device)
    return finite("direction", priorities, "give finite priorities")


def all_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    *,
    names: Iterable[str] | None = None,
    batch_size: int = 512,
) -> tuple[NDArray[np.float64], dict[str, Tensor]]:
    """Compute every example's priority along the gradient of all of them (Eq. 7 and 8)."""
    own = dict(model.named_parameters())
    counted = own if names is None else {name: own[name] for name in own if name in set(names)}
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
        direction = {name: part.to(own[name]) for name, part in total.items()}
        found = [sample_priorities(model, loss_fn, *batch, direction) for batch in batches]
    return torch.cat(found).cpu().double().numpy(), total


def derivative(
    model: nn.Module,
    values_at: Callable[[Parameters], Tensor],
    direction: Parameters,
    device: torch.device,
) -> Tensor:
    """Carry dual numbers (parameter, direction) through the network: exact, one pass."""
    point = {name: p.detach() for name, p in model.named_parameters() if name in direction}
    # convolutions take channels last from their kernels: once more with contiguous ones
    plain = {n: p.clone(memory_format=torch.contiguous_format) for n, p in point.items()}
    reason = ""
    for parameters in (point, plain):
        with undisturbed(model, device), torch.no_grad(), forward_ad.dual_level():
            pairs = {n: (p, direction[n].to(p)) for n, p in parameters.items()}
            dual = {name: forward_ad.make_dual(*pair) for name, pair in pairs.items()}  # type: ignore[no-untyped-call]
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            try:
                values, tangent = forward_ad.unpack_dual(values_at({**dual, **buffers}))  # type: ignore[no-untyped-call]
                return torch.zeros_like(values) if tangent is None else cast(Tensor, tangent)
            except RuntimeError as error:
                reason = str(error).split(" because")[0]
                if not any(sign in reason for sign in NO_FORWARD_MODE):
                    raise
    hint = "leave the parameters up to this layer out of the direction"
    raise invalid("model", reason, "be of layers that torch differentiates in forward mode", hint)


def finite(argument: str, values: Tensor, rule: str) -> Tensor:
    """Return values that are finite."""
    if len(bad := values[~values.isfinite()]):
        hint = "the model has diverged, lower the learning rate"
        raise invalid(argument, bad[:3].tolist(), rule, hint)
    return values


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off dropout and fused kernels; put modes and random state back afterwards."""
    kind = nn.modules.dropout._DropoutNd
    modes = {m: m.training for m in model.modules() if isinstance(m, kind)}
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
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode


class Call(NamedTuple):
    """A call of a model, and the gradient at its output."""

    model: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    gradient: Tensor

    def losses(self, tensors: Parameters | None = None) -> Tensor:
        """Call the model again: per example a number that moves as its loss does."""
        found = functional_call(self.model, dict(tensors or {}), self.arguments, self.options)
        output = cast(Tensor, main_output(found))
        return (output * self.gradient.to(output)).flatten(1).sum(1)


def main_output(output: object) -> Tensor | None:
    """Find the outputs, one per example: what the model returns, or the first tensor in it."""
    found = output.values() if isinstance(output, Mapping) else output
    parts = found if isinstance(found, Iterable) and not isinstance(found, Tensor) else [found]
    tensors = (part for part in parts if isinstance(part, Tensor))
    return next((t for t in tensors if t.ndim and t.is_floating_point()), None)


class LayerPriorities:
    """Sum up each example's priority during ``backward``, by hooks on layers."""

    def __init__(self, model: nn.Module, layers: str = "last") -> None:
        own = [(n, m) for n, m in model.named_modules() if list(m.parameters(recurse=False))]
        if not own:
            raise invalid("model", type(model).__name__, "have parameters")
        hooked = own if check_choice("layers", layers, LAYERS) == "all" else own[-1:]
        for name, layer in hooked:
            if not isinstance(layer, LINEAR_IN_PARAMETERS):
                rule = "be linear in its parameters (Linear, Conv, Embedding, normalisation)"
                hint = "take layers='last', or call sample_priorities"
                raise invalid(f"layer {name!r}", type(layer).__name__, rule, hint)
        # a parameter that layers share has one name, and one direction
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = {
            layer: {leaf: names[id(p)] for leaf, p in layer.named_parameters(recurse=False)}
            for _, layer in hooked
        }
        used = {name for parts in self._names.values() for name in parts.values()}
        self.parameters = {n: p for n, p in model.named_parameters() if n in used}
        self.layers, self.direction = layers, cast(Parameters, {})
        self.is_checked = self.by_forward_mode = self._is_over = False
        self._sums, self._call = list[Tensor](), cast("Call | None", None)
        self._handles = [layer.register_forward_hook(self._on_forward) for layer in self._names]
        self._handles.append(model.register_forward_hook(self._on_output, with_kwargs=True))

    def _on_forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.direction and not self.by_forward_mode:
            # what is there was another sampler's batch, or dropped
            if self._is_over:
                self._sums, self._is_over = [], False
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
        self._sums.append((gradient.flatten(1).to(kind) * moved.flatten(1)).sum(1))

    def _on_output(
        self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: object
    ) -> None:
        # the check and forward mode need the call, and the gradient at its output
        found = main_output(output)
        needed = self.direction and (self.by_forward_mode or not self.is_checked)
        if needed and found is not None and found.requires_grad:

            def keep(gradient: Tensor) -> None:
                self._call = Call(model, arguments, options, gradient.detach())

            found.register_hook(keep)  # type: ignore[no-untyped-call]

    def collect(self, size: int) -> Tensor | None:
        """Return the priorities of a batch, each times its loss's factor in ``backward``."""
        sums, call, direction = self._sums, self._call, self.direction
        self._sums, self._call, self.direction = [], None, {}
        if not direction:
            return None
        fits = all(len(part) == size for part in sums)
        if call is not None and not self.by_forward_mode:
            self._check(call, direction, fits)
        elif sums and self.layers == "all" and not self.is_checked:
            self.is_checked = True
            _log.warning("layers='all' cannot be checked: the model is not called as a whole.")
        found = reduce(torch.add, sums) if sums and fits else None
        if call is not None and self.by_forward_mode:
            found = derivative(call.model, call.losses, direction, call.gradient.device)
            found, fits = at_least_single(found), len(found) == size
        self.direction = direction
        if not fits:
            rule = f"have the {size} examples in its first dimension, and be called as a whole"
            raise invalid("model", [len(part) for part in sums], rule, "call sample_priorities")
        return found

    def _check(self, call: Call, direction: Parameters, fits: bool) -> None:
        """Let forward mode take over, with a warning, if the layers' sums are wrong."""
        if fits and not call.gradient.isfinite().all():
            return
        error = self._error(call, direction) if fits else float("inf")
        self.is_checked, self.by_forward_mode = True, not error <= TOLERANCE
        if self.by_forward_mode:
            wrong = f"an error of {error:.0%}" if fits else "other lengths than the batch"
            _log.warning(
                "layers=%r does not measure this model's priorities (%s): in some layer the "
                "examples are not in the first dimension, or its parameters are used outside it. "
                "Forward mode takes over, at the price of a forward pass per batch measured.",
                self.layers, wrong,
            )  # fmt: skip

    def _error(self, call: Call, direction: Parameters) -> float:
        """Return the relative error of the layers' sums, in passes of their own."""
        own, device = dict(call.model.named_parameters()), call.gradient.device
        moving = {name: own[name] for name in direction if own[name].requires_grad}
        if not moving:
            return 0.0
        options: Any = {"retain_graph": True, "materialize_grads": True}
        pull: Any = partial(torch.autograd.grad, inputs=[*moving.values()], **options)
        # in evaluation mode examples are independent, and nothing is random
        plain = torch.autocast(device.type, enabled=False)
        with scoring(call.model), undisturbed(call.model, device), plain, torch.enable_grad():
            try:
                self.direction = direction
                losses = call.losses()
                pull(losses.sum())
                found, self.direction = torch.stack(self._sums).sum(0).float(), {}
                # with an example's gradient in each row of J, <v, J d> = <J^T v, d> for every v
                probes, expected = torch.randn(NUM_PROBES, len(losses), device=device), []
                for v in probes:
                    pulled = pull((v.to(losses) * losses).sum())
                    pairs = zip(pulled, (direction[name] for name in moving), strict=True)
                    expected.append(sum(float((g.to_dense().float() * d).sum()) for g, d in pairs))
                right = torch.tensor(expected, device=device)
                return float((probes @ found - right).norm() / right.norm().clamp_min(1e-30))
            # sums of other shapes, or a pass that allows no second one
            except RuntimeError:
                return float("inf")
            finally:
                self._sums, self._call, self.direction = [], None, {}

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
