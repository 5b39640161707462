"""An example order that belongs to a node for its whole life."""

import numpy as np
from flwr.app import Context

from flwr_hetero import keys
from flwr_hetero.sampler import OrderedSampler
from flwr_hetero.task.client import Node
from flwr_hetero.task.settings import Settings


def lifelong_order(
    node: Node,
    settings: Settings,
    context: Context,
    method: str,
    *,
    num_units: int = 0,
    unit: str = "batch",
) -> OrderedSampler:
    """Make the sampler of a node's order, with a seed of the node's own that never changes.

    Parameters
    ----------
    node : Node
        Its examples are ordered.
    settings : Settings
        The app's; batch size and seed count.
    context : Context
        Says which partition the node has.
    method : str
        As of :class:`~flwr_hetero.sampler.OrderedSampler`.
    num_units : int
        Units in the order, if there are as many examples; 0: by the batch size.
    unit : {"batch", "example"}
        What is ordered.

    Returns
    -------
    OrderedSampler
        Without the state of earlier rounds.
    """
    partition_id = int(context.node_config[keys.PARTITION_ID])
    words = np.random.SeedSequence([settings.seed, partition_id]).generate_state(1)
    return OrderedSampler(
        len(node.examples),
        settings.batch_size,
        seed=int(words[0]),
        method=method,
        unit=unit,
        num_units=min(num_units, len(node.examples)) or None,
    )
