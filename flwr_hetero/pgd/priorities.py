r"""Priorities of a batch in one pass: the derivative of its losses along the aggregated gradient.

With the losses :math:`L(W)` of shape (batch,) and a direction :math:`d`, ``forward_mode``,
``double_backward`` and ``central_difference`` each return :math:`J d`, where the rows of :math:`J`
are the gradients per example, which are never formed.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_hetero.client.weighted_loss import Loss, at_least_single, scoring
from flwr_hetero.errors import check_choice, invalid

Parameters: TypeAlias = Mapping[str, Tensor]
LossesAt: TypeAlias = Callable[[Parameters], Tensor]
"""Losses of a batch, shape (batch,), as a function of parameters by name."""
Method: TypeAlias = Callable[[LossesAt, Parameters, Parameters], Tensor]
"""Losses, point and direction: the derivative of the losses."""

LAYOUT = "view size is not compatible"
"""What the forward mode of GroupNorm says of activations with channels last."""

_log = logging.getLogger(__name__)


def forward_mode(losses_at: LossesAt, point: Parameters, direction: Parameters) -> Tensor:
    """Carry dual numbers (parameter, direction) through the network: exact, one pass."""
    _load_decompositions()
    try:
        return _dual_pass(losses_at, point, direction)
    except RuntimeError as error:
        if LAYOUT not in str(error):
            raise
    # convolutions take channels last from their kernels: once more with contiguous ones
    plain = {n: p.clone(memory_format=torch.contiguous_format) for n, p in point.items()}
    return _dual_pass(losses_at, plain, direction)


def _dual_pass(losses_at: LossesAt, point: Parameters, direction: Parameters) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(p, direction[name]) for name, p in point.items()}  # type: ignore[no-untyped-call]
        losses, tangent = forward_ad.unpack_dual(losses_at(dual))  # type: ignore[no-untyped-call]
    derivative: Tensor = torch.zeros_like(losses) if tangent is None else tangent
    return derivative


def double_backward(losses_at: LossesAt, point: Parameters, direction: Parameters) -> Tensor:
    r"""Differentiate :math:`v^T J d`, which is linear in v: exact, two reverse passes."""
    with torch.enable_grad():
        leaves = {name: p.detach().clone().requires_grad_() for name, p in point.items()}
        losses = losses_at(leaves)
        v = torch.zeros_like(losses, requires_grad=True)
        product = (v * losses).sum()  # of a number, torch needs no slow import
        pulled = torch.autograd.grad(
            product, list(leaves.values()), create_graph=True, materialize_grads=True
        )
        parts = [(g * direction[name]).sum() for name, g in zip(leaves, pulled, strict=True)]
        (derivative,) = torch.autograd.grad(torch.stack(parts).sum(), v)
    return derivative


def central_difference(losses_at: LossesAt, point: Parameters, direction: Parameters) -> Tensor:
    """Move both ways along the direction, by 1e-3 of the parameters' length: for any layer."""
    size, length = length_of(point), length_of(direction)
    step = 1e-3 * max(size, 1e-3) / length if length else 0.0
    with torch.no_grad():
        ahead = losses_at({name: p + step * direction[name] for name, p in point.items()})
        behind = losses_at({name: p - step * direction[name] for name, p in point.items()})
    return (ahead - behind) / (2 * step) if step else torch.zeros_like(ahead)


def first_possible(losses_at: LossesAt, point: Parameters, direction: Parameters) -> Tensor:
    """Use the first method that the layers allow."""
    for method in (forward_mode, double_backward):
        try:
            return method(losses_at, point, direction)
        except (NotImplementedError, RuntimeError) as error:
            if not any(sign in str(error) for sign in ("implemented", "not support", LAYOUT)):
                raise
            _log_once(method.__name__, str(error).split(" because")[0])
    return central_difference(losses_at, point, direction)


METHODS = {
    "auto": first_possible,
    "forward": forward_mode,
    "backward": double_backward,
    "difference": central_difference,
}


def length_of(parts: Parameters) -> float:
    """Return the Euclidean norm of all parts together."""
    return float(torch.stack([p.double().square().sum() for p in parts.values()]).sum().sqrt())


@cache
def _load_decompositions() -> None:
    """Let torch load its own forward-mode rules, which warns of torch's own deprecations."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


@cache
def _log_once(method: str, reason: str) -> None:
    _log.info("no %s for these layers: %s", method, reason)


def sample_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    direction: Parameters,
    *,
    method: str = "auto",
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
    method : {"auto", "forward", "backward", "difference"}
        "auto" takes the first that the layers allow: forward mode; two reverse passes (exact
        too, about twice the cost); the central difference of two plain forward passes (any
        layer, relative error about 1e-4).

    Returns
    -------
    Tensor, shape (batch,)
        Signed priorities, detached.

    Raises
    ------
    ValueError
        If ``direction`` does not fit the model or is not finite, ``loss_fn`` does not return
        one finite loss per example, or the method is unknown.
    NotImplementedError
        If the named method is not possible with these layers.

    Notes
    -----
    BatchNorm keeps its mode, on copies of its buffers; in training mode a priority then contains
    the example's effect on the batch statistics, as the training step does. Dropout is off. LSTM
    on the CPU and ``weight_norm`` are the known layers without a forward mode.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 1.0)
    >>> def half_square(outputs, targets):
    ...     return 0.5 * (outputs[:, 0] - targets) ** 2
    >>> inputs, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.0, 1.0])
    >>> gradient = {"weight": torch.tensor([[1.0, 2.0]])}
    >>> sample_priorities(model, half_square, inputs, targets, gradient)
    tensor([1., 4.])
    """
    check_choice("method", method, METHODS)
    _check_direction(model, direction)
    moving = {name: p.detach() for name, p in model.named_parameters() if name in direction}
    with undisturbed(model, inputs.device):
        seed = int(torch.randint(2**31, ()))

        def losses_at(parameters: Parameters) -> Tensor:
            torch.manual_seed(seed)  # for random layers that have no module to switch off
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            outputs = functional_call(model, {**parameters, **buffers}, (inputs,))
            return _checked(loss_fn(outputs, targets), len(inputs))

        priorities = METHODS[method](losses_at, moving, direction)
    if not priorities.isfinite().all():
        bad = priorities[~priorities.isfinite()][:3].tolist()
        raise invalid("direction", bad, "give finite priorities", "the gradient has diverged")
    return priorities


def _check_direction(model: nn.Module, direction: Parameters) -> None:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shapes:
        raise invalid("model", type(model).__name__, "have parameters")
    if not direction:
        raise invalid("direction", direction, "name at least one parameter")
    for name, part in direction.items():
        if name not in shapes:
            raise invalid("direction", name, f"use the model's parameter names {list(shapes)}")
        if tuple(part.shape) != shapes[name]:
            rule = f"have the shape {shapes[name]} of the parameter"
            raise invalid(f"direction[{name!r}]", tuple(part.shape), rule)


def _checked(losses: Tensor, batch: int) -> Tensor:
    """Refuse anything but one finite loss per example."""
    if losses.shape != (batch,):
        rule = f"return one loss per example, shape ({batch},)"
        raise invalid("loss_fn", tuple(losses.shape), rule, 'build it with reduction="none"')
    finite = losses.isfinite()
    if not finite.all():
        hint = "the model has diverged, lower the learning rate"
        raise invalid("loss_fn", losses[~finite][:3].tolist(), "return finite losses", hint)
    return losses


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off dropout and fused kernels; put modes and random state back afterwards."""
    random = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    modes = [module.training for module in random]
    fused = torch.backends.mha.get_fastpath_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        for module in random:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        # plain attention: the only one with a forward mode
        with torch.random.fork_rng(devices), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in zip(random, modes, strict=True):
            module.training = mode


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
        for batch, batch_targets in batches:
            with torch.enable_grad():
                loss = loss_fn(model(batch), batch_targets).sum()
            gradients = torch.autograd.grad(loss, list(moving.values()))
            for name, part in zip(moving, gradients, strict=True):
                total[name] += part
        direction = {name: part.to(own[name]) for name, part in total.items()}
        found = [sample_priorities(model, loss_fn, *batch, direction) for batch in batches]
    return torch.cat(found).cpu().double().numpy(), total
