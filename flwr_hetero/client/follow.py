"""What a sampler and the server say to each other, in one line of a ClientApp."""

from typing import Any, Protocol, cast

from flwr.app import ConfigRecord, Context, Message

from flwr_hetero.client.handler import current_handler
from flwr_hetero.client.keep import keep
from flwr_hetero.errors import invalid


class Led(Protocol):
    """A batch sampler, as seen from here."""

    needs_model: bool

    def read_instruction(self, records: Any) -> None:
        """Follow an instruction."""

    def reply_records(self) -> Any:
        """Return the records of the reply."""

    def train_model(self, model: Any) -> None:
        """Name the model."""

    def settle(self) -> None:
        """End an iteration that is still open."""


class Following:
    """A sampler that follows the server for the time of a message."""

    def __init__(self, sampler: Led) -> None:
        self._sampler = sampler

    @property
    def records(self) -> dict[str, ConfigRecord]:
        """Records for the reply, after training: ``RecordDict({..., **following.records})``."""
        self._sampler.settle()
        found = self._sampler.reply_records().items()
        return {name: ConfigRecord(dict(record)) for name, record in found}


def follow(
    sampler: object, msg: Message, context: Context, model: object = None, name: str = "sampler"
) -> Following:
    """Let a sampler follow the server's instruction, answer it, and keep its state.

    For samplers that work with a strategy: ``OrderedSampler`` with ``CDGraB``, and
    ``TopLossSampler`` with ``BiasedLocalSGD``. Train with
    :class:`~flwr_hetero.sampler.SampledLoss`; with :func:`~flwr_hetero.mod.timing` or
    :func:`~flwr_hetero.mod.emulated_device` around the ClientApp the answer is added to the reply
    by itself, else the returned object has it as ``records``.

    Parameters
    ----------
    sampler : BatchSampler
        The DataLoader's ``batch_sampler``; kept as :func:`~flwr_hetero.mod.keep` does.
    msg : Message
        The message passed to the ClientApp.
    context : Context
        The context passed with it.
    model : nn.Module, optional
        The model that is trained, for ``OrderedSampler``: it learns from the gradients.
    name : str
        Name of the state, if there are several.

    Raises
    ------
    ValueError
        If an argument is none of these, or the model is left out where it is needed.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_hetero.fleet import DeviceProfile, LocalGrid
    >>> from flwr_hetero.sampler import TopLossSampler
    >>> grid = LocalGrid(ClientApp(), [DeviceProfile()])  # so that a message can be made
    >>> content = RecordDict({"config": ConfigRecord({"fast": True, "fast-share": 0.5})})
    >>> sampler = TopLossSampler(10, 5)
    >>> follow(sampler, Message(content, 1, "train"), Context(1, 1, {}, RecordDict(), {})).records
    {}
    >>> sampler.fast, sampler.share
    (True, 0.5)
    """
    if not isinstance(msg, Message):
        raise invalid("msg", type(msg).__name__, "be the message passed to the ClientApp")
    keep(sampler, context, name)
    led = cast(Led, sampler)
    lead(led, msg, model)
    return Following(led)


def lead(sampler: Led, msg: Message, model: object) -> None:
    """Let a sampler follow an instruction; a mod adds its answer to the reply."""
    if sampler.needs_model and model is None:
        hint = "hetero.batches(loader, msg, model=model)"
        raise invalid("model", model, "be the model whose gradients the sampler uses", hint)
    sampler.train_model(model)
    sampler.read_instruction(dict(msg.content.config_records.items()))
    if (handler := current_handler()) is not None:
        handler.records[id(sampler)] = sampler.reply_records
