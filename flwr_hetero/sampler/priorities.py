r"""PGD's priorities of a whole batch in one pass, without a gradient per example in memory.

The priority :math:`p_i = \bar g \cdot g_i` is the derivative of example i's loss when the
parameters move along :math:`\bar g`. Forward-mode differentiation carries that derivative
through the network beside the activations, for all examples at once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_hetero.core.errors import invalid
from flwr_hetero.sampler.directional import METHODS

Loss = Callable[[Tensor, Tensor], Tensor]
"""``loss_fn(outputs, targets)`` with one loss per example (``reduction="none"``)."""


def sample_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    direction: Mapping[str, Tensor],
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
        not moving (only the last layer's: cheaper, and the ranking is much the same).
    method : {"auto", "forward", "backward", "difference"}
        "auto" goes down this list until the layers allow it: forward mode; two reverse
        passes (exact too, about twice the cost); the central difference of two plain
        forward passes (always works, relative error about 1e-4).

    Returns
    -------
    Tensor, shape (batch,)
        Signed priorities, detached.

    Raises
    ------
    ValueError
        If the model has no parameters, ``direction`` does not fit them or is not finite,
        ``loss_fn`` does not return one finite loss per example, or the method is unknown.
    NotImplementedError
        If the named method is not possible with these layers.

    Notes
    -----
    BatchNorm keeps the mode the model is in, on copies of its buffers: in training mode a
    priority then contains the example's pull on the batch statistics, as the training step
    does. Dropout is off. Attention runs on PyTorch's plain implementation, the only one with
    a forward mode. LSTM on the CPU and ``weight_norm`` are the known layers without one.

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
    if method not in METHODS:
        raise invalid("method", method, f"be one of {list(METHODS)}", "leave it out")
    check_direction(model, direction)
    moving = {name: p.detach() for name, p in model.named_parameters() if name in direction}
    with _undisturbed(model, inputs.device):
        seed = int(torch.randint(2**31, ()))

        def losses_at(parameters: Mapping[str, Tensor]) -> Tensor:
            torch.manual_seed(seed)  # for random layers that have no module to switch off
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            outputs = functional_call(model, {**parameters, **buffers}, (inputs,))
            return _checked(loss_fn(outputs, targets), len(inputs))

        priorities = METHODS[method](losses_at, moving, direction)
    if not priorities.isfinite().all():
        bad = priorities[~priorities.isfinite()][:3].tolist()
        cure = "the aggregated gradient has diverged: begin it anew"
        raise invalid("direction", bad, "give finite priorities", cure)
    return priorities


def per_sample_priorities(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Tensor,
    targets: Tensor,
    direction: Mapping[str, Tensor],
    *,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute the same priorities by a gradient per example: slow, large, independent.

    Kept as the oracle of :func:`sample_priorities` and as the other side of its benchmark.

    Parameters
    ----------
    model, loss_fn, inputs, targets, direction
        As for :func:`sample_priorities`; the model in evaluation mode.
    chunk_size : int, optional
        Examples whose gradients are in memory at once; all of them by default.

    Returns
    -------
    Tensor, shape (batch,)
        Signed priorities, detached.

    Examples
    --------
    >>> model, inputs = nn.Linear(3, 2), torch.ones(4, 3)
    >>> loss = nn.CrossEntropyLoss(reduction="none")
    >>> gradient = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    >>> batch = (inputs, torch.tensor([0, 1, 0, 1]))
    >>> expected = per_sample_priorities(model, loss, *batch, gradient)
    >>> torch.allclose(sample_priorities(model, loss, *batch, gradient), expected, atol=1e-6)
    True
    """
    check_direction(model, direction)
    moving = {name: p.detach() for name, p in model.named_parameters() if name in direction}

    def loss_of(parameters: Mapping[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, dict(parameters), (one.unsqueeze(0),))
        return loss_fn(outputs, target.unsqueeze(0)).squeeze(0)

    gradient_of_each = vmap(grad(loss_of), in_dims=(None, 0, 0), chunk_size=chunk_size)
    gradients = gradient_of_each(moving, inputs, targets)
    products = [g.flatten(1) @ direction[name].flatten() for name, g in gradients.items()]
    return torch.stack(products).sum(0)


def check_direction(model: nn.Module, direction: Mapping[str, Tensor]) -> None:
    """Refuse a direction that does not fit the model's parameters.

    Parameters
    ----------
    model : nn.Module
        Whose parameters are to move.
    direction : mapping of str to Tensor
        By parameter name.

    Raises
    ------
    ValueError
        If the model has no parameters, or the direction is empty, names no parameter of the
        model or has another shape.

    Examples
    --------
    >>> check_direction(nn.Linear(2, 1), {"weight": torch.ones(1, 2)})
    >>> check_direction(nn.Linear(2, 1), {"weight": torch.ones(2)})
    Traceback (most recent call last):
    ...
    ValueError: direction['weight'] must have the shape (1, 2) of the parameter, got (2,): ...
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shapes:
        rule, cure = "have parameters", "there is no gradient to follow: sample uniformly"
        raise invalid("model", type(model).__name__, rule, cure)
    cure = "take the aggregated gradient of this very model"
    if not direction:
        raise invalid("direction", direction, "name at least one parameter", cure)
    for name, part in direction.items():
        if name not in shapes:
            rule = f"use the model's parameter names, such as {next(iter(shapes))!r}"
            raise invalid("direction", name, rule, cure)
        if tuple(part.shape) != shapes[name]:
            rule = f"have the shape {shapes[name]} of the parameter"
            raise invalid(f"direction[{name!r}]", tuple(part.shape), rule, cure)


def _checked(losses: Tensor, batch: int) -> Tensor:
    """Demand one finite loss per example."""
    if losses.shape != (batch,):
        rule = f"return one loss per example, shape ({batch},)"
        raise invalid("loss_fn", tuple(losses.shape), rule, 'build it with reduction="none"')
    finite = losses.isfinite()
    if not finite.all():
        bad = losses[~finite][:3].tolist()
        cure = "the model has diverged: lower the learning rate"
        raise invalid("loss_fn", bad, "return finite losses", cure)
    return losses


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch off dropout and fused kernels; put modes and random state back afterwards."""
    random = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    modes = [module.training for module in random]
    fused = torch.backends.mha.get_fastpath_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        for module in random:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.random.fork_rng(devices), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in zip(random, modes, strict=True):
            module.training = mode
