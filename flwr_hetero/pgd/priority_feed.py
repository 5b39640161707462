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
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from flwr_hetero.client.batch_sampler import Batch, BatchSampler
from flwr_hetero.client.sampled_loss import Loss
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.pgd.priorities import all_priorities, length_of
from flwr_hetero.pgd.sampler import PGDSampler
from flwr_hetero.state_dict import StateDict, check_state

LINEAR_IN_PARAMETERS = (
    nn.Linear, _ConvNd, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _NormBase,
)  # fmt: skip
LAYERS = ("last", "all")

EVERY_OPEN, EVERY_CLOSED = 4, 64
"""Of so many batches of the rule ``stochastic`` one is measured, by the state of the gate."""


class PriorityBatch(NamedTuple):
    """What a backward pass says of each example, times the factor that its loss had in it."""

    priorities: Tensor
    norms: Tensor


class LayerPriorities:
    r"""Sum up each example's priority during ``backward``, by hooks on the layers.

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
        self.direction: Mapping[str, Tensor] = {}
        self._sums: list[Tensor] = []
        self._norms: Tensor | None = None
        self._handles = [layer.register_forward_hook(self._on_forward) for layer in self._names]

    def _on_forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.direction:
            inputs = arguments[0].detach()
            output.register_hook(partial(self._on_backward, layer, inputs))  # type: ignore[no-untyped-call]

    def _on_backward(self, layer: nn.Module, inputs: Tensor, gradient: Tensor) -> None:
        moving = {leaf: self.direction[name] for leaf, name in self._names[layer].items()}
        with torch.no_grad(), _parameters_of(layer, moving):
            moved = layer.forward(inputs)
        gradient = gradient.flatten(1)
        self._sums.append((gradient * moved.flatten(1)).sum(1))
        if self._norms is None:
            self._norms = gradient.norm(dim=1)

    def collect(self) -> PriorityBatch | None:
        """Return what was measured since the last call, and clear it."""
        sums, self._sums = self._sums, []
        norms, self._norms = self._norms, None
        return None if norms is None else PriorityBatch(reduce(torch.add, sums), norms)

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


class AggregatedGradient:
    r"""Keep :math:`\bar g`, one tensor per parameter, by Eq. 9.

    .. math:: \bar g \leftarrow (1 - n / N) \, \bar g + g_n

    The paper begins with a pass over all data. Here :math:`\bar g` may also begin at zero: the
    share of the data that it covers follows the same rule, and :attr:`direction` divides by it
    (Adam corrects its moments in the same way).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_samples: int) -> None:
        self.parameters, self.num_samples = dict(parameters), num_samples
        self.total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.covered = 0.0

    @property
    def is_known(self) -> bool:
        """Whether any gradient came in yet."""
        return self.covered > 0.0

    @property
    def scale(self) -> float:
        """Factor from ``total`` to a sum over all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.is_known else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The aggregated gradient, a sum over N examples; zeros while nothing is known."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to where the parameters are."""
        for name, parameter in self.parameters.items():
            self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int) -> None:
        """Add the parameters' ``.grad``, the mean gradient of a batch (Alg. 1, l. 22)."""
        num_new = min(num_new, self.num_samples)
        keep = 1 - num_new / self.num_samples
        for name, parameter in self.parameters.items():
            self.total[name].mul_(keep)
            if parameter.grad is not None:
                self.total[name].add_(parameter.grad, alpha=num_new)
        self.covered = keep * self.covered + num_new

    def follow(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
        """Point along the server's last update: where the whole fleet went.

        The update's length has no unit of a gradient, so it takes the present length if there
        is one: priorities keep their scale and their trends stay valid.
        """
        descent = {n: (start[n] - end[n]).to(part) for n, part in self.total.items()}
        length = length_of(descent)
        if length > 0.0:
            present = length_of(self.total) if self.is_known else length * self.num_samples
            self.total = {name: part * (present / length) for name, part in descent.items()}
            self.covered = self.covered or float(self.num_samples)

    def state_dict(self) -> StateDict:
        """Return the sum and its cover as flat arrays and scalars."""
        arrays = {f"gradient.{n}": part.cpu().numpy().copy() for n, part in self.total.items()}
        return {**arrays, "gradient_covered": self.covered}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken."""
        shapes = {f"gradient.{n}": (tuple(p.shape), "f") for n, p in self.total.items()}
        check_state(state, shapes | {"gradient_covered": float}, "AggregatedGradient")
        arrays = [np.asarray(state[key]) for key in shapes]
        covered = cast(float, state["gradient_covered"])
        bounded = 0.0 <= covered <= self.num_samples * (1 + 1e-9)
        if not (bounded and all(np.isfinite(array).all() for array in arrays)):
            raise ValueError("state of AggregatedGradient must hold finite sums over the samples.")
        self.total = {
            name: torch.from_numpy(array.copy()).to(part)
            for (name, part), array in zip(self.total.items(), arrays, strict=True)
        }
        self.covered = covered


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    Used in place of the sampler; :meth:`on_batch` is called between ``backward`` and the
    optimizer's step, as in the example, which is one iteration of Algorithm 1 per batch.

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches.
    model : nn.Module
        The model trained. Has hooks until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Which parameters the priorities count: the last layer's cost little and rank almost
        alike; all cost about one more forward pass.

    Raises
    ------
    ValueError
        If the model has no parameters, or a layer is not linear in its parameters.

    Notes
    -----
    Priorities count along the gradient before this batch (Alg. 1, l. 20); the very first batch
    has none to follow. ``topk`` measures every batch. ``stochastic`` measures one in 4 while its
    gate is open and one in 64 while it is closed; each stands for those since the one before, so
    that the aggregate remembers an epoch.

    References
    ----------
    Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models through
    Prioritization", section III-B.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model, inputs, targets = nn.Linear(3, 2), torch.randn(8, 3), torch.arange(8) % 2
    >>> loss_fn = nn.CrossEntropyLoss(reduction="none")
    >>> with PriorityFeed(PGDSampler(8, 4, rule="topk"), model) as feed:
    ...     for _ in range(5):
    ...         indices, weights = feed.next_batch()
    ...         losses = loss_fn(model(inputs[indices]), targets[indices])
    ...         (losses * torch.from_numpy(weights)).mean().backward()
    ...         _ = feed.on_batch(model, indices, losses)
    >>> feed.summary()["coverage"]
    1.0
    """

    def __init__(self, sampler: PGDSampler, model: nn.Module, *, layers: str = "last") -> None:
        super().__init__(sampler.num_samples, sampler.batch_size)
        self.sampler, self.layers = sampler, layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self._batches, self._weights, self._absorbs = 0, np.ones(0), False

    @property
    def measure_every(self) -> int:
        """Of so many batches one is measured."""
        if self.sampler.rule == "topk":
            return 1
        return EVERY_OPEN if self.sampler.is_open else EVERY_CLOSED

    def next_batch(self) -> Batch:
        """Draw the next batch and, if it is to be measured, point along the present gradient."""
        indices, self._weights = self.sampler.next_batch()
        measured = self._batches % self.measure_every == 0
        self._batches += 1
        # with the gate closed the batch before gives its gradient too: a fresh direction
        before = not self.sampler.is_open and self._batches % self.measure_every == 0
        self._absorbs = measured or before
        if measured and self.gradient.is_known:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total
        return indices, self._weights

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
        """Pass the batch's priorities to the sampler and add its gradient to the aggregate.

        ``model`` holds the gradient of ``(weights * losses).mean()``; ``losses`` are not used.
        Returns how many examples went through another forward pass: the batch if the priorities
        of all layers were measured, else none.
        """
        if not self._absorbs:
            return 0
        measured = self.listener.collect()
        self.listener.direction = {}  # the next batch may be another sampler's
        if measured is not None:
            # the loss of example i had the factor weight_i / batch, the direction 1 / scale
            factors = self._weights / (self.gradient.scale * len(indices))
            priorities, norms = torch.stack(measured).cpu().numpy() / factors
            self.sampler.update(indices, priorities, norms)
        self.gradient.absorb(len(indices) * self.measure_every)
        return len(indices) if measured is not None and self.layers == "all" else 0

    def full_pass(
        self,
        model: nn.Module,
        loss_fn: Loss,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int = 512,
    ) -> None:
        """Compute the gradient and the priority of all examples: the paper's first step.

        Costs about two epochs, in evaluation mode, ``batch_size`` examples at a time; the model
        is left as it was. Without it the first epoch is taken in turn instead.
        """
        self.listener.direction = {}
        priorities, total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.total, self.gradient.covered = total, float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: a training loop passes losses, not priorities."""

    def summary(self) -> dict[str, float]:
        """Describe the sampler's state for the history."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler and the aggregated gradient."""
        own: StateDict = {"batches": self._batches}
        return self.sampler.state_dict() | self.gradient.state_dict() | own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        check_state(state, {"batches": int}, "PriorityFeed")
        before = self.gradient.state_dict()
        self.gradient.load_state_dict(state)
        try:
            self.sampler.load_state_dict(state)
        except ValueError:
            self.gradient.load_state_dict(before)
            raise
        self._batches = cast(int, state["batches"])

    def close(self) -> None:
        """Take the hooks off the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
