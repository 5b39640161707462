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

from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import invalid
from flwr_hetero.pgd.priorities import Loss, all_priorities
from flwr_hetero.pgd.sampler import PGDSampler
from flwr_hetero.state_dict import StateDict

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
    """What a backward pass says of each example, times the factor that its loss had in it."""

    priorities: Tensor
    norms: Tensor


class LayerPriorities:
    r"""Listen to layers and sum up each example's priority during ``backward``.

    Notes
    -----
    BatchNorm in training mode couples the examples: :math:`\delta_i` then holds the pull of
    example i's activations on the other losses too.
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
        """Return what was measured since the last call, and forget it."""
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


PREFIX = "gradient."


class AggregatedGradient:
    r"""Keep :math:`\bar g`, one tensor per parameter, by Eq. 9.

    .. math:: \bar g \leftarrow (1 - n / N) \, \bar g + g_n

    Notes
    -----
    The paper begins with a pass over all data. Here :math:`\bar g` may also begin at zero: the
    share of the data that has come in is counted by the same rule, and :attr:`direction`
    divides by it, so that its length is right from the first batch (Adam corrects its moments
    in the same way).
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
        """What the sum must be multiplied by to stand for all N examples; 1 after some epochs."""
        return self.num_samples / self.covered if self.is_known else 1.0

    @property
    def direction(self) -> dict[str, Tensor]:
        """The aggregated gradient, a sum over N examples; zeros while nothing is known."""
        return {name: part * self.scale for name, part in self.total.items()}

    def to_device(self) -> None:
        """Move the sum to where the parameters are."""
        for name, parameter in self.parameters.items():
            if self.total[name].device != parameter.device:
                self.total[name] = self.total[name].to(parameter.device)

    def absorb(self, num_new: int) -> None:
        """Take in the parameters' ``.grad``, the mean gradient of a batch."""
        num_new = min(num_new, self.num_samples)
        keep = 1 - num_new / self.num_samples
        for name, parameter in self.parameters.items():
            self.total[name].mul_(keep)
            if parameter.grad is not None:
                self.total[name].add_(parameter.grad, alpha=num_new)
        self.covered = keep * self.covered + num_new

    def follow(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
        """Point where the whole fleet went: along the server's last update.

        Notes
        -----
        The update's length has no unit of a gradient, so it takes the present length if there
        is one: priorities keep their scale and their trends stay valid.
        """
        descent = {n: (start[n] - end[n]).to(part) for n, part in self.total.items()}
        length = _length(descent)
        if length > 0.0:
            present = _length(self.total) if self.is_known else length * self.num_samples
            self.total = {name: part * (present / length) for name, part in descent.items()}
            self.covered = self.covered or float(self.num_samples)

    def state_dict(self) -> StateDict:
        """Return the sum and its cover as flat arrays and scalars."""
        arrays: StateDict = {
            PREFIX + name: part.cpu().numpy().copy() for name, part in self.total.items()
        }
        return arrays | {"gradient_covered": self.covered}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken."""
        arrays = {name: np.asarray(state.get(PREFIX + name)) for name in self.total}
        covered = float(state.get("gradient_covered", np.nan))
        for name, part in self.total.items():
            if arrays[name].shape != tuple(part.shape) or not np.isfinite(arrays[name]).all():
                raise ValueError(f"state holds no gradient of {name}: start afresh.")
        if not 0.0 <= covered <= self.num_samples * (1 + 1e-9):
            raise ValueError(f"state holds an impossible cover {covered}: start afresh.")
        self.total = {
            name: torch.from_numpy(arrays[name].copy()).to(part)
            for name, part in self.total.items()
        }
        self.covered = covered


def _length(parts: Mapping[str, Tensor]) -> float:
    return float(
        torch.stack([part.double().square().sum() for part in parts.values()]).sum().sqrt()
    )


class PriorityFeed(BatchSampler):
    """Draw PGD's batches and learn from the gradients that training computes anyway.

    Stands where a sampler stands; :meth:`on_batch` is called between ``backward`` and the
    optimizer's step. One iteration of Algorithm 1 is then

    .. code-block:: python

        indices, weights = feed.next_batch()
        losses = loss_fn(model(inputs[indices]), targets[indices])
        (losses * torch.from_numpy(weights)).mean().backward()
        feed.on_batch(model, indices, losses)
        optimizer.step()

    Parameters
    ----------
    sampler : PGDSampler
        Draws the batches; aggressive.
    model : nn.Module
        The model trained. Listened to until :meth:`close` or the end of a ``with`` block.
    layers : {"last", "all"}
        Which parameters the priorities count: the last layer's cost little and rank almost
        alike; all cost about one more forward pass.
    stride, idle_stride : int
        Of so many batches one is measured while the sampler's gate is open and while it is
        closed; then the batch before gives its gradient, too. The rules of the paper measure
        every batch.

    Raises
    ------
    ValueError
        If the sampler is not aggressive: the examples taken in turn then have weight 0 and
        nothing of theirs flows back. Or if the model does not suit, see
        :class:`~flwr_hetero.pgd.priority_feed.LayerPriorities`.

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

    def __init__(
        self,
        sampler: PGDSampler,
        model: nn.Module,
        *,
        layers: str = "last",
        stride: int = 4,
        idle_stride: int = 64,
    ) -> None:
        super().__init__(sampler.num_samples, sampler.batch_size)
        for name, value in (("stride", stride), ("idle_stride", idle_stride)):
            if value < 1:
                raise invalid(name, value, "be at least 1", "1 measures every batch")
        if not sampler.aggressive:
            cure = "call sample_priorities for the basic variant"
            raise invalid("sampler.aggressive", False, "be True", cure)
        self.sampler, self.layers = sampler, layers
        self.listener = LayerPriorities(model, layers)
        self.gradient = AggregatedGradient(self.listener.parameters, sampler.num_samples)
        self.stride, self.idle_stride, self._batches = stride, idle_stride, 0
        self._weights, self._measures, self._follows = np.ones(0), False, False

    @property
    def _stride(self) -> int:
        if self.sampler.rule != "stochastic":
            return 1
        return self.stride if self.sampler.is_open else self.idle_stride

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draw the next batch and, in its turn, point the listener along the present gradient."""
        indices, self._weights = self.sampler.next_batch()
        phase, last = self._batches % self._stride, self._stride - 1
        self._measures = phase == 0
        self._follows = self._measures or (phase == last and not self.sampler.is_open)
        self._batches += 1
        if self._measures and self.gradient.is_known:
            self.gradient.to_device()
            self.listener.direction = self.gradient.total
        return indices, self._weights

    def on_batch(self, model: nn.Module, indices: NDArray[np.int64], losses: Tensor) -> int:
        """Hand the batch's priorities to the sampler and its gradient to the aggregate.

        Parameters
        ----------
        model : nn.Module
            With the gradient of ``(weights * losses).mean()`` in its parameters.
        indices : ndarray of int64, shape (batch,)
            From :meth:`next_batch`.
        losses : Tensor, shape (batch,)
            Not used: priorities come from the gradients.

        Returns
        -------
        int
            Examples that went through a forward pass besides: the batch if the priorities of
            all layers were measured, else none.

        Notes
        -----
        Priorities count along the gradient before this batch (Algorithm 1, line 20). The very
        first batch has none to follow and only starts the aggregate. With weights other than 1
        the aggregate takes the weighted sum, which is the unbiased one. A batch stands for
        those passed over since the one before, so that the aggregate remembers an epoch.
        """
        if not self._follows:
            return 0
        measured = self.listener.collect()
        self.listener.direction = {}  # the next batch may be another sampler's
        if measured is not None:
            factors = self._weights / (self.gradient.scale * len(indices))
            priorities, norms = torch.stack(measured).cpu().numpy() / factors
            self.sampler.update(indices, priorities, norms)
        self.gradient.absorb(len(indices) * self._stride)
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
        """Compute the gradient and then the priority of all examples: the paper's first step.

        Costs about two epochs; without it the first epoch is taken in turn instead.

        Parameters
        ----------
        model : nn.Module
            Runs in evaluation mode and is left as it was, gradients included.
        loss_fn : callable
            ``loss_fn(outputs, targets)`` with one loss per example.
        inputs, targets : Tensor, shape (num_samples, ...)
            The whole local data set.
        batch_size : int
            Examples at a time; no influence on the result.
        """
        self.listener.direction = {}
        priorities, total = all_priorities(
            model, loss_fn, inputs, targets, names=self.gradient.parameters, batch_size=batch_size
        )
        self.gradient.total, self.gradient.covered = total, float(self.num_samples)
        self.sampler.update(np.arange(self.num_samples), priorities)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: what a training loop hands over are losses, not priorities."""

    def summary(self) -> dict[str, float]:
        """Describe the sampling in a few figures, as the sampler does."""
        return self.sampler.summary()

    def state_dict(self) -> StateDict:
        """Return the state of the sampler and the aggregated gradient."""
        batches: StateDict = {"batches": self._batches}
        return self.sampler.state_dict() | self.gradient.state_dict() | batches

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        if not isinstance(state.get("batches"), int):
            raise ValueError("state counts no batches: start afresh.")
        before = self.gradient.state_dict()
        self.gradient.load_state_dict(state)
        try:
            self.sampler.load_state_dict(state)
        except ValueError:
            self.gradient.load_state_dict(before)
            raise
        self._batches = int(state["batches"])

    def close(self) -> None:
        """Stop listening to the model."""
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
