"""The node's half of every method: one mod around the ClientApp, one loader inside it."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Message

from flwr_hetero._flwr import ClientAppCallable
from flwr_hetero.client.data_pass import is_ours
from flwr_hetero.client.handler import say_once
from flwr_hetero.client.samplers import SamplerMaker, attend, with_sampler
from flwr_hetero.client.step_loader import MOD, StepLoader, asked_steps
from flwr_hetero.client.timing import timing
from flwr_hetero.client.work import current_work
from flwr_hetero.errors import check_count


class Hetero:
    """The mod ``hetero`` and what a ClientApp's function asks of it.

    As a mod, ``ClientApp(mods=[hetero])``, it adds to a reply how long the node took, the steps
    that it did, and what its samplers have to say; it keeps the samplers' state and the place in
    the pass over the data. Flower's strategies ignore what it adds.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_hetero.mod import Hetero, hetero
    >>> app = ClientApp(mods=[hetero])
    >>> isinstance(hetero, Hetero)
    True
    """

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; Flower calls this."""
        return timing(message, context, call_next)

    def batches(
        self,
        loader: Iterable[Any],
        msg: Message | Mapping[str, Any],
        sampler: SamplerMaker | None = None,
        model: Any = None,
    ) -> StepLoader:
        """Give the batches that the server asks for; the next message goes on where this one ends.

        Parameters
        ----------
        loader, msg : iterable of batches, Message or mapping
            As of :class:`StepLoader`, which is returned. A sampler of this package in the loader
            is kept and follows the server.
        sampler : class of flwr_hetero.sampler, optional
            Put in place of the loader's own; or a function of the number of samples and the batch
            size that makes one. Train then with ``criterion()`` of the result.
        model : nn.Module, optional
            The model that is trained, for samplers that learn from its gradients.

        Raises
        ------
        ValueError
            If an argument is none of these, or the model is left out where it is needed.

        Examples
        --------
        >>> from flwr_hetero.mod import hetero
        >>> [len(batch) for batch in hetero.batches([[1, 2], [3, 4], [5]], {"num-steps": 4})]
        [2, 2, 1, 2]
        """
        if sampler is not None:
            loader = with_sampler(loader, sampler, model)
        steps = StepLoader(loader, msg)
        if is_ours(own := getattr(loader, "batch_sampler", None)):
            attend(own, msg, model)
        return steps

    def num_steps(
        self,
        msg: Message | Mapping[str, Any],
        default: int | None = None,
        batch_size: int | None = None,
    ) -> int | None:
        """Return the steps that the server asks for, else ``default``: for code without a loader.

        With this call the node states that it takes them: the mod reports them, and with the
        examples of a step, ``batch_size``, the examples processed.

        Examples
        --------
        >>> from flwr_hetero.mod import hetero
        >>> hetero.num_steps({"num-steps": 4}, default=20), hetero.num_steps({}, default=20)
        (4, 20)
        """
        for name, value in (("default", default), ("batch_size", batch_size)):
            if value is not None:
                check_count(name, value, 1)
        asked = asked_steps(msg)
        steps = default if asked is None else asked
        if (work := current_work()) is None:
            say_once(f"without its mod hetero.num_steps reports nothing to the server: {MOD}")
        elif steps is not None:
            work.state(steps, batch_size, default)
        return steps


hetero = Hetero()
"""The node's half: ``ClientApp(mods=[hetero])``, ``hetero.batches(loader, msg)``."""
