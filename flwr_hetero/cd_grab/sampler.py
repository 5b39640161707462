"""Visit a node's data in an order that learns from gradients: CD-GraB and its baselines."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flwr_hetero import keys
from flwr_hetero.cd_grab.gradients import sketch_gradients
from flwr_hetero.cd_grab.node_order import NodeOrder, OwnMean, OwnPairs, Reshuffled, ServedOrder
from flwr_hetero.cd_grab.wire import Terms, pack_vectors, read_answer, read_terms, write_report
from flwr_hetero.client.batch_sampler import BatchSampler
from flwr_hetero.errors import check_choice, invalid
from flwr_hetero.state_dict import StateDict, check_state, entries_below

METHODS: dict[str, type[NodeOrder]] = {
    "cd-grab": ServedOrder,
    "id-grab": OwnPairs,
    "id-grab-mean": OwnMean,
    "d-rr": Reshuffled,
    "shuffle-once": NodeOrder,
}


class OrderedSampler(BatchSampler):
    """Visit fixed units of the data, each once a pass, in an order that is improved every pass.

    The data are split at random into units of about equal size: whole batches or single examples.
    After each batch :meth:`observe` takes the gradients of its units.

    Parameters
    ----------
    num_samples : int
        Size N of the local data set.
    batch_size : int
        Examples per batch. No example is left out, so that batches may differ by one.
    seed : int, keyword-only
        Seed of the split and of ``d-rr``; each node needs its own, for its whole life.
    method : str
        ``cd-grab``: from the order server (:meth:`follow`, :meth:`report`). ``id-grab``: the node
        balances its own pairs. ``id-grab-mean``: GraB, against the mean of the pass before.
        ``d-rr``: a new random order each pass. ``shuffle-once``: always the first order.
    unit : {"batch", "example"}
        What is ordered.
    num_units : int, optional
        Batches in a pass; default N / batch_size, rounded. Nodes that are to be balanced together
        need equal numbers, and so batches of unequal size if they hold unequal amounts of data.

    Raises
    ------
    ValueError
        If a number is out of range, or a name unknown.

    Notes
    -----
    Weights make up for units of unequal size: a pass is the mean over all examples. Without an
    order server ``cd-grab`` stays with its first order.

    References
    ----------
    Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated Training",
    NeurIPS 2023, Algorithm 3.

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
        self.seed = seed
        self.method = check_choice("method", method, METHODS)
        self.unit = check_choice("unit", unit, ("batch", "example"))
        if num_units is not None and (unit == "example" or not 1 <= num_units <= num_samples):
            raise invalid("num_units", num_units, f"lie in 1..{num_samples}, with unit='batch'")
        usual = num_samples if unit == "example" else max(1, round(num_samples / batch_size))
        self._split(num_units or usual)

    def _split(self, num_units: int) -> None:
        """Split the examples into units, and begin a first pass through them."""
        shuffled = np.random.default_rng(self.seed).permutation(self.num_samples)
        self.units = np.array_split(shuffled, num_units)
        self.node_order = METHODS[self.method](num_units, self.seed)
        self.terms = Terms()

    @property
    def units_per_batch(self) -> int:
        """Units in a batch; the last batch of a pass may have fewer."""
        return self.batch_size if self.unit == "example" else 1

    def __len__(self) -> int:
        """Batches per pass."""
        return -(-len(self.units) // self.units_per_batch)

    def next_batch(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Take the next units of the order; a new pass begins where the last one ended."""
        chosen = self.node_order.next_units(self.units_per_batch)
        indices = np.concatenate([self.units[unit] for unit in chosen])
        weight = len(indices) / len(chosen) * len(self.units) / self.num_samples
        return indices, np.full(len(indices), weight)

    def update(self, indices: NDArray[np.int64], scores: NDArray[np.float64]) -> None:
        """Do nothing: orders are made from gradients, see :meth:`observe`."""

    @property
    def watching(self) -> bool:
        """Whether :meth:`observe` needs the gradients of the batch just drawn."""
        return self.node_order.watching

    def observe(self, gradients: Tensor) -> None:
        """Learn from the gradients (num_units, dim) of the units in the batch just drawn.

        They are copied; ``cd_grab.gradients`` makes them. One finite row per unit, in the order
        of the batch, else ValueError.
        """
        if not self.watching:
            return
        drawn = self.node_order.position
        expected = (drawn - 1) % self.units_per_batch + 1 if drawn else 0
        if gradients.ndim != 2 or len(gradients) != expected:
            raise invalid("gradients", tuple(gradients.shape), f"have shape ({expected}, dim)")
        vectors = sketch_gradients(gradients, self.terms.sketch_size, self.terms.sketch_seed)
        if not np.isfinite(vectors).all():
            raise invalid("gradients", "nan or inf", "be finite", "lower the learning rate")
        self.node_order.observe(vectors)

    # --- the order server --------------------------------------------------------------

    def follow(self, instruction: Mapping[str, Any]) -> None:
        """Follow the ``ORDER`` record of a training instruction, which may be empty.

        What does not fit this node's order is ignored: the next report shows it to the server.
        """
        if not instruction or not isinstance(self.node_order, ServedOrder):
            return
        terms = read_terms(instruction)
        num_units = min(terms.num_units, self.num_samples) or len(self.units)
        if self.unit == "batch" and num_units != len(self.units):
            self._split(num_units)
        if terms[1:3] != self.terms[1:3]:  # another sketch
            self.node_order.forget()
        self.terms = terms
        self.node_order.follow(read_answer(instruction, len(self.units)))

    def report(self) -> dict[str, int | float | str | bytes]:
        """Return the ``ORDER`` record of the reply to it; empty for other methods."""
        if not isinstance(self.node_order, ServedOrder):
            return {}
        return write_report(self.terms, self.node_order.report())

    # --- state -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return sizes, settings, terms and the order."""
        own: StateDict = {"num_units": len(self.units)}
        own |= {name: getattr(self, name) for name in _SETTINGS}
        own |= {f"terms.{name}": value for name, value in self.terms._asdict().items()}
        own |= {f"order.{name}": value for name, value in self.node_order.state_dict().items()}
        return super().state_dict() | own

    def load_state_dict(self, state: StateDict) -> None:
        """Continue where ``state_dict`` was taken; see the parent for errors."""
        owner, names = type(self).__name__, [f"terms.{name}" for name in Terms._fields]
        check_state(state, {"num_units": int, **dict.fromkeys(names, int)}, owner)
        num_units, terms = int(state["num_units"]), Terms(*(int(state[name]) for name in names))
        wrong = [name for name in _SETTINGS if state.get(name) != getattr(self, name)]
        if wrong or not 1 <= num_units <= self.num_samples or min(terms) < 0:
            rule = f"{self.method}, {self.unit}, seed {self.seed}, {self.num_samples} examples"
            raise ValueError(f"state of {owner} must be of {rule}.")
        order = METHODS[self.method](num_units, self.seed)
        order.load_state_dict(entries_below("order.", state))
        super().load_state_dict(state)
        self._split(num_units)
        self.node_order, self.terms = order, terms


_SETTINGS = ("method", "unit", "seed")


class HerdingProbe:
    """Sketch every unit's gradient for a :class:`~flwr_hetero.strategy.HerdingMeter`.

    Parameters
    ----------
    instruction : mapping
        The ``HERDING`` record of a training instruction; without one the probe is off.

    Examples
    --------
    >>> import torch
    >>> probe = HerdingProbe({"sketch-size": 4, "sketch-seed": 0})
    >>> probe.see(torch.ones(2, 100))
    >>> len(probe.report(num_units=2)["vectors"])
    16
    >>> HerdingProbe({}).on
    False
    """

    def __init__(self, instruction: Mapping[str, Any]) -> None:
        self.on = bool(instruction)
        self._instruction = instruction
        self._seen: list[NDArray[np.floating]] = []

    def see(self, gradients: Tensor) -> None:
        """Take the gradients (num_units, dim) of a batch's units, in the order of the visit."""
        if self.on:
            size, seed = (self._instruction[key] for key in (keys.SKETCH_SIZE, keys.SKETCH_SEED))
            self._seen.append(sketch_gradients(gradients, size, seed))

    def report(self, num_units: int) -> dict[str, int | float | bytes]:
        """Return the ``HERDING`` record of the reply; empty if the probe is off."""
        if not self._seen:
            return {}
        vectors = np.concatenate(self._seen)
        data, scale = pack_vectors(vectors)
        return {
            keys.NUM_UNITS: num_units,
            keys.SKETCH_SIZE: vectors.shape[1],
            keys.VECTORS: data,
            keys.SCALE: scale,
        }
