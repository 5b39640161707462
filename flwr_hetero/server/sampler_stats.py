"""What the nodes' samplers do, for the history and its plots."""

import math
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from flwr_hetero import keys
from flwr_hetero.server.wrapper import Wrapper


class SamplerFacts(Wrapper):
    """Put the mean of what nodes say of their samplers into each round of the history.

    A node says it in a ``flwr-hetero.sampler`` record of numbers; the wrapped strategy does not
    see it. Entries called ``group.name`` become one plot per group with a line per name; only
    figures of one kind belong into a group.

    Parameters
    ----------
    strategy : Strategy, optional
        What aggregates; FedAvg if left out.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> SamplerFacts(FedAdam()).round_info()
    {}
    """

    name: ClassVar[str] = "sampler"
    decides = frozenset({"sampler facts"})

    def __init__(self, strategy: Strategy | None = None) -> None:
        super().__init__(strategy)
        self._info: dict[str, Any] = {}

    def on_replies(self, server_round: int, replies: list[Message]) -> list[Message]:
        """Take the records out and average them over the nodes that sent one."""
        found: dict[str, list[float]] = {}
        for reply in replies:
            record = reply.content.config_records.get(keys.SAMPLER)
            if record is None:
                continue
            del reply.content[keys.SAMPLER]
            for name, value in record.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    found.setdefault(name, []).append(float(value))
        self._info = {}
        for name, values in sorted(found.items()):
            group, _, part = name.partition(".")
            mean = float(np.mean(values))
            if part:
                self._info.setdefault(group, {})[part] = mean
            else:
                self._info[name] = mean
        return replies

    def round_info(self) -> dict[str, Any]:
        """Return the means of this round."""
        return self._info
