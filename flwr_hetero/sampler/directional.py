r"""The derivative of a vector of losses along one direction in parameter space, in three ways.

With :math:`L(W)` of shape (batch,) and a direction :math:`d`, each function returns
:math:`J d`, where :math:`J` holds one gradient per row but is never formed.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

LossesAt: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]
"""Losses of a batch, shape (batch,), as a function of parameters by name."""
_LAYOUT = "view size is not compatible"
_log = logging.getLogger(__name__)


def forward_mode(
    losses_at: LossesAt, point: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    """Carry dual numbers (parameter, direction) through the network: exact, one pass.

    Parameters
    ----------
    losses_at : callable
        Losses as a function of the parameters.
    point : mapping of str to Tensor
        Where to differentiate; needs no gradient.
    direction : mapping of str to Tensor
        Same names and shapes.

    Returns
    -------
    Tensor, shape (batch,)
        The derivative of each loss.

    Raises
    ------
    NotImplementedError
        If a layer has no forward mode: LSTM on the CPU, ``weight_norm``, ``EmbeddingBag``.

    Notes
    -----
    The forward mode of GroupNorm cannot read activations with channels last, the layout that
    convolutions hand on from kernels with channels last. The pass is then repeated with
    contiguous kernels.

    Examples
    --------
    >>> x, along = torch.tensor([1.0, 2.0]), {"w": torch.tensor(1.0)}
    >>> forward_mode(lambda p: (p["w"] * x) ** 2, {"w": torch.tensor(3.0)}, along)
    tensor([ 6., 24.])
    """
    _load_decompositions()
    try:
        return _dual_pass(losses_at, point, direction)
    except RuntimeError as error:
        if _LAYOUT not in str(error):
            raise
    plain = {n: p.clone(memory_format=torch.contiguous_format) for n, p in point.items()}
    return _dual_pass(losses_at, plain, direction)


def _dual_pass(
    losses_at: LossesAt, point: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(p, direction[name]) for name, p in point.items()}  # type: ignore[no-untyped-call]
        losses, tangent = forward_ad.unpack_dual(losses_at(dual))  # type: ignore[no-untyped-call]
    derivative: Tensor = torch.zeros_like(losses) if tangent is None else tangent
    return derivative


def double_backward(
    losses_at: LossesAt, point: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    r"""Differentiate :math:`v \mapsto v^T J d`, which is linear in v: exact, two reverse passes.

    Parameters, returns
        As :func:`forward_mode`; at about twice its cost.

    Raises
    ------
    NotImplementedError or RuntimeError
        If a layer cannot be differentiated twice: ``EmbeddingBag``, RNNs of cuDNN.

    Examples
    --------
    >>> x, along = torch.tensor([1.0, 2.0]), {"w": torch.tensor(1.0)}
    >>> double_backward(lambda p: (p["w"] * x) ** 2, {"w": torch.tensor(3.0)}, along)
    tensor([ 6., 24.])
    """
    with torch.enable_grad():
        leaves = {name: p.detach().clone().requires_grad_() for name, p in point.items()}
        losses = losses_at(leaves)
        v = torch.zeros_like(losses, requires_grad=True)
        pulled = torch.autograd.grad(
            losses, list(leaves.values()), v, create_graph=True, materialize_grads=True
        )
        parts = [(g * direction[name]).sum() for name, g in zip(leaves, pulled, strict=True)]
        (derivative,) = torch.autograd.grad(torch.stack(parts).sum(), v)
    return derivative


def central_difference(
    losses_at: LossesAt, point: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    """Move both ways along the direction, by a thousandth of the parameters' length.

    Parameters, returns
        As :func:`forward_mode`; two plain forward passes, for any layer, with a relative
        error of about 1e-4 (single precision; worse across kinks).

    Examples
    --------
    >>> x, along = torch.tensor([1.0, 2.0]), {"w": torch.tensor(1.0)}
    >>> central_difference(lambda p: (p["w"] * x) ** 2, {"w": torch.tensor(3.0)}, along).round()
    tensor([ 6., 24.])
    """
    size, length = _norm(point.values()), _norm(direction.values())
    step = 1e-3 * max(size, 1e-3) / length if length else 0.0
    with torch.no_grad():
        ahead = losses_at({name: p + step * direction[name] for name, p in point.items()})
        behind = losses_at({name: p - step * direction[name] for name, p in point.items()})
    return (ahead - behind) / (2 * step) if step else torch.zeros_like(ahead)


def first_possible(
    losses_at: LossesAt, point: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    """Go from exact and cheap to approximate, only as far down as the layers force us.

    Parameters, returns
        As :func:`forward_mode`.

    Examples
    --------
    >>> x, along = torch.tensor([1.0, 2.0]), {"w": torch.tensor(1.0)}
    >>> first_possible(lambda p: (p["w"] * x) ** 2, {"w": torch.tensor(3.0)}, along)
    tensor([ 6., 24.])
    """
    for method in (forward_mode, double_backward):
        try:
            return method(losses_at, point, direction)
        except (NotImplementedError, RuntimeError) as error:
            if not any(sign in str(error) for sign in ("implemented", "not support", _LAYOUT)):
                raise
            _tell_once(method.__name__, str(error).split(" because")[0])
    return central_difference(losses_at, point, direction)


METHODS = {
    "auto": first_possible,
    "forward": forward_mode,
    "backward": double_backward,
    "difference": central_difference,
}


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@cache
def _load_decompositions() -> None:
    """Let torch load its own forward-mode rules, which warns of torch's own deprecations."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


@cache
def _tell_once(method: str, reason: str) -> None:
    _log.info("no %s for these layers: %s", method, reason)
