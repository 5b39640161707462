"""Visit a node's data in an order that learns from gradients: CD-GraB and its baselines."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import flat_gradient, sketch_gradients
from flwr_hetero.cd_grab.node_order import METHODS, NO_VECTORS, ServedOrder
from flwr_hetero.cd_grab.wire import Terms, read_answer, read_terms, write_report
from flwr_hetero.client.batch_sampler import Batch, BatchSampler
from flwr_hetero.client.weighted_loss import on_backward
from flwr_hetero.errors import check_choice, check_count, invalid
from flwr_hetero.state_dict import StateDict, check_state, entries_below


class OrderedSampler(BatchSampler):
    """Visit fixed units of the data, each once a pass, in an order that is improved every pass.

    The data are split at random into units of about equal size: whole batches or single examples.
    The gradients of whole batches come from :class:`~flwr_hetero.sampler.WeightedLoss`, after
    :func:`flwr_hetero.mod.follow`; others are passed to :meth:`observe` after each batch. The
    weights make a pass the mean over all examples. Cooper et al., NeurIPS 2023, Algorithm 3.

    Parameters
    ----------
    num_samples, batch_size : int
        As for all samplers. No example is dropped, so that batches may differ by one.
    seed : int, keyword-only
        Seed of the split and of ``d-rr``. Each node needs another seed, and the same in all rounds.
    method : {"cd-grab", "id-grab", "d-rr", "shuffle-once"}
        ``cd-grab``: orders of the order server; without one always the first order. ``id-grab``:
        the node balances its own pairs. ``d-rr``: a new random order each pass.
        ``shuffle-once``: always the first order.
    unit : {"batch", "example"}
        What is ordered.
    num_units : int, optional
        Batches in a pass; default N / batch_size, rounded. Only nodes with equal numbers are
        balanced together; with unequal amounts of data their batches then differ in size.

    Examples
    --------
    >>> import torch
    >>> gradients = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    >>> sampler = OrderedSampler(4, batch_size=4, method="id-grab", unit="example")
    >>> for _ in range(2):
    ...     indices, weights = sampler.next_batch()
    ...     sampler.observe(gradients[indices])
    >>> torch.cumsum(gradients[indices], 0).abs().max().item()
    1.0
    """

    settings = (*BatchSampler.settings, "method", "unit", "seed")
    learns = True
    hint = (
        "call hetero.batches(loader, msg, model=model) or follow(loader.batch_sampler, msg, "
        "context, model), and take as loss: criterion = WeightedLoss(loader.batch_sampler)"
    )

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        method: str = "cd-grab",
        unit: str = "batch",
        num_units: int | None = None,
    ) -> None:
        super().__init__(num_samples, batch_size, seed=seed)
        self.seed = int(seed)
        self.method = check_choice("method", method, METHODS)
        self.unit = check_choice("unit", unit, ("batch", "example"))
        largest = 0 if unit == "example" else num_samples
        if num_units is not None and check_count("num_units", num_units, 1) > largest:
            raise invalid("num_units", num_units, f"lie in 1..{num_samples}, with unit='batch'")
        default = num_samples if unit == "example" else max(1, round(num_samples / batch_size))
        # The last batch of a pass may have fewer units.
        self.units_per_batch = self.batch_size if unit == "example" else 1
        self.needs_model = unit == "batch" and METHODS[method].learns
        # Whether an order server leads the sampler.
        self._is_served = False
        # Whether the gradients of a batch were wanted.
        self._was_watched = False
        # Whether a WeightedLoss passes its batches.
        self._has_loss = False
        self._parameters: list[nn.Parameter] = []
        self._hook: RemovableHandle | None = None
        self._split(num_units or default)

    def _split(self, num_units: int) -> None:
        """Split the examples into units, and begin a first pass through them."""
        shuffled = np.random.default_rng(self.seed).permutation(self.num_samples)
        self.units = np.array_split(shuffled, num_units)
        self.node_order = METHODS[self.method](num_units, self.seed)
        self.terms = Terms()
        # State of the order when the last instruction came.
        self._begun: StateDict = {}
        # Position in the order after the last batch that was passed to the loss.
        self._trained = 0

    def __len__(self) -> int:
        """Batches per pass."""
        return -(-len(self.units) // self.units_per_batch)

    def next_batch(self) -> Batch:
        """Take the next units of the order; a new pass begins where the last one ended."""
        before = self.node_order.position
        # Alg. 3, l. 3: visit unit pi_i(j)
        chosen = self.node_order.next_units(self.units_per_batch)
        if self.node_order.position <= before:
            self._trained = 0
        self._was_watched |= self.watching
        indices = np.concatenate([self.units[unit] for unit in chosen])
        return indices, self._weights(len(indices), len(chosen))

    def _weights(self, num_examples: int, num_units: int) -> NDArray[np.float64]:
        # Units differ in size, but a pass is to be the mean over all examples.
        weight = num_examples / num_units * len(self.units) / self.num_samples
        return np.full(num_examples, weight)

    def batches_left(self) -> int:
        """Return the number of batches that are left of a pass; a whole pass if none is."""
        left = len(self.units) - self.node_order.position
        return -(-(left or len(self.units)) // self.units_per_batch)

    def begin_pass(self) -> None:
        """Prepare for an iteration, which may draw ahead."""
        if not self.continues:
            self._trained = self.node_order.position
        super().begin_pass()

    def give_back(self) -> None:
        """Return to the first batch that a DataLoader's workers drew ahead for no training."""
        if self._has_loss:
            self.node_order.position = self._trained
        elif self._was_trained and self.watching:
            self.node_order.position = self.node_order.num_seen

    @property
    def watching(self) -> bool:
        """Whether :meth:`observe` needs the gradients of the batch just drawn."""
        return self.node_order.watching

    def observe(self, gradients: Tensor) -> None:
        """Learn from the gradients (num_units, dim) of the units in the batch just drawn.

        The rows, which ``cd_grab.gradients`` can compute, are copied. ValueError unless there is
        one finite row per unit.
        """
        if not self.watching:
            return
        expected = min(self.units_per_batch, len(self.units) - self.node_order.num_seen)
        if gradients.ndim != 2 or len(gradients) != expected:
            raise invalid("gradients", tuple(gradients.shape), f"have shape ({expected}, dim)")
        # Alg. 3, l. 5: the vectors are sent with the reply.
        vectors = sketch_gradients(gradients, self.terms.sketch_size, self.terms.sketch_seed)
        if not np.isfinite(vectors).all():
            raise invalid("gradients", "nan or inf", "be finite", "lower the learning rate")
        self.node_order.observe(vectors)
        super().mark_trained()

    def train_model(self, model: nn.Module | None) -> None:
        """Take the gradients of this model; without a model, :meth:`observe` is called."""
        parameters = [] if model is None else model.parameters()
        self._parameters = [p for p in parameters if p.requires_grad]

    def watch(self, indices: NDArray[np.int64], losses: Tensor) -> None:
        """Observe the gradient of these losses in their backward pass."""
        # The first example of a unit identifies it, and so its position in the order.
        firsts = np.array([self.units[unit][0] for unit in self.node_order.order])
        start = int(np.flatnonzero(firsts == indices[0])[0])
        self._has_loss = True
        if start == self._trained:
            self._trained = min(start + self.units_per_batch, len(self.units))
            # A batch may be fetched before the end of a loop, and trained after it.
            self.node_order.position = max(self.node_order.position, self._trained)
        # The losses of the last batch may have had no backward pass.
        if self._hook is not None:
            self._hook.remove()
        if not (self._parameters and self.needs_model and losses.requires_grad and self.watching):
            return

        def learn(gradients: Sequence[Tensor | None] | None, _: float) -> None:
            # After a batch without a gradient no later unit of the pass has its partner.
            if start == self.node_order.num_seen:
                gradients = gradients or [None] * len(self._parameters)
                self.observe(flat_gradient(gradients, self._parameters))

        self._hook = on_backward(losses, self._weights(len(indices), 1), self._parameters, learn)

    def mark_trained(self) -> None:
        """Do nothing: the sampler learns only from an observed gradient."""

    def why_not_trained(self) -> str:
        """Return that gradients are missing, if any are wanted."""
        wanted = self.node_order.learns and (self.method != "cd-grab" or self._is_served)
        if wanted and self._was_watched and not self._was_trained:
            return f"OrderedSampler learns nothing: no gradient was observed; {self.hint}"
        return ""

    def read_instruction(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Follow the order server (Alg. 3, l. 2)."""
        self.follow(records.get(keys.ORDER, {}))

    def reply_records(self) -> dict[str, Mapping[str, Any]]:
        """Return what the order server asked for (Alg. 3, l. 5)."""
        record = self.report() if self._is_served else {}
        return {keys.ORDER: record} if record else {}

    def follow(self, instruction: Mapping[str, Any]) -> None:
        """Follow the ``ORDER`` record of a training instruction, which may be empty.

        An order of another length is ignored; the next report tells the server the length here.
        """
        self._is_served = bool(instruction)
        if not instruction or not isinstance(self.node_order, ServedOrder):
            return
        terms = read_terms(instruction)
        num_units = min(terms.num_units, self.num_samples) if self.unit == "batch" else 0
        has_other_sketch = terms[1:3] != self.terms[1:3]
        # Vectors of different sketches cannot be compared, so the pass starts again.
        if num_units not in (0, len(self.units)) or has_other_sketch:
            self._split(num_units or len(self.units))
        # Equal terms mean that a round is repeated after a resume: undo its first run.
        if self._begun and terms == self.terms:
            self.node_order.load_state_dict(self._begun)
        self._begun = self.node_order.state_dict() | {"diffs": NO_VECTORS}
        self.terms = terms
        self.node_order.follow(read_answer(instruction, len(self.units)))

    def report(self) -> dict[str, int | float | str | bytes]:
        """Return the ``ORDER`` record of the reply to it; empty for other methods."""
        if not isinstance(self.node_order, ServedOrder):
            return {}
        return write_report(self.terms, self.node_order.report())

    def state_dict(self) -> StateDict:
        """Return sizes, settings, terms and the order."""
        state = super().state_dict() | {"num_units": len(self.units)}
        state |= {f"terms.{name}": value for name, value in self.terms._asdict().items()}
        state |= {f"order.{name}": value for name, value in self.node_order.state_dict().items()}
        state |= {f"begun.{name}": value for name, value in self._begun.items()}
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        check_state(state, {"num_units": int}, "OrderedSampler")
        num_units = int(state["num_units"])
        begun = entries_below("begun.", state)
        order = METHODS[self.method](num_units, self.seed)
        # Both parts are checked before anything changes.
        if begun:
            order.load_state_dict(begun)
        order.load_state_dict(entries_below("order.", state))
        super().load_state_dict(state)
        self._split(num_units)
        self.node_order = order
        self._begun = begun
        self.terms = Terms(**entries_below("terms.", state))  # type: ignore[arg-type]
